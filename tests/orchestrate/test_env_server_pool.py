"""Several env servers of one source: they share its load, and one that is lost costs no attempt and no result twice."""

import asyncio
from collections import Counter

import pytest

from ramify.core.async_calls import cancel_all
from ramify.core.errors import ConfigInvalid, EnvironmentChanged, Failure, PeerLost, ProcessDied
from ramify.orchestrate.connected_source import build_connected_source
from ramify.orchestrate.env_server_pool import EnvServerPool
from ramify.orchestrate.run_config import TrainSourceConfig
from ramify.rollout.envserver.messages import AddressUpdate
from ramify.rollout.evals.config import EvalSourceConfig
from tests.support.env_server import QUICK, StubEnvServer, reserve_address, restart_at
from tests.support.processes import async_wait_until as until
from tests.support.proxy import Proxy

TASK = {"prompt": "?"}


def make_pool(*addresses: str, start_timeout: float = 30.0, **options) -> EnvServerPool:
    return EnvServerPool("it", addresses, start_timeout=start_timeout, settings=QUICK, **options)


async def run_one(pool: EnvServerPool, id: str) -> str:
    """Run one attempt, and return the name of the server whose result counts."""
    return (await pool.run(TASK, id=id, timeout=30.0)).worker_id


async def test_attempts_go_to_the_least_loaded_server():
    async with StubEnvServer("a") as a, StubEnvServer("b") as b, make_pool(a.address, b.address) as pool:
        a.may_answer.clear()
        b.may_answer.clear()
        attempts = [asyncio.create_task(run_one(pool, str(number))) for number in range(6)]
        await until(lambda: len(a.started) == len(b.started) == 3)
        assert {pool.find_address(id) for id in a.started} == {a.address}
        b.may_answer.set()
        await until(lambda: sum(attempt.done() for attempt in attempts) == 3)  # the pool has the replies of b
        more = [asyncio.create_task(run_one(pool, str(number))) for number in range(6, 9)]
        await until(lambda: len(b.finished) == 6)
        assert await asyncio.gather(*more) == ["b"] * 3 and len(a.started) == 3
        a.may_answer.set()
        assert Counter(await asyncio.gather(*attempts)) == {"a": 3, "b": 3}
        assert [(server.state.value, server.num_done) for server in pool.servers] == [("up", 3), ("up", 6)]


async def test_attempts_of_a_lost_server_run_elsewhere_and_its_late_results_are_dropped():
    lost: list[Failure] = []
    async with (
        StubEnvServer("a") as a,
        StubEnvServer("b") as b,
        Proxy(a.address) as proxy,
        make_pool(proxy.address, b.address, on_lost=lost.append) as pool,
    ):
        a.may_answer.clear()
        b.may_answer.clear()
        attempts = {id: asyncio.create_task(run_one(pool, id)) for id in "wxyz"}
        await until(lambda: len(a.started) == len(b.started) == 2)
        proxy.silent = True
        await until(lambda: len(b.started) == 4)
        assert set(b.started) == set("wxyz") and pool.find_address(a.started[0]) == b.address
        assert [failure.name for failure in lost] == ["PeerLost"] and proxy.address in lost[0].message
        assert [server.address for server in pool.up_servers] == [b.address]
        a.may_answer.set()
        await until(lambda: len(a.finished) == 2)  # it has finished what it was given, beside b
        proxy.silent = False
        await until(lambda: len(pool.up_servers) == 2)  # by now its late replies have arrived
        assert not any(attempt.done() for attempt in attempts.values())
        b.may_answer.set()
        assert await asyncio.gather(*attempts.values()) == ["b"] * 4
        assert pool.servers[0].num_lost == 2


