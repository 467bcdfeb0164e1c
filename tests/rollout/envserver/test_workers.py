"""Workers that are killed, hang or fail to boot, and pools that scale."""

import asyncio
import contextlib
import os
import random
import resource
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from ramify.core.errors import AgentFailed, ProcessDied, RamifyError, RequestCancelled
from ramify.processes.wire import LoopMonitor
from ramify.rollout.envserver import EnvClient, EnvServer
from ramify.rollout.envserver.log import EnvServerLog
from ramify.rollout.envserver.messages import WorkerSpec
from ramify.rollout.envserver.worker_process import WorkerProcess
from tests.support.processes import async_wait_until as wait_until
from tests.support.processes import async_wait_until_ended, is_running
from tests.support.proxy import Proxy
from tests.support.tricky_env_server import QUICK, make_config, task

pytestmark = pytest.mark.process

DEADLINE = 60.0


def count_at_gate(gate) -> int:
    started = gate.with_name(f"{gate.name}.begun")
    return len(started.read_text().splitlines()) if started.exists() else 0


def test_killed_worker_loses_none_of_forty_rollouts(shared, tmp_path):
    runner, server, client = shared
    gate = tmp_path / "gate"

    async def main():
        seen: Counter[str] = Counter()

        async def run_one(number: int):
            done = await client.run(task(number, gate=str(gate)), id=f"k{number}", timeout=DEADLINE)
            seen[f"k{number}"] += 1
            return done

        rollouts = [asyncio.create_task(run_one(number)) for number in range(40)]
        await wait_until(lambda: count_at_gate(gate) >= 40, "forty rollouts in flight")
        victim = server.pool._ready_workers()[0]
        os.kill(victim.pid, signal.SIGKILL)

        async def is_loss_reported():
            return any(loss.worker == victim.id for loss in (await client.health()).deaths)

        await wait_until(is_loss_reported, "the death in health")
        loss = next(loss for loss in (await client.health()).deaths if loss.worker == victim.id)
        assert loss.reason == "was killed by SIGKILL" and loss.attempts == 20
        assert all(worker.id != victim.id for worker in (await client.health()).workers)
        gate.touch()
        results = await asyncio.gather(*rollouts)
        assert set(seen.values()) == {1} and len(seen) == 40
        assert [result.episode.traces[0].id for result in results] == [f"k{number}" for number in range(40)]
        assert all(result.episode.traces[0].rewards["right"] == (1.0, 1.0) for result in results)
        assert Counter(result.crashes for result in results) == {0: 20, 1: 20}
        await wait_until(lambda: len(server.pool._ready_workers()) == 2, "the replacement")

    runner.run(main())


def test_cancelled_rollout_kills_its_shells(shared, tmp_path):
    runner, _, client = shared
    nap = 100_000 + os.getpid()  # by which its processes are known

    async def main(cancel):
        file = tmp_path / "pid"
        file.unlink(missing_ok=True)
        rollout = asyncio.create_task(client.run(task(1, does="shell", file=str(file), nap=nap), id="shell"))
        await wait_until(lambda: file.exists() and bool(file.read_text().strip()), "the shell")
        shell = psutil.Process(int(file.read_text()))
        tree = [shell, *shell.children(recursive=True)]
        await wait_until(lambda: len(list_sleeps()) >= 3, "its children")
        tree += list_sleeps()
        await cancel(rollout)
        await async_wait_until_ended(tree, "the tree")
        with pytest.raises((asyncio.CancelledError, RequestCancelled)):
            await rollout

    def list_sleeps() -> list[psutil.Process]:
        return [
            process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", str(nap)]
        ]

    async def by_task(rollout):
        rollout.cancel()

    async def by_id(rollout):
        assert await client.cancel(["shell", "nobody"]) == 1

    runner.run(main(by_task))
    runner.run(main(by_id))


def test_rollouts_of_a_lost_client_are_cancelled(shared, tmp_path):
    runner, server, client = shared
    gate = tmp_path / "gate"

    async def main():
        async with Proxy(server.address) as proxy, EnvClient(proxy.address, settings=QUICK) as other:
            rollouts = [asyncio.create_task(other.run(task(n, gate=str(gate)), id=f"d{n}")) for n in range(4)]
            await wait_until(lambda: count_at_gate(gate) == 4, "four rollouts in flight")
            await wait_until(lambda: server.pool.num_running == 4, "the end of earlier rollouts")
            assert (await client.health()).running == 4
            proxy.silent = True
            await wait_until(lambda: server.pool.num_running == 0, "their end")
            await asyncio.gather(*rollouts, return_exceptions=True)

    runner.run(main())


