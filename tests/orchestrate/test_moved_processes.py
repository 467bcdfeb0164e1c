"""Engine and env server of a run move to other addresses while it samples; the address book says where they are."""

import asyncio
import contextlib
from contextlib import AsyncExitStack

import pytest

from ramify.orchestrate.address_book import write_addresses
from ramify.orchestrate.background import measure_env_servers
from ramify.orchestrate.run_context import RunContext
from ramify.orchestrate.status import build_status, list_waits
from ramify.store.audit import audit
from ramify.trace.version import PolicyVersion
from tests.envserver.helpers import wait_until
from tests.orchestrate.test_run_context import ChangingRun
from tests.support.engine import ScriptedEngine, reply_cba, run_engine

pytestmark = pytest.mark.process


def start_engine(stack: contextlib.ExitStack) -> ScriptedEngine:
    return stack.enter_context(run_engine(ScriptedEngine(reply_cba, version=PolicyVersion("tiny"), delay=0.05)))


async def move_everything(run: RunContext, moving_run: ChangingRun, new_engine: ScriptedEngine) -> None:
    """Let the run sample, with each process at a new address than before."""

    async def sample_more(what: str) -> None:
        before = len(run.store.rollouts())
        await wait_until(lambda: len(run.store.rollouts()) >= before + 4, what)

    await sample_more("rollouts at the first addresses")
    async with moving_run.server() as second_server:
        first_address = run.sources["words"].servers.servers[0].address
        env_addresses = [first_address, second_server.address]
        write_addresses(run.config.path, {"inference": [new_engine.url], "env/train/words": env_addresses})
        await wait_until(lambda: len(run.sources["words"].servers.up_servers) == 2, "the second env server")
        await wait_until(lambda: list(run.client.versions) == [new_engine.url], "the new engine")
        await wait_until(lambda: len(new_engine.requests) >= 4, "rollouts on the new engine")
        metrics, servers = measure_env_servers(run), run.sources["words"].servers.servers
        assert metrics.keys() == {f"env_servers/words/127.0.0.1/{name}" for name in ("in_flight", "done", "lost")}
        assert metrics["env_servers/words/127.0.0.1/done"] == sum(server.num_done for server in servers)
        write_addresses(run.config.path, {"env/train/words": [second_server.address]})
        await wait_until(lambda: len(run.sources["words"].servers.servers) == 1, "the first env server to be removed")
        await sample_more("rollouts on the second env server")
        (entry,) = build_status(run)["env_servers"]["words"]
        assert entry["address"] == second_server.address and entry["done"] >= 1
        write_addresses(run.config.path, {"env/train/words": [second_server.address, "tcp://127.0.0.1:1"]})
        await wait_until(lambda: len(run.sources["words"].servers.servers) == 2, "a server that does not exist")
        waits = {wait["waits_for"]: wait for wait in list_waits(run)}
        assert waits["its env server at tcp://127.0.0.1:1"]["who"] == "source words"
        assert not run.progress.failure_counts


def test_run_follows_its_processes_to_new_addresses(tmp_path):
    with contextlib.ExitStack() as engines:
        moving_run = ChangingRun(tmp_path, start_engine(engines))
        new_engine = start_engine(engines)

        async def main() -> None:
            async with moving_run.server() as first_server, AsyncExitStack() as stack:
                config = moving_run.config(first_server.address)
                unbounded = config.orchestrator.model_copy(update={"max_staleness": 400, "max_concurrency": 2})
                run = RunContext(config.model_copy(update={"orchestrator": unbounded}))
                await run.open(stack)
                sampling = asyncio.create_task(run.dispatcher.run())
                try:
                    await move_everything(run, moving_run, new_engine)
                finally:
                    sampling.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await sampling

        asyncio.run(main())
        with moving_run.ledger() as ledger:
            assert audit(ledger, finished=False) == []
