"""Workers that die, hang, block, grow and shrink; and a storm of all at once."""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from ramify.envserver import EnvClient, EnvServer
from ramify.errors import RamifyError, RequestCancelled, WorkerDied
from tests.envserver.stage import QUICK, configured, gone, task, until
from tests.wire.proxy import Proxy

DEADLINE = 60.0


def waiting_at(gate) -> int:
    begun = gate.with_name(f"{gate.name}.begun")
    return len(begun.read_text().splitlines()) if begun.exists() else 0


def test_a_worker_that_is_killed_with_forty_rollouts_in_flight_loses_none(shared, tmp_path):
    runner, server, client = shared
    gate = tmp_path / "gate"

    async def scene():
        seen: Counter[str] = Counter()

        async def one(number: int):
            done = await client.run(task(number, gate=str(gate)), id=f"k{number}", timeout=DEADLINE)
            seen[f"k{number}"] += 1
            return done

        rollouts = [asyncio.create_task(one(number)) for number in range(40)]
        await until(lambda: waiting_at(gate) >= 40, "forty rollouts in flight")
        victim = server.pool._ready_workers()[0]
        os.kill(victim.pid, signal.SIGKILL)

        async def dead():
            return any(death.worker == victim.id for death in (await client.health()).deaths)

        await until(dead, "the death in health", 2)
        death = next(death for death in (await client.health()).deaths if death.worker == victim.id)
        assert death.reason == "was killed by signal 9" and death.attempts == 20
        assert all(worker.id != victim.id for worker in (await client.health()).workers)
        gate.touch()
        done = await asyncio.gather(*rollouts)
        assert set(seen.values()) == {1} and len(seen) == 40
        assert [one.episode.traces[0].id for one in done] == [f"k{number}" for number in range(40)]
        assert all(one.episode.traces[0].rewards["right"] == (1.0, 1.0) for one in done)
        assert Counter(one.crashes for one in done) == {0: 20, 1: 20}
        await until(lambda: len(server.pool._ready_workers()) == 2, "the replacement")

    runner.run(scene())


def test_a_cancelled_rollout_takes_its_shells_with_it(shared, tmp_path):
    runner, _, client = shared
    nap = 100_000 + os.getpid()  # by which its processes are known

    async def scene(cancel):
        file = tmp_path / "pid"
        file.unlink(missing_ok=True)
        rollout = asyncio.create_task(client.run(task(1, does="shell", file=str(file), nap=nap), id="shell"))
        await until(lambda: file.exists() and bool(file.read_text().strip()), "the shell")
        shell = psutil.Process(int(file.read_text()))
        tree = [shell, *shell.children(recursive=True)]
        await until(lambda: len(sleeps()) >= 3, "its children")
        tree += sleeps()
        await cancel(rollout)
        await gone(tree, "the tree", 2)
        with pytest.raises((asyncio.CancelledError, RequestCancelled)):
            await rollout

    def sleeps() -> list[psutil.Process]:
        return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", str(nap)]]

    async def by_task(rollout):
        rollout.cancel()

    async def by_id(rollout):
        assert await client.cancel(["shell", "nobody"]) == 1

    runner.run(scene(by_task))
    runner.run(scene(by_id))


def test_a_client_that_disappears_is_forgotten_and_its_rollouts_are_cancelled(shared, tmp_path):
    runner, server, client = shared
    gate = tmp_path / "gate"

    async def scene():
        async with Proxy(server.address) as proxy, EnvClient(proxy.address, settings=QUICK) as other:
            rollouts = [asyncio.create_task(other.run(task(n, gate=str(gate)), id=f"d{n}")) for n in range(4)]
            await until(lambda: waiting_at(gate) == 4, "four rollouts in flight")
            assert (await client.health()).running == 4
            proxy.silent = True
            await until(lambda: server.pool.num_running == 0, "their end", 10)
            await asyncio.gather(*rollouts, return_exceptions=True)

    runner.run(scene())


def test_a_thousand_rollouts_with_kills_cancels_and_faults_are_each_answered_once(shared):
    runner, server, client = shared
    rng = random.Random(3)
    plan = [("raise" if rng.random() < 0.05 else "", rng.random() < 0.05) for _ in range(1000)]
    answers: Counter[str] = Counter()
    killed: list[str] = []

    async def one(number: int, does: str, cancelled: bool, slots: asyncio.Semaphore) -> str:
        async with slots:
            call = asyncio.create_task(client.run(task(number, does=does), id=f"s{number}", timeout=DEADLINE))
            if cancelled:
                await asyncio.sleep(rng.random() * 0.05)
                await client.cancel([f"s{number}"])
            if number in (300, 600):
                victim = server.pool._ready_workers()[0]
                killed.append(victim.id)
                os.kill(victim.pid, signal.SIGKILL)
            try:
                trace = (await call).episode.traces[0]
            except RamifyError as error:
                answers[error.name] += 1
                return error.name
            assert trace.id == f"s{number}"
            failed = [error.name for error in trace.errors]
            assert failed == (["EnvironmentFault"] if does else [])
            answers["done"] += 1
            return "done"

    async def scene():
        slots = asyncio.Semaphore(256)
        outcomes = await asyncio.gather(*(one(n, does, gone, slots) for n, (does, gone) in enumerate(plan)))
        for outcome, (_, cancelled) in zip(outcomes, plan):
            assert outcome == "done" or (outcome == "RequestCancelled" and cancelled)
        stats = await client.stats()
        assert {death.worker for death in (await client.health()).deaths} >= set(killed)
        assert stats.counts["reruns"] > 0
        await until(lambda: server.pool.num_running == 0, "the end of it")
        await until(lambda: len(server.pool._ready_workers()) == 2, "the replacements")

    runner.run(scene())
    assert sum(answers.values()) == 1000
    assert answers["RequestCancelled"] > 0