def test_rollouts_with_failures_are_each_answered_once(shared):
    runner, server, client = shared
    count = 1000 if os.environ.get("RAMIFY_FULL") else 100
    rng = random.Random(3)
    plan = [("raise" if rng.random() < 0.05 else "", rng.random() < 0.1) for _ in range(count)]
    answers: Counter[str] = Counter()
    killed: list[str] = []

    async def run_one(number: int, does: str, cancelled: bool, slots: asyncio.Semaphore) -> str:
        async with slots:
            call = asyncio.create_task(client.run(task(number, does=does), id=f"s{number}", timeout=DEADLINE))
            if cancelled:
                await asyncio.sleep(rng.random() * 0.05)
                await client.cancel([f"s{number}"])
            if number in (count * 3 // 10, count * 6 // 10):
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

    async def main():
        slots = asyncio.Semaphore(count // 4)
        outcomes = await asyncio.gather(
            *(run_one(n, does, cancelled, slots) for n, (does, cancelled) in enumerate(plan))
        )
        for outcome, (_, cancelled) in zip(outcomes, plan):
            assert outcome == "done" or (outcome == "RequestCancelled" and cancelled)
        stats = await client.stats()
        assert {loss.worker for loss in (await client.health()).deaths} >= set(killed)
        assert stats.counts["reruns"] > 0
        await wait_until(lambda: server.pool.num_running == 0, "the end of it")
        await wait_until(lambda: len(server.pool._ready_workers()) == 2, "the replacements")

    runner.run(main())
    assert sum(answers.values()) == count
    assert answers["RequestCancelled"] > 0


def test_blocked_event_loop_is_a_hang_and_a_blocking_reward_is_not(shared, engine, fork_client, tmp_path):
    runner, server, client = shared
    gate = tmp_path / "gate"

    async def run_hung():
        config = make_config(
            engine.url,
            tmp_path,
            hang_timeout=2.0,
            max_worker_crashes=2,
            pool={"type": "static", "workers": 2},
            name="hung",
        )
        async with (
            EnvServer(config, prefork_client=fork_client) as hung_server,
            EnvClient(hung_server.address, settings=QUICK) as client,
        ):
            others = [asyncio.create_task(client.run(task(n, gate=str(gate)), id=f"i{n}")) for n in range(4)]
            await wait_until(lambda: count_at_gate(gate) >= 4, "four rollouts in flight")
            sender = asyncio.create_task(client.run(task(8, does="send"), id="agent", timeout=DEADLINE))
            with pytest.raises(ProcessDied, match=r"workers were lost while they ran spin(.|\n)*spin_forever"):
                await client.run(task(9, does="spin"), id="spin", timeout=DEADLINE)
            with pytest.raises(AgentFailed, match=r"requests of agent blocked 2 workers(.|\n)*spin_forever"):
                await sender
            gate.touch()
            results = await asyncio.gather(*others)
            assert all(result.episode.traces[0].rewards["right"] == (1.0, 1.0) for result in results)
            assert (await client.stats()).counts["hung"] == 4
            assert "in spin" in hung_server.log_path.read_text()

    async def main():
        before = {worker.pid for worker in server.pool._ready_workers()}
        blocked = asyncio.create_task(client.run(task(1, does="block"), id="block", timeout=DEADLINE))
        await run_hung()
        assert (await blocked).crashes == 0
        assert {worker.pid for worker in server.pool._ready_workers()} == before
        assert max((await client.stats()).worker_lag.values()) > 1

    runner.run(main())


@pytest.mark.parametrize(
    ("boot", "num_tries", "message"),
    [
        ("die", 2, r"2 workers in a row did not boot(.|\n)* exit code 7(.|\n)*no fuel"),
        ("die while reporting", 1, "ended with exit code 7 while it booted"),
    ],
)
async def test_boot_failures_are_reported_and_bounded(engine, fork_client, tmp_path, boot, num_tries, message):
    pool = {"type": "static", "workers": 1}
    config = make_config(engine.url, tmp_path, taskset={"boot": boot}, max_startup_failures=num_tries, pool=pool)
    server = EnvServer(config, prefork_client=fork_client)
    with pytest.raises(ProcessDied, match=message):
        await asyncio.wait_for(server.start(), DEADLINE)
    assert server.pool.counts["boot_failures"] == num_tries and not server.pool.workers


async def test_a_server_that_is_closed_while_a_worker_boots_has_no_worker(engine, fork_client, tmp_path):
    config = make_config(engine.url, tmp_path, pool={"type": "static", "workers": 1})
    server = EnvServer(config, prefork_client=fork_client)
    starting = asyncio.create_task(server.start())

    def find_worker_pid() -> int:
        workers = server.pool.workers.values() if hasattr(server, "pool") else ()
        return sum(worker._child.pid for worker in workers)

    async with asyncio.timeout(DEADLINE):
        while not (pid := find_worker_pid()):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
    assert starting.cancelled() and not server.pool.workers and not is_running(pid)


async def test_worker_boots_from_a_process_with_many_open_files(engine, tmp_path):
    with contextlib.ExitStack() as files:
        for _ in range(300):
            files.enter_context(Path(os.devnull).open())
        config = make_config(engine.url, tmp_path, worker_startup_timeout=60, pool={"type": "static", "workers": 1})
        async with EnvServer(config) as server:
            assert server.pool.counts["booted"] == 1


async def test_many_attempts_are_divided_among_workers(engine, fork_client, tmp_path):
    gate = tmp_path / "gate"
    config = make_config(engine.url, tmp_path, pool={"type": "elastic", "max_workers": 2})
    async with (
        EnvServer(config, prefork_client=fork_client) as server,
        EnvClient(server.address, settings=QUICK) as client,
    ):
        rollouts = [asyncio.create_task(client.run(task(n, gate=str(gate)), id=f"e{n}")) for n in range(33)]
        await wait_until(lambda: len(server.pool._ready_workers()) == 2, "two workers")
        gate.touch()
        await asyncio.gather(*rollouts)


async def test_elastic_pool_scales_with_the_load(engine, fork_client, tmp_path):
    gate = tmp_path / "gate"
    pool = {"type": "elastic", "min_workers": 1, "max_workers": 2, "multiplex": 4, "idle_timeout": 0.5}

    config = make_config(engine.url, tmp_path, pool=pool)
    async with (
        EnvServer(config, prefork_client=fork_client) as server,
        EnvClient(server.address, settings=QUICK) as client,
    ):
        assert len(server.pool.workers) == 1
        rollouts = [asyncio.create_task(client.run(task(n, gate=str(gate)), id=f"e{n}")) for n in range(12)]
        await wait_until(lambda: count_at_gate(gate) == 8, "two full workers")
        health = await client.health()
        assert (health.running, health.waiting) == (8, 4)
        assert [worker.load for worker in health.workers] == [4, 4]
        gate.touch()
        await asyncio.gather(*rollouts)
        await wait_until(lambda: len(server.pool.workers) == 1, "one worker less")
        decisions = (await client.stats()).decisions
        assert [(decision.before, decision.after) for decision in decisions] == [(0, 1), (1, 2), (2, 1)]
        assert [decision.reason.partition(":")[0] for decision in decisions] == ["start", "load", "idle"]
        assert not (await client.health()).deaths
        oldest = next(iter(server.pool.workers.values()))
        server.config.max_age = oldest.age
        await wait_until(
            lambda: oldest.id not in server.pool.workers and bool(server.pool._ready_workers()), "a younger worker"
        )
        server.config.max_age = None
        assert (await client.run(task(1), id="after")).worker_id != oldest.id
        assert (await client.stats()).counts["recycled"] >= 1


@contextlib.contextmanager
def few_files(num_free: int):
    """Allow this process to open only a few more files."""
    used = {int(file.name) for file in Path("/proc/self/fd").iterdir()}
    free = sorted(set(range(len(used) + num_free + 1)) - used)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[num_free], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_pipes() -> set[str]:
    """Return the pipes and memory files that this process has open."""
    links = (file.readlink().name for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
    return {link for link in links if link.startswith(("pipe:", "memfd:"))}


@contextlib.contextmanager
def unbooted_worker(config, tmp_path, prefork_client=None):
    """Yield a worker and the arguments of its `boot`."""
    log, loop_monitor = EnvServerLog(tmp_path / "worker.log"), LoopMonitor()
    source = config.select_source().config.source_config.model_dump(mode="json")
    spec = WorkerSpec(id="w1", source=source, config=config.model_dump(mode="json"), secret="")
    arguments = {"spec": spec, "settings": QUICK, "private_temp": True, "timeout": DEADLINE}
    temp_root = tmp_path / "temp"
    yield WorkerProcess("w1", temp_root, log, loop_monitor, lambda worker: None, None, prefork_client), arguments
    loop_monitor.stop()
    log.close()


@pytest.mark.parametrize("num_free", range(6))
async def test_boot_that_cannot_open_files_leaves_none_open(tmp_path, num_free):
    with unbooted_worker(make_config("http://127.0.0.1:9", tmp_path), tmp_path) as (worker, arguments):
        before = open_pipes()
        with few_files(num_free), pytest.raises((OSError, ProcessDied)):
            await worker.boot(**arguments)
        await worker.reap()
        assert open_pipes() <= before


async def test_cancelled_boot_leaves_no_task(engine, fork_client, tmp_path):
    async with asyncio.timeout(DEADLINE):
        with unbooted_worker(make_config(engine.url, tmp_path), tmp_path, fork_client) as (worker, arguments):
            boot = asyncio.create_task(worker.boot(**arguments))
            while worker._client is None:
                await asyncio.sleep(0)
            boot.cancel()
            await asyncio.wait([boot])
            assert [task for task in asyncio.all_tasks() if "connecting" in task.get_name()] == []
            assert boot.cancelled()
            await worker.reap()
