"""Trainers register over the wire, and each gets a token of its own."""

import asyncio

import pytest

from ramify.core.errors import ProcessReplaced
from ramify.orchestrate.core import OrchestratorCore
from ramify.orchestrate.progress import RunProgress
from ramify.orchestrate.trainer_service import TrainerService
from ramify.orchestrate.weight_updates import WeightUpdater
from ramify.processes.wire import WireClient, WireMessage, WireServer
from ramify.run.fencing.token import FencingToken
from ramify.run.store.ledger import Ledger
from ramify.run.store.run_log import RunLog
from ramify.train.batch import PackSpec
from ramify.train.protocol import CheckpointRequest, RegisterReply, RegisterRequest, UnsavedRequest
from tests.support.orchestrator import FakeEngines, World, open_core


async def register(address: str, start_token: FencingToken | None = None) -> RegisterReply:
    """Send the hello of a new trainer."""
    number = start_token.number if start_token is not None else None
    request = RegisterRequest(rank=0, world_size=1, pack_spec=PackSpec(), incarnation=None, start_token=number)
    async with WireClient(address) as client:
        reply = await client.call("hello", WireMessage.encode(request), timeout=10)
        return reply.decode(RegisterReply)


async def open_service(
    ledger: Ledger, on_trainer_replaced, get_keep_values=dict
) -> tuple[OrchestratorCore, TrainerService]:
    core = await open_core(ledger, World())
    service = TrainerService(
        core,
        WeightUpdater(FakeEngines(), lambda version, seconds: None),  # type: ignore[arg-type]
        RunProgress(RunLog(ledger.store)),
        policy="p",
        run="run-id",
        max_steps=4,
        on_trainer_replaced=on_trainer_replaced,
        get_keep_values=get_keep_values,
    )
    return core, service


async def test_failed_saves_are_recorded_once_each(ledger):
    _, service = await open_service(ledger, lambda: None)
    async with WireServer(service.handlers, "tcp://127.0.0.1:0") as server, WireClient(server.address) as client:
        incarnation = (await register(server.address)).incarnation
        for step in (1, 2, 2):
            request = UnsavedRequest(rank=0, incarnation=incarnation, step=step, message=f"step {step}: no room")
            await client.call("unsaved", WireMessage.encode(request), timeout=10)
    progress = service._progress
    assert progress.failure_counts == {"StorageFull": 2}
    assert [failure.message for failure in progress.recent_failures] == ["step 1: no room", "step 2: no room"]


async def test_a_trainer_that_commits_learns_which_checkpoints_were_best(ledger):
    run_log = RunLog(ledger.store)
    _, service = await open_service(ledger, lambda: None, lambda: run_log.values_by_step("eval/it/avg"))
    for step, value in ((0, 0.25), (1, 0.5), (1, 0.75)):
        run_log.log_metrics(step, {"eval/it/avg": value, "eval/other/avg": 1.0}).result()
    async with WireServer(service.handlers, "tcp://127.0.0.1:0") as server, WireClient(server.address) as client:
        incarnation = (await register(server.address)).incarnation
        request = CheckpointRequest(rank=0, incarnation=incarnation, step=0, directory="step_000000-0", digest="")
        reply = await client.call("checkpoint", WireMessage.encode(request), timeout=10)
    assert reply.decode(dict[int, float]) == {0: 0.25, 1: 0.75}


async def test_trainers_that_register_at_once_get_different_tokens(ledger):
    replaced: list[bool] = []
    core, service = await open_service(ledger, lambda: replaced.append(True))
    async with WireServer(service.handlers, "tcp://127.0.0.1:0") as server:
        replies = await asyncio.gather(*(register(server.address) for _ in range(3)), return_exceptions=True)
    incarnations = [reply.incarnation for reply in replies if isinstance(reply, RegisterReply)]
    failures = [getattr(reply, "name", reply) for reply in replies if not isinstance(reply, RegisterReply)]
    assert {reply.run for reply in replies if isinstance(reply, RegisterReply)} == {"run-id"}
    assert len(incarnations) == len(set(incarnations))
    assert max(incarnations) == core.ledger_progress.incarnation == ledger.progress().incarnation == 2
    assert set(failures) <= {"ProcessReplaced"}
    assert len(replaced) == 2


async def test_trainer_of_an_earlier_start_does_not_displace_a_later_one(ledger):
    replaced: list[bool] = []
    core, service = await open_service(ledger, lambda: replaced.append(True))
    async with WireServer(service.handlers, "tcp://127.0.0.1:0") as server:
        first = await register(server.address, FencingToken(1, 0))
        second = await register(server.address, FencingToken(1, 1))
        for stale in (FencingToken(1, 0), FencingToken(0, 7)):
            problem = rf"trainer start {stale} may not act, because the newest is trainer start 1\.1"
            with pytest.raises(ProcessReplaced, match=problem):
                await register(server.address, stale)
        again = await register(server.address, FencingToken(1, 1))  # the reply to its hello was lost
    assert (first.incarnation, second.incarnation, again.incarnation) == (0, 1, 2)
    assert core.ledger_progress.incarnation == 2
    assert len(replaced) == 2