async def test_without_another_server_the_loss_is_the_attempts_failure_and_later_attempts_wait():
    server = await StubEnvServer("a", reserve_address()).__aenter__()
    async with make_pool(server.address) as pool:
        server.may_answer.clear()
        attempt = asyncio.create_task(run_one(pool, "x"))
        await until(lambda: server.started)
        await server.__aexit__()
        with pytest.raises(PeerLost):
            await attempt
        waiting = asyncio.create_task(run_one(pool, "y"))
        assert not await pool.wait_until_up(0.1) and not waiting.done()
        async with await restart_at(server.address, "again"):
            assert await waiting == "again"
            assert await pool.wait_until_up(0.1)
    impatient = make_pool(server.address, start_timeout=0.2)
    with pytest.raises(PeerLost, match=f"the env server of source it was not reachable within .* s: {server.address}"):
        await impatient.start()


async def test_a_server_without_workers_gets_no_attempts_until_it_has_one():
    async with StubEnvServer("a") as a, StubEnvServer("b") as b, make_pool(a.address, b.address) as pool:
        a.health = "booting"
        pool.servers[0].check_now.set()
        await until(lambda: len(pool.up_servers) == 1)
        assert {await run_one(pool, str(number)) for number in range(4)} == {"b"}
        a.health = "ok"
        await until(lambda: len(pool.up_servers) == 2)
        assert {await run_one(pool, str(number)) for number in range(9)} == {"a", "b"}


async def test_addresses_are_added_and_removed_while_attempts_run():
    async with StubEnvServer("old") as old, StubEnvServer("new") as new, make_pool(old.address) as pool:
        old.may_answer.clear()
        in_flight = asyncio.create_task(run_one(pool, "x"))
        await until(lambda: old.started)
        pool.set_addresses([new.address])
        assert await run_one(pool, "y") == "new"
        old.may_answer.set()
        assert await in_flight == "old"
        await until(lambda: len(pool._watch_tasks) == 1)
        pool.set_addresses([])
        waiting = asyncio.create_task(run_one(pool, "z"))
        assert not await pool.wait_until_up(0.05)
        pool.set_addresses([old.address, new.address])
        assert await waiting in ("old", "new")


async def test_every_server_is_told_the_addresses_before_it_gets_attempts_and_after_a_restart():
    update = AddressUpdate(["http://a:1"], {"judge": ["http://b:1"]})
    current = [update]
    server = await StubEnvServer("first", reserve_address()).__aenter__()
    async with make_pool(server.address, get_update=lambda: current[0]) as pool:
        assert server.updates == [update]
        current[0] = AddressUpdate(["http://c:1"])
        pool.servers[0].check_now.set()
        await until(lambda: len(server.updates) == 2)
        await server.__aexit__()
        async with await restart_at(server.address, "second") as again:
            await until(lambda: again.updates == [current[0]])
            assert await run_one(pool, "x") == "second"


async def test_start_needs_one_server_and_fails_at_once_if_none_can_come_up():
    async with StubEnvServer("a") as a, StubEnvServer("b") as b:
        b.health = "broken"
        with pytest.raises(ProcessDied, match="the env server of source it has no worker: no fuel"):
            await make_pool(b.address, start_timeout=60.0, straggler_timeout=0.1).start()
        async with make_pool(a.address, b.address, start_timeout=60.0, straggler_timeout=0.1) as pool:
            assert [server.address for server in pool.up_servers] == [a.address]
            b.health = "ok"
            await until(lambda: len(pool.up_servers) == 2)
        async with make_pool("tcp://127.0.0.1:1", a.address, start_timeout=60.0, straggler_timeout=0.1) as pool:
            assert await run_one(pool, "x") == "a"


async def test_servers_with_different_environments_are_refused():
    source = TrainSourceConfig(name="it", taskset={"id": "it"}, address=["tcp://a:1", "tcp://b:1"])
    async with StubEnvServer() as a, StubEnvServer(environment="other") as b:
        async with make_pool(a.address) as pool:
            assert (await build_connected_source(source, pool)).num_tasks == 10
        with pytest.raises(EnvironmentChanged, match=f"source it have different environments: .* at {b.address}"):
            await make_pool(a.address, b.address).start()