def test_a_loop_that_stands_still_is_named_and_moved_and_a_reward_that_blocks_is_not(shared, engine, tmp_path):
    runner, server, client = shared
    gate = tmp_path / "gate"

    async def hung():
        config = configured(
            engine.url, tmp_path, hang_timeout=1.5, crashes=2, pool={"type": "static", "workers": 2}, name="hung"
        )
        async with EnvServer(config) as own, EnvClient(own.address, settings=QUICK) as client:
            innocent = [asyncio.create_task(client.run(task(n, gate=str(gate)), id=f"i{n}")) for n in range(4)]
            await until(lambda: waiting_at(gate) >= 4, "four rollouts in flight")
            with pytest.raises(WorkerDied, match=r"2 workers were lost while they ran spin(.|\n)*spin_for_ever"):
                await client.run(task(9, does="spin"), id="spin", timeout=DEADLINE)
            gate.touch()
            done = await asyncio.gather(*innocent)
            assert all(one.episode.traces[0].rewards["right"] == (1.0, 1.0) for one in done)
            assert (await client.stats()).counts["hung"] == 2
            assert "in spin" in own.log_path.read_text()

    async def scene():
        before = {worker.pid for worker in server.pool._ready_workers()}
        blocked = asyncio.create_task(client.run(task(1, does="block"), id="block", timeout=DEADLINE))
        await hung()
        assert (await blocked).crashes == 0
        assert {worker.pid for worker in server.pool._ready_workers()} == before
        assert max((await client.stats()).worker_lag.values()) > 3

    runner.run(scene())


def test_workers_that_do_not_boot_are_named_and_not_started_for_ever(engine, tmp_path):
    async def scene():
        server = EnvServer(
            configured(engine.url, tmp_path, taskset={"boot": "die"}, pool={"type": "static", "workers": 1})
        )
        with pytest.raises(WorkerDied, match=r"3 workers in a row did not boot(.|\n)*exited with code 7(.|\n)*no fuel"):
            await server.start()
        assert server.pool.counts["boot_failures"] == 3
        assert not server.pool.workers

    asyncio.run(scene())


def test_a_worker_that_ends_in_the_middle_of_its_report_did_not_boot(engine, tmp_path):
    async def scene():
        taskset = {"boot": "die while reporting"}
        config = configured(
            engine.url, tmp_path, taskset=taskset, boot_attempts=1, pool={"type": "static", "workers": 1}
        )
        with pytest.raises(WorkerDied, match="exited with code 7 while it booted"):
            await asyncio.wait_for(EnvServer(config).start(), DEADLINE)

    asyncio.run(scene())


def test_a_worker_boots_from_a_process_with_hundreds_of_open_files(engine, tmp_path):
    async def scene():
        with contextlib.ExitStack() as files:
            for _ in range(300):
                files.enter_context(Path(os.devnull).open())
            config = configured(engine.url, tmp_path, boot_timeout=30, pool={"type": "static", "workers": 1})
            async with EnvServer(config) as server:
                assert server.pool.counts["booted"] == 1

    asyncio.run(scene())


def test_an_elastic_pool_follows_the_load_up_and_down(engine, tmp_path):
    gate = tmp_path / "gate"
    pool = {"type": "elastic", "min": 1, "max": 2, "multiplex": 4, "idle": 0.5}

    async def scene():
        config = configured(engine.url, tmp_path, pool=pool)
        async with EnvServer(config) as server, EnvClient(server.address, settings=QUICK) as client:
            assert len(server.pool.workers) == 1
            rollouts = [asyncio.create_task(client.run(task(n, gate=str(gate)), id=f"e{n}")) for n in range(12)]
            await until(lambda: waiting_at(gate) == 8, "two full workers")
            health = await client.health()
            assert (health.running, health.waiting) == (8, 4)
            assert [worker.load for worker in health.workers] == [4, 4]
            gate.touch()
            await asyncio.gather(*rollouts)
            await until(lambda: len(server.pool.workers) == 1, "one worker less")
            decisions = (await client.stats()).decisions
            assert [(one.before, one.after) for one in decisions] == [(0, 1), (1, 2), (2, 1)]
            assert [one.reason.partition(":")[0] for one in decisions] == ["start", "load", "idle"]
            assert not (await client.health()).deaths
            young = next(iter(server.pool.workers.values()))
            server.config.max_age = young.age
            await until(
                lambda: young.id not in server.pool.workers and bool(server.pool._ready_workers()), "a younger worker"
            )
            server.config.max_age = None
            assert (await client.run(task(1), id="after")).worker_id != young.id
            assert (await client.stats()).counts["recycled"] >= 1

    asyncio.run(scene())
