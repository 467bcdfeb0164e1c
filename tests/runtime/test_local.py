"""The local runtime: real processes in their own directory, all of which end with the runtime."""

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from ramify.env import Task
from ramify.env.runtime import Capability
from ramify.errors import ConfigInvalid, SandboxError
from ramify.runtime import LocalRuntime, LocalRuntimeConfig
from tests.support.processes import is_running

pytestmark = pytest.mark.process

# A program with a child, a grandchild in another session, and a daemon that has lost session and parent.
PROCESS_TREE = """
sleep 1000 & echo $! >> pids
setsid sh -c 'echo $$ >> pids; exec sleep 1000' &
(setsid sh -c 'echo $$ >> pids; exec sleep 1000' &)
while [ $(wc -l < pids) -lt 3 ]; do sleep 0.01; done
"""


def with_runtime(test, task: Task | None = None, **settings):
    """Run `test(runtime)` with a started runtime and stop it afterwards."""

    async def run():
        runtime = LocalRuntime(LocalRuntimeConfig(**settings))
        await runtime.start(task or Task())
        try:
            return await test(runtime)
        finally:
            await runtime.stop()

    return asyncio.run(asyncio.wait_for(run(), 60))


def running_pids(pids: str) -> list[int]:
    all_pids = [int(pid) for pid in pids.split()]
    assert all_pids
    return [pid for pid in all_pids if is_running(pid)]


async def wait_for_file(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.01)


def test_command_runs_in_the_work_directory_with_input_and_output():
    async def test(runtime):
        await runtime.write("deep/name.txt", "ä")
        result = await runtime.run(["cat", "deep/name.txt", "-"], stdin=b"\x00\xff", timeout=10)
        assert (result.returncode, result.stdout, result.stderr) == (0, "ä".encode() + b"\x00\xff", b"")
        result = await runtime.run("pwd; echo oops >&2; exit 3", timeout=10)
        assert (result.returncode, result.text.strip(), result.stderr) == (3, str(runtime.workdir), b"oops\n")
        await runtime.run("printf '\\000\\377' > made", timeout=10)
        assert await runtime.read("made") == b"\x00\xff"
        with pytest.raises(FileNotFoundError):
            await runtime.read("nothing")

    with_runtime(test)


@pytest.mark.parametrize("limits", [{}, {"max_processes": 100}], ids=["unlimited", "limited"])
def test_command_that_cannot_run_returns_an_exit_code(limits):
    if limits and Capability.PROCESS_LIMIT not in LocalRuntime().capabilities.available:
        pytest.skip("this machine cannot enforce limits")

    async def test(runtime):
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

    with_runtime(test, limits=limits)


def test_named_pipe_is_not_a_file_and_does_not_block():
    async def test(runtime):
        assert (await runtime.run("mkfifo pipe; ln -s /dev/zero zero", timeout=10)).returncode == 0
        pipe_fd = os.open(runtime.workdir / "pipe", os.O_RDWR)  # whoever waits at it is let go when this is closed
        try:
            for operation in (runtime.read("pipe"), runtime.write("pipe", b"x"), runtime.read("zero")):
                with pytest.raises(FileNotFoundError, match="not a file"):
                    await asyncio.wait_for(operation, 5)
        finally:
            os.close(pipe_fd)

    with_runtime(test)


def test_programs_get_their_own_home_and_no_secrets(monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "sk-1")

    async def test(runtime):
        result = await runtime.run(["env"], env={"MINE": "1"}, timeout=10)
        env = dict(line.split("=", 1) for line in result.text.splitlines())
        assert "SECRET_API_KEY" not in env
        assert (env["MINE"], env["FROM_CONFIG"]) == ("1", "2")
        assert Path(env["HOME"]).is_dir()
        assert Path(env["HOME"]).parent == runtime.workdir.parent

    with_runtime(test, env={"FROM_CONFIG": "2"})


def test_first_and_last_bytes_of_long_output_are_kept():
    async def test(runtime):
        script = "import sys; sys.stdout.write('a' + 'x' * 10_000_000 + 'z'); sys.stderr.write('e')"
        result = await runtime.run([sys.executable, "-c", script], timeout=20)
        assert result.stdout.startswith(b"axxxx")
        assert result.stdout.endswith(b"xxxxz")
        assert b"[9999002 bytes left out]" in result.stdout
        assert len(result.stdout) < 1100
        assert result.stderr == b"e"

    with_runtime(test, max_output_bytes=1000)


def test_timeout_kills_all_processes_and_keeps_the_output():
    async def test(runtime):
        result = await runtime.run(f"echo before; {PROCESS_TREE} sleep 1000", timeout=2.0)
        assert (result.returncode, result.timed_out, result.stdout) == (124, True, b"before\n")
        assert running_pids((await runtime.read("pids")).decode()) == []

    with_runtime(test)