async def test_training_source_without_rewards_is_refused():
    """The env server was started separately, so the run has not loaded its taskset."""
    taskset = {"name": "it", "taskset": {"id": "elsewhere"}}
    async with StubEnvServer() as server, make_pool(server.address) as pool:
        pool.info.rewards.clear()
        await build_connected_source(EvalSourceConfig(**taskset), pool)
        with pytest.raises(ConfigInvalid, match="train source it: its taskset has no reward"):
            await build_connected_source(TrainSourceConfig(**taskset), pool)


async def test_a_server_with_another_environment_that_joins_later_gets_no_attempts():
    failures: list[Failure] = []
    async with (
        StubEnvServer("a") as a,
        StubEnvServer("b", environment="other") as b,
        StubEnvServer("c") as c,
        make_pool(a.address, on_lost=failures.append) as pool,
    ):
        pool.set_addresses([a.address, b.address, c.address])
        await until(lambda: len(pool.up_servers) == 2 and failures)
        assert {await run_one(pool, str(number)) for number in range(6)} == {"a", "c"}
        assert [(failure.name, b.address in failure.message) for failure in failures] == [("EnvironmentChanged", True)]
        assert pool.servers[1].state.value == "down"
        pool.set_addresses([b.address])
        with pytest.raises(EnvironmentChanged, match="different environments"):
            async with asyncio.timeout(30):
                while True:  # until the server was checked
                    await run_one(pool, "x")


async def test_an_attempt_that_waits_for_a_server_fails_when_it_returns_with_another_environment():
    server = await StubEnvServer("a", reserve_address()).__aenter__()
    async with make_pool(server.address, start_timeout=300.0) as pool:
        await server.__aexit__()
        with pytest.raises(PeerLost):
            await run_one(pool, "x")
        retry, attempt = asyncio.create_task(pool.wait_until_up(300.0)), asyncio.create_task(run_one(pool, "y"))
        async with await restart_at(server.address, "again", environment="other"), asyncio.timeout(30):
            assert not await retry
            with pytest.raises(EnvironmentChanged, match="differ from the environment that the run started with"):
                await attempt


async def test_an_attempt_that_its_server_refuses_for_its_environment_runs_elsewhere():
    async with StubEnvServer("a") as a, StubEnvServer("b") as b, make_pool(a.address, b.address) as pool:
        a.refusal = EnvironmentChanged("another environment was loaded")
        assert {await run_one(pool, str(number)) for number in range(4)} == {"b"}
        b.refusal = a.refusal
        with pytest.raises(EnvironmentChanged):
            for number in range(4, 8):
                await run_one(pool, str(number))


async def test_an_attempt_that_the_last_server_refuses_waits_for_one_that_is_restarting():
    async with StubEnvServer("a") as a, StubEnvServer("b") as b, make_pool(a.address, b.address) as pool:
        a.health = "booting"
        pool.servers[0].check_now.set()
        await until(lambda: len(pool.up_servers) == 1)
        b.refusal, b.environment = EnvironmentChanged("another environment was loaded"), "other"
        attempt = asyncio.create_task(run_one(pool, "x"))
        await until(lambda: not pool.up_servers)
        a.health = "ok"
        assert await attempt == "a"


def test_address_is_one_or_several_different_ones():
    source = TrainSourceConfig(taskset={"id": "it"}, address="tcp://a:1")
    assert source.addresses == ["tcp://a:1"] and TrainSourceConfig(taskset={"id": "it"}).addresses == []
    for addresses in ([], ["tcp://a:1", "tcp://a:1"]):
        with pytest.raises((ConfigInvalid, ValueError), match="one or more different addresses"):
            TrainSourceConfig(taskset={"id": "it"}, address=addresses)


async def test_the_failure_of_a_watch_task_is_raised():
    def get_update():
        raise KeyError("no such model")

    async with StubEnvServer("a") as a:
        pool = make_pool(a.address, start_timeout=60.0, get_update=get_update)
        starting = asyncio.create_task(pool.start())
        with pytest.raises(KeyError, match="no such model"):
            await pool.wait_failed()
        await cancel_all([starting])
