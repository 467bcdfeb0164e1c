"""Trainers register over the wire, and each gets a token of its own."""

import asyncio

from ramify.orchestrate.progress import RunProgress
from ramify.orchestrate.trainer_service import TrainerService
from ramify.orchestrate.weight_updates import WeightUpdater
from ramify.store import RunStore
from ramify.store.ledger import Ledger
from ramify.store.run_log import RunLog
from ramify.train.batch import PackSpec
from ramify.train.protocol import RegisterReply, RegisterRequest
from ramify.wire import WireClient, WireMessage, WireServer
from tests.orchestrate.test_core import World, open_core
from tests.orchestrate.test_weight_updates import FakeEngines


async def register(address: str) -> RegisterReply:
    """Send the hello of a new trainer."""
    request = RegisterRequest(rank=0, world_size=1, pack_spec=PackSpec(), incarnation=None)
    async with WireClient(address) as client:
        reply = await client.call("hello", WireMessage.encode(request), timeout=10)
        return reply.decode(RegisterReply)


def test_trainers_that_register_at_once_get_different_tokens(tmp_path):
    replaced: list[bool] = []

    async def main(ledger: Ledger) -> None:
        core = await open_core(ledger, World())
        service = TrainerService(
            core,
            WeightUpdater(FakeEngines(), lambda version, seconds: None),  # type: ignore[arg-type]
            RunProgress(RunLog(ledger.store)),
            policy="p",
            run="run-id",
            max_steps=4,
            on_trainer_replaced=lambda: replaced.append(True),
        )
        async with WireServer(service.handlers, "tcp://127.0.0.1:0") as server:
            replies = await asyncio.gather(*(register(server.address) for _ in range(3)), return_exceptions=True)
        incarnations = [reply.incarnation for reply in replies if isinstance(reply, RegisterReply)]
        failures = [getattr(reply, "name", reply) for reply in replies if not isinstance(reply, RegisterReply)]
        assert {reply.run for reply in replies if isinstance(reply, RegisterReply)} == {"run-id"}
        assert len(incarnations) == len(set(incarnations))
        assert max(incarnations) == core.ledger_progress.incarnation == ledger.progress().incarnation == 2
        assert set(failures) <= {"ProcessReplaced"}
        assert len(replaced) == 2

    with RunStore.open(tmp_path) as store:
        asyncio.run(main(Ledger.open(store)))
