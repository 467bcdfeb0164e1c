"""An env server that is cut off and finishes its attempts beside the server that replaces it: each attempt counts once.

Two real env servers, the real dispatcher and ledger; the connection to one server goes through a proxy.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.core.async_calls import cancel_all
from ramify.orchestrate.attempt_dispatcher import AttemptDispatcher
from ramify.orchestrate.connected_source import ConnectedSource
from ramify.orchestrate.env_server_pool import EnvServerPool
from ramify.processes.wire import WireSettings
from ramify.rollout.envserver import EnvServer
from ramify.run.store import Ledger, RunStore
from ramify.run.store.audit import audit
from ramify.run.store.group_state import GroupState
from tests.support.engine import ScriptedEngine, reply_cba, run_engine
from tests.support.orchestrator import World, open_core
from tests.support.processes import async_wait_until as wait_until
from tests.support.proxy import Proxy
from tests.support.tricky_env_server import make_config, task

pytestmark = [pytest.mark.process, pytest.mark.promise]

QUICK = WireSettings(heartbeat_interval=0.1, server_timeout=3.0)
GROUP_REWARDS = frozenset({"rank"})
NUM_ATTEMPTS = 4


class GatedTasks:
    """Tasks whose attempts wait until the file `gate` exists."""

    def __init__(self, gate: Path) -> None:
        self._gate = gate

    async def get_task(self, number: int) -> dict[str, Any]:
        return task(number, gate=str(self._gate))

    def count_started(self) -> int:
        started = self._gate.with_name(f"{self._gate.name}.begun")
        return len(started.read_text().splitlines()) if started.exists() else 0


async def run_with_cut_connection(urls: str, folder: Path, ledger: Ledger, fork_client) -> None:
    pool_config, gate = {"type": "static", "workers": 1}, folder / "gate"
    configs = [
        make_config(urls, folder / name, pool=pool_config, client_timeout=60.0, heartbeat_interval=0.1)
        for name in ("lost", "other")
    ]
    tasks: Any = GatedTasks(gate)
    async with (
        EnvServer(configs[0], prefork_client=fork_client) as lost,
        EnvServer(configs[1], prefork_client=fork_client) as other,
        Proxy(lost.address) as proxy,
        EnvServerPool("it", [proxy.address, other.address], start_timeout=60.0, settings=QUICK) as servers,
    ):
        source = ConnectedSource(
            name="it",
            servers=servers,
            tasks=tasks,
            attempt_timeout=60.0,
            max_tries=1,
            server_timeout=60.0,
            group_rewards=GROUP_REWARDS,
            num_tasks=9,
        )
        core = await open_core(ledger, World(size=2), group_rewards=GROUP_REWARDS)
        state = SimpleNamespace(limit=NUM_ATTEMPTS)
        dispatcher = AttemptDispatcher(
            core,
            {"reverse": source, "wordle": source},
            seed=0,
            get_limit=lambda: state.limit,
            on_group_scored=lambda *_: None,
            on_failure=lambda name, failure: None,
        )
        dispatcher.weights_ready.set()
        running = asyncio.create_task(dispatcher.run())
        await wait_until(lambda: tasks.count_started() == NUM_ATTEMPTS, "attempts on both servers")
        assert [server.num_in_flight for server in servers.servers] == [2, 2]
        proxy.silent, state.limit = True, 0
        await wait_until(lambda: tasks.count_started() == NUM_ATTEMPTS + 2, "the attempts of the lost server elsewhere")
        gate.touch()
        await wait_until(lambda: lost.counts["run_done"] == 2, "the lost server to finish its attempts too")
        await wait_until(lambda: dispatcher.num_in_flight == 0, "the end of all attempts")
        proxy.silent = False
        await wait_until(lambda: len(servers.up_servers) == 2, "the lost server to come back")
        assert other.counts["run_done"] == NUM_ATTEMPTS
        await cancel_all([running])


async def test_attempts_of_a_replaced_env_server_count_once(fork_client, tmp_path):
    with RunStore.open(tmp_path / "run") as store, run_engine(ScriptedEngine(reply_cba)) as engine:
        ledger = Ledger.open(store)
        await run_with_cut_connection(engine.url, tmp_path, ledger, fork_client)
        ended = [attempt for attempt in ledger.attempts() if attempt.state is not GroupState.ISSUED]
        assert len(ended) == NUM_ATTEMPTS and {attempt.num_tries for attempt in ended} == {1}
        assert sorted(attempt.rollout_id or "" for attempt in ended) == sorted(record.id for record in store.rollouts())
        assert audit(ledger, finished=False) == []