def test_cancelling_a_run_kills_all_processes():
    async def test(runtime):
        run_task = asyncio.create_task(runtime.run(f"{PROCESS_TREE} touch ready; sleep 1000", timeout=55.0))
        await wait_for_file(runtime.workdir / "ready")
        run_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run_task
        assert running_pids((await runtime.read("pids")).decode()) == []

    with_runtime(test)


def test_cancelling_a_run_during_its_start_kills_all_processes():
    async def test(runtime):
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

    with_runtime(test)


def test_command_returns_while_background_processes_run_until_stop():
    async def test(runtime):
        result = await runtime.run(f"{PROCESS_TREE} echo started", timeout=20)
        assert (result.returncode, result.stdout) == (0, b"started\n")
        pids = (await runtime.read("pids")).decode()
        assert len(running_pids(pids)) == 3
        await runtime.stop()
        assert running_pids(pids) == []

    with_runtime(test)


def test_spawned_program_runs_until_it_exits_or_is_killed():
    async def test(runtime):
        program = await runtime.spawn("read line; echo got $line > out; sleep 1000", stdin=b"hello\n")
        await wait_for_file(runtime.workdir / "out")
        assert psutil.pid_exists(program.pid)
        await program.kill()
        assert (await program.wait(10)).returncode == -9
        short = await runtime.spawn(["true"])
        assert (await short.wait(10)).returncode == 0

    with_runtime(test)


def test_killing_one_program_does_not_affect_others():
    async def test(runtime):
        first = await runtime.spawn(["sleep", "1000"])
        others = [await runtime.spawn(["sleep", "1000"]) for _ in range(10)]  # 1. and 10. begin alike
        await first.kill()
        assert len(running_pids(" ".join(str(other.pid) for other in others))) == 10

    with_runtime(test)


def test_stop_removes_the_directory(tmp_path):
    async def test(runtime):
        await runtime.write("a/b", b"x")
        assert list(tmp_path.iterdir())
        await runtime.stop()
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(SandboxError, match="stopped"):
            await runtime.run(["true"], timeout=1)

    with_runtime(test, workdir_root=tmp_path)


def test_failed_removal_of_the_control_group_is_tried_again(monkeypatch):
    if Capability.PROCESS_LIMIT not in LocalRuntime().capabilities.available:
        pytest.skip("this machine cannot enforce limits")

    def raise_busy():
        raise SandboxError("the control group is busy")

    async def test(runtime):
        group = runtime._cgroup
        monkeypatch.setattr(group, "remove", raise_busy)
        for _ in range(2):
            with pytest.raises(SandboxError, match="busy"):
                await runtime.stop()
        monkeypatch.undo()
        await runtime.stop()
        assert not any(directory.exists() for directory in group._directories.values())

    with_runtime(test, limits={"max_processes": 100})


def test_stop_removes_deeply_nested_directories(tmp_path):
    async def test(runtime):
        script = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')"
        assert (await runtime.run([sys.executable, "-c", script], timeout=20)).returncode == 0

    with_runtime(test, workdir_root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_keep_preserves_the_directory(tmp_path):
    async def test(runtime):
        await runtime.write("a", b"x")
        return runtime.workdir

    workdir = with_runtime(test, workdir_root=tmp_path, keep_workdir=True)
    assert (workdir / "a").read_bytes() == b"x"


def test_directory_is_not_created_without_use(tmp_path):
    async def test(runtime):
        assert runtime.trace_metadata == {"id": "local"}

    with_runtime(test, workdir_root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_directory_raises_a_sandbox_error(tmp_path):
    import shutil

    async def run_without_root(runtime):
        with pytest.raises(SandboxError, match="cannot create a work directory"):
            await runtime.run(["true"], timeout=1)

    async def run_after_removal(runtime):
        shutil.rmtree(runtime.workdir)
        with pytest.raises(SandboxError, match="cannot run"):
            await runtime.run(["true"], timeout=1)

    with_runtime(run_without_root, workdir_root=tmp_path / "missing")
    with_runtime(run_after_removal, workdir_root=tmp_path)
    assert SandboxError.retryable


def test_task_sets_the_work_directory():
    async def test(runtime):
        result = await runtime.run(["pwd"], timeout=10)
        assert result.text.strip().endswith("/src/app")

    with_runtime(test, Task(workdir="src/app"))


@pytest.mark.parametrize("task", [Task(image="ubuntu"), Task(workdir="/etc"), Task(workdir="../..")])
def test_unsupported_tasks_are_refused(task):
    with pytest.raises(ConfigInvalid):
        LocalRuntime().check_task(task)
