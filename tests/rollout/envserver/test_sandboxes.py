"""Sandboxed rollouts on an env server: random cancels and killed workers leave nothing behind."""

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from ramify.cli import main as run_command
from ramify.core.errors import RamifyError
from ramify.rollout.envserver import EnvClient, EnvServer
from ramify.rollout.runtime.bwrap import find_unsupported_reason
from ramify.rollout.runtime.cgroup import GROUP_PREFIX, find_cgroup_parents
from tests.support.processes import async_wait_until as wait_until
from tests.support.tricky_env_server import QUICK, make_config, task

NUM_ROLLOUTS = 200 if os.environ.get("RAMIFY_FULL") else 12
CONCURRENCY = 32
DEADLINE = 60.0

pytestmark = [
    pytest.mark.process,
    pytest.mark.promise,
    pytest.mark.skipif(find_unsupported_reason() is not None, reason=f"no sandbox here: {find_unsupported_reason()}"),
]


def list_sandboxes(nap: str) -> list[str]:
    """The programs of this test's rollouts."""
    return [
        " ".join(cmdline)
        for cmdline in (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
        if cmdline and nap in cmdline
    ]


def list_groups(owners: set[int]) -> list[Path]:
    """The control groups of these processes; other tests of the machine have groups too."""
    groups = [
        group for parent in find_cgroup_parents().directories.values() for group in parent.glob(f"{GROUP_PREFIX}*")
    ]
    return [group for group in groups if int(group.name.split("-")[1]) in owners]


def list_mounts(tmp_path: Path) -> set[str]:
    """The mounts of this machine, but for containers, and for the small disks of other tests of this session."""
    session = str(tmp_path.parents[1])
    lines = Path("/proc/self/mounts").read_text().splitlines()
    lines = [line for line in lines if "/containers/storage/" not in line]
    return {line for line in lines if session not in line or str(tmp_path) in line}


def list_victims(server: EnvServer, killed: list[int]) -> list[int]:
    """The workers that were not killed before; the server may not have noticed that yet."""
    return [worker.pid for worker in server.pool._ready_workers() if worker.pid not in killed]


def list_templates(worker_pid: int) -> list[psutil.Process]:
    """The parents of the templates of a worker's sandboxes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(worker_pid).children()
        return [process for process in children if any("sandbox_template" in text for text in process.cmdline())]
    return []


AGENT = (Path(__file__).parents[1] / "harness" / "script_agent.py").read_text()
PRELOADED = {
    "id": "program",
    "command": ["python3", "agent.py", "openai", "-"],
    "prompt": "stdin",
    "files": {"agent.py": AGENT},
    "preload": ["urllib.request"],
}


@pytest.mark.parametrize("harness", [{"id": "chat"}, PRELOADED], ids=["bubblewrap", "forked"])
async def test_cancels_and_killed_workers_leave_nothing_behind(engine, fork_client, tmp_path, capsys, harness):
    rng = random.Random(5)
    nap = f"97{rng.random()}"
    mounts_before = list_mounts(tmp_path)
    answers: Counter[str] = Counter()
    reasons: list[str] = []
    killed: list[int] = []
    workers: set[int] = set()
    templates: set[psutil.Process] = set()

    async def run_one(server: EnvServer, client: EnvClient, number: int, slots: asyncio.Semaphore) -> None:
        async with slots:
            does = {"does": "shell", "nap": nap, "file": "pids"} if rng.random() < 0.3 else {}
            call = asyncio.create_task(client.run(task(number, **does), id=f"b{number}", timeout=DEADLINE))
            if does or rng.random() < 0.2:  # a rollout with a shell would run for ever
                await asyncio.sleep(0.2 + rng.random() * 0.3)
                await client.cancel([f"b{number}"])
            workers.update(worker.pid for worker in server.pool._ready_workers())
            if number in (NUM_ROLLOUTS // 3, 2 * NUM_ROLLOUTS // 3):
                await wait_until(lambda: list_victims(server, killed), "a worker")
                if harness is PRELOADED and not killed:
                    await wait_until(lambda: any(map(list_templates, list_victims(server, killed))), "a template")
                victims = list_victims(server, killed)
                templates.update(process for pid in victims for process in list_templates(pid))
                killed.append(victims[0])
                os.kill(victims[0], signal.SIGKILL)
                for process in list_templates(victims[-1]):
                    process.kill()
            try:
                trace = (await call).episode.traces[0]
            except RamifyError as error:
                answers[error.name] += 1
            else:
                answers[trace.errors[0].name if trace.errors else "done"] += 1
                reasons.extend(f"{error.name}: {error.message}" for error in trace.errors)

    async def main():
        config = make_config(
            engine.url, tmp_path, runtime={"id": "sandbox", "num_prepared": 2}, harness=harness, max_tries=5
        )
        async with (
            EnvServer(config, prefork_client=fork_client) as server,
            EnvClient(server.address, settings=QUICK) as client,
        ):
            await wait_until(lambda: len(server.pool._ready_workers()) == 2, "two workers")
            slots = asyncio.Semaphore(CONCURRENCY)
            await asyncio.gather(*(run_one(server, client, number, slots) for number in range(NUM_ROLLOUTS)))
            workers.update(worker.pid for worker in server.pool.workers.values())
            log = server.log_path.read_text()
        assert log.count("rollout ended id=") >= answers["done"]

    await asyncio.wait_for(main(), 300)
    allowed = {"done", "RequestCancelled"} | ({"SandboxError"} if harness is PRELOADED else set())  # a killed template
    assert sum(answers.values()) == NUM_ROLLOUTS and set(answers) <= allowed, (answers, reasons)
    assert len(killed) == 2 and answers["done"] and answers["RequestCancelled"]
    assert run_command(["runtime", "clean"]) == 0
    assert "removed" in capsys.readouterr().out
    assert list_sandboxes(nap) == []
    assert bool(templates) == (harness is PRELOADED) and not psutil.wait_procs(templates, 20)[1]
    assert set(killed) <= workers and list_groups(workers) == []
    assert list_mounts(tmp_path) == mounts_before
