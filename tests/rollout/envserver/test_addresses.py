"""New addresses of inference servers reach all workers of an env server, rollouts in flight and judges."""

import asyncio
import os
import signal

import pytest

from ramify.rollout.envserver import EnvClient, EnvServer
from ramify.rollout.envserver.messages import AddressUpdate
from tests.support.engine import ScriptedEngine, hang, reply_cba, run_engine
from tests.support.processes import async_wait_until as wait_until
from tests.support.tricky_env_server import QUICK, make_config, task

pytestmark = pytest.mark.process

TIMEOUT = 60.0


async def test_rollouts_in_flight_and_new_workers_use_new_addresses(fork_client, tmp_path, monkeypatch):
    monkeypatch.setenv("RAMIFY_MODEL_JUDGE", "http://old judge-7b")
    pool = {"type": "static", "workers": 1}

    async def main(old, new, stop_old) -> None:
        config = make_config(old.url, tmp_path, pool=pool)
        async with (
            EnvServer(config, prefork_client=fork_client) as server,
            EnvClient(server.address, settings=QUICK) as client,
        ):

            async def run(number: int, **options) -> None:
                result = await client.run(task(number, **options), id=f"r{number}", seed=1, timeout=TIMEOUT)
                assert result.episode.traces[0].rewards["right"] == (1.0, 1.0)

            old.behaviour = hang
            in_flight = asyncio.create_task(run(1))
            await wait_until(lambda: bool(old.requests), "a request in flight")
            update = AddressUpdate([new.url], {"judge": ["http://new"], "other": ["http://elsewhere"]})
            await client.update_addresses(update)
            await asyncio.to_thread(stop_old)
            await in_flight
            await run(2, does="model", file=str(tmp_path / "judge"))
            assert (tmp_path / "judge").read_text() == "http://new judge-7b"
            await client.update_addresses(AddressUpdate(models={"other": ["http://moved"]}))  # the rest stays
            (worker,) = server.pool.workers.values()
            os.kill(worker.pid, signal.SIGKILL)
            await wait_until(lambda: worker.id not in server.pool.workers, "the loss of the worker")
            await run(3, does="model", file=str(tmp_path / "judge_of_new_worker"))
            assert (tmp_path / "judge_of_new_worker").read_text() == "http://new judge-7b"
            assert len(new.requests) == 3 and len(old.requests) == 1
            assert "RAMIFY_MODEL_OTHER" not in os.environ

    old_engine = run_engine(ScriptedEngine(reply_cba))
    old = old_engine.__enter__()
    with run_engine(ScriptedEngine(reply_cba)) as new:
        await main(old, new, lambda: old_engine.__exit__(None, None, None))


@pytest.mark.parametrize("waits_for_process", [True, False])
async def test_worker_that_boots_does_not_wait_for_servers_that_are_gone(fork_client, tmp_path, waits_for_process):
    with run_engine(ScriptedEngine(reply_cba)) as new:
        config = make_config("http://127.0.0.1:9", tmp_path, pool={"type": "static", "workers": 1})
        server = EnvServer(config, prefork_client=fork_client)
        starting = asyncio.create_task(server.start())
        await wait_until(lambda: "pool" in vars(server) and bool(server.pool.workers), "a worker")
        (first,) = server.pool.workers.values()
        if waits_for_process:
            await wait_until(lambda: first._exit_task is not None, "the process of the worker")
        server.pool.update_addresses(AddressUpdate([new.url], {}))
        await asyncio.wait_for(starting, TIMEOUT)
        try:
            if waits_for_process:  # otherwise it may have been started with the new addresses
                assert first.id not in server.pool.workers
            assert server.pool.counts["boot_failures"] == 0
        finally:
            await server.close()
