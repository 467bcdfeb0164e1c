"""The local runtime: real processes in their own directory, all of which end with the runtime."""

import asyncio
import sys
import time
from pathlib import Path

import psutil
import pytest

from ramify.core.errors import SandboxError
from ramify.env.runtime import Capability
from ramify.rollout.runtime import LocalRuntime
from tests.rollout.runtime.conftest import open_runtime
from tests.support.processes import is_running

pytestmark = pytest.mark.process

# A program with a child, a grandchild in another session, and a daemon that has lost session and parent.
PROCESS_TREE = """
sleep 1000 & echo $! >> pids
setsid sh -c 'echo $$ >> pids; exec sleep 1000' &
(setsid sh -c 'echo $$ >> pids; exec sleep 1000' &)
while [ $(wc -l < pids) -lt 3 ]; do sleep 0.01; done
"""


def running_pids(pids: str) -> list[int]:
    all_pids = [int(pid) for pid in pids.split()]
    assert all_pids
    return [pid for pid in all_pids if is_running(pid)]


async def wait_for_file(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("limits", [{}, {"max_processes": 100}], ids=["unlimited", "limited"])
async def test_command_that_cannot_run_returns_an_exit_code(limits):
    if limits and Capability.PROCESS_LIMIT not in LocalRuntime().capabilities.available:
        pytest.skip("this machine cannot enforce limits")

    async with open_runtime("local", limits=limits) as runtime:
        with pytest.raises(FileNotFoundError, match="no-such-program"):
            await runtime.spawn(["no-such-program"])
        with pytest.raises(PermissionError):
            await runtime.spawn(["."])
        assert (await runtime.run(["no-such-program"], timeout=10)).returncode == 127
        assert (await runtime.run(["cat"], cwd="no-such-place", timeout=10)).returncode == 127
        await runtime.write("data", "x")
        result = await runtime.run(["./data"], timeout=10)
        assert result.returncode == 126
        assert b"data" in result.stderr
        assert (await runtime.run(["sh", "-c", "kill -9 $$"], timeout=10)).returncode == -9
        (runtime.workdir / "data").chmod(0o755)
        invalid_format = [] if limits else [["./data"]]  # the shell that joins the control group runs it as a script
        for line in (*invalid_format, ["x" * 5000], "echo " + "x" * 200_000, "echo a\0b", "echo \ud800"):
            result = await runtime.run(line, timeout=10)
            assert result.returncode == 126 and result.stderr.startswith(b"cannot be run: ")


async def test_first_and_last_bytes_of_long_output_are_kept():
    async with open_runtime("local", max_output_bytes=1000) as runtime:
        script = "import sys; sys.stdout.write('a' + 'x' * 10_000_000 + 'z'); sys.stderr.write('e')"
        result = await runtime.run([sys.executable, "-c", script], timeout=20)
        assert result.stdout.startswith(b"axxxx")
        assert result.stdout.endswith(b"xxxxz")
        assert b"[9999002 bytes left out]" in result.stdout
        assert len(result.stdout) < 1100
        assert result.stderr == b"e"


async def test_cancelling_a_run_during_its_start_kills_all_processes():
    async with open_runtime("local") as runtime:
        ready, earlier = runtime.workdir / "ready", set(psutil.Process().children())
        run_task = asyncio.create_task(runtime.run(f"{PROCESS_TREE} touch ready; sleep 1000", timeout=55.0))
        while set(psutil.Process().children()) <= earlier:
            await asyncio.sleep(0)
        while not ready.exists():
            time.sleep(0.01)  # the loop stands still meanwhile, as on a busy machine
        run_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run_task
        assert running_pids((await runtime.read("pids")).decode()) == []


async def test_command_returns_while_background_processes_run_until_stop():
    async with open_runtime("local") as runtime:
        result = await runtime.run(f"{PROCESS_TREE} echo started", timeout=20)
        assert (result.returncode, result.stdout) == (0, b"started\n")
        pids = (await runtime.read("pids")).decode()
        assert len(running_pids(pids)) == 3
        await runtime.stop()
        assert running_pids(pids) == []


async def test_spawned_program_runs_until_it_exits_or_is_killed():
    async with open_runtime("local") as runtime:
        program = await runtime.spawn("read line; echo got $line > out; sleep 1000", stdin=b"hello\n")
        await wait_for_file(runtime.workdir / "out")
        assert psutil.pid_exists(program.pid)
        await program.kill()
        assert (await program.wait(10)).returncode == -9
        short = await runtime.spawn(["true"])
        assert (await short.wait(10)).returncode == 0


async def test_killing_one_program_does_not_affect_others():
    async with open_runtime("local") as runtime:
        first = await runtime.spawn(["sleep", "1000"])
        others = [await runtime.spawn(["sleep", "1000"]) for _ in range(10)]  # 1. and 10. begin alike
        await first.kill()
        assert len(running_pids(" ".join(str(other.pid) for other in others))) == 10


async def test_stop_removes_the_directory(tmp_path):
    async with open_runtime("local", workdir_root=tmp_path) as runtime:
        await runtime.write("a/b", b"x")
        assert list(tmp_path.iterdir())
        await runtime.stop()
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(SandboxError, match="stopped"):
            await runtime.run(["true"], timeout=1)


async def test_failed_removal_of_the_control_group_is_tried_again(monkeypatch):
    if Capability.PROCESS_LIMIT not in LocalRuntime().capabilities.available:
        pytest.skip("this machine cannot enforce limits")

    def raise_busy():
        raise SandboxError("the control group is busy")

    async with open_runtime("local", limits={"max_processes": 100}) as runtime:
        group = runtime._cgroup
        monkeypatch.setattr(group, "remove", raise_busy)
        for _ in range(2):
            with pytest.raises(SandboxError, match="busy"):
                await runtime.stop()
        monkeypatch.undo()
        await runtime.stop()
        assert not any(directory.exists() for directory in group._directories.values())


async def test_stop_removes_deeply_nested_directories(tmp_path):
    async with open_runtime("local", workdir_root=tmp_path) as runtime:
        script = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')"
        assert (await runtime.run([sys.executable, "-c", script], timeout=20)).returncode == 0
    assert list(tmp_path.iterdir()) == []


async def test_directory_is_not_created_without_use(tmp_path):
    async with open_runtime("local", workdir_root=tmp_path) as runtime:
        assert runtime.trace_metadata == {"id": "local"}
    assert list(tmp_path.iterdir()) == []


async def test_missing_directory_raises_a_sandbox_error(tmp_path):
    import shutil

    async with open_runtime("local", workdir_root=tmp_path / "missing") as runtime:
        with pytest.raises(SandboxError, match="cannot create a work directory"):
            await runtime.run(["true"], timeout=1)
    async with open_runtime("local", workdir_root=tmp_path) as runtime:
        shutil.rmtree(runtime.workdir)
        with pytest.raises(SandboxError, match="cannot run"):
            await runtime.run(["true"], timeout=1)
    assert SandboxError.retryable
