"""The local runtime: real processes in a directory of their own, none of which outlives its box."""

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from ramify.env import Task
from ramify.errors import ConfigInvalid, SandboxError
from ramify.runtime import LocalRuntime, LocalRuntimeConfig
from tests.processes import runs

# A program with a child, a grandchild in another session, and a daemon that has lost session and parent.
TREE = """
sleep 1000 & echo $! >> pids
setsid sh -c 'echo $$ >> pids; exec sleep 1000' &
(setsid sh -c 'echo $$ >> pids; exec sleep 1000' &)
while [ $(wc -l < pids) -lt 3 ]; do sleep 0.01; done
"""


def in_a_box(test, task: Task | None = None, **settings):
    """Run `test(runtime)` in a started box and stop it afterwards."""

    async def whole():
        runtime = LocalRuntime(LocalRuntimeConfig(**settings))
        await runtime.start(task or Task())
        try:
            return await test(runtime)
        finally:
            await runtime.stop()

    return asyncio.run(asyncio.wait_for(whole(), 30))


def alive(pids: str) -> list[int]:
    found = [int(pid) for pid in pids.split()]
    assert found
    return [pid for pid in found if runs(pid)]


async def appears(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.01)


def test_a_command_runs_in_the_work_directory_with_input_and_output():
    async def test(runtime):
        await runtime.write("deep/name.txt", "ä")
        ran = await runtime.run(["cat", "deep/name.txt", "-"], stdin=b"\x00\xff", timeout=10)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ä".encode() + b"\x00\xff", b"")
        ran = await runtime.run("pwd; echo oops >&2; exit 3", timeout=10)
        assert (ran.returncode, ran.text.strip(), ran.stderr) == (3, str(runtime.workdir), b"oops\n")
        await runtime.run("printf '\\000\\377' > made", timeout=10)
        assert await runtime.read("made") == b"\x00\xff"
        with pytest.raises(FileNotFoundError):
            await runtime.read("nothing")

    in_a_box(test)


def test_a_command_that_cannot_be_run_is_an_answer():
    async def test(runtime):
        assert (await runtime.run(["no-such-program"], timeout=10)).returncode == 127
        assert (await runtime.run(["cat"], cwd="no-such-place", timeout=10)).returncode == 127
        await runtime.write("data", "x")
        ran = await runtime.run(["./data"], timeout=10)
        assert ran.returncode == 126
        assert b"data" in ran.stderr
        assert (await runtime.run(["sh", "-c", "kill -9 $$"], timeout=10)).returncode == -9
        (runtime.workdir / "data").chmod(0o755)
        for line in (["./data"], ["x" * 5000], "echo " + "x" * 200_000, "echo a\0b", "echo \ud800"):
            ran = await runtime.run(line, timeout=10)
            assert ran.returncode == 126 and ran.stderr.startswith(b"cannot be run: ")

    in_a_box(test)


def test_a_pipe_in_the_place_of_a_file_is_no_file_and_nobody_waits_at_it():
    async def test(runtime):
        assert (await runtime.run("mkfifo pipe; ln -s /dev/zero zero", timeout=10)).returncode == 0
        held = os.open(runtime.workdir / "pipe", os.O_RDWR)  # whoever waits at it is let go when this is closed
        try:
            for work in (runtime.read("pipe"), runtime.write("pipe", b"x"), runtime.read("zero")):
                with pytest.raises(FileNotFoundError, match="not a file"):
                    await asyncio.wait_for(work, 5)
        finally:
            os.close(held)

    in_a_box(test)


def test_programs_see_a_home_of_their_own_and_none_of_our_secrets(monkeypatch):
    monkeypatch.setenv("SECRET_API_KEY", "sk-1")

    async def test(runtime):
        ran = await runtime.run(["env"], env={"MINE": "1"}, timeout=10)
        seen = dict(line.split("=", 1) for line in ran.text.splitlines())
        assert "SECRET_API_KEY" not in seen
        assert (seen["MINE"], seen["FROM_CONFIG"]) == ("1", "2")
        assert Path(seen["HOME"]).is_dir()
        assert Path(seen["HOME"]).parent == runtime.workdir.parent

    in_a_box(test, env={"FROM_CONFIG": "2"})


def test_the_first_and_the_last_of_much_output_are_kept():
    async def test(runtime):
        script = "import sys; sys.stdout.write('a' + 'x' * 10_000_000 + 'z'); sys.stderr.write('e')"
        ran = await runtime.run([sys.executable, "-c", script], timeout=20)
        assert ran.stdout.startswith(b"axxxx")
        assert ran.stdout.endswith(b"xxxxz")
        assert b"[9999002 bytes left out]" in ran.stdout
        assert len(ran.stdout) < 1100
        assert ran.stderr == b"e"

    in_a_box(test, max_output=1000)


def test_a_deadline_kills_the_whole_tree_and_keeps_the_output():
    async def test(runtime):
        ran = await runtime.run(f"echo before; {TREE} sleep 1000", timeout=2.0)
        assert (ran.returncode, ran.timed_out, ran.stdout) == (124, True, b"before\n")
        assert alive((await runtime.read("pids")).decode()) == []

    in_a_box(test)


def test_cancelling_a_run_kills_the_whole_tree():
    async def test(runtime):
        waiting = asyncio.create_task(runtime.run(f"{TREE} touch ready; sleep 1000", timeout=25.0))
        await appears(runtime.workdir / "ready")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert alive((await runtime.read("pids")).decode()) == []

    in_a_box(test)


def test_cancelling_a_run_that_is_just_being_started_kills_the_whole_tree():
    async def test(runtime):
        ready = runtime.workdir / "ready"
        starting = asyncio.create_task(runtime.run(f"{TREE} touch ready; sleep 1000", timeout=25.0))
        await asyncio.sleep(0)  # the process is there, and `spawn` waits for its pipes
        while not ready.exists():
            time.sleep(0.01)  # the loop stands still meanwhile, as on a busy machine
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert alive((await runtime.read("pids")).decode()) == []

    in_a_box(test)


def test_a_command_ends_while_what_it_left_behind_holds_its_output_until_the_box_stops():
    async def test(runtime):
        ran = await runtime.run(f"{TREE} echo started", timeout=20)
        assert (ran.returncode, ran.stdout) == (0, b"started\n")
        pids = (await runtime.read("pids")).decode()
        assert len(alive(pids)) == 3
        await runtime.stop()
        assert alive(pids) == []

    in_a_box(test)


def test_a_spawned_program_runs_beside_us_until_it_ends_or_is_killed():
    async def test(runtime):
        program = await runtime.spawn("read line; echo got $line > out; sleep 1000", stdin=b"hello\n")
        await appears(runtime.workdir / "out")
        assert psutil.pid_exists(program.pid)
        await program.kill()
        assert (await program.wait(10)).returncode == -9
        short = await runtime.spawn(["true"])
        assert (await short.wait(10)).returncode == 0

    in_a_box(test)


def test_killing_one_program_leaves_the_others():
    async def test(runtime):
        one = await runtime.spawn(["sleep", "1000"])
        others = [await runtime.spawn(["sleep", "1000"]) for _ in range(10)]  # 1. and 10. begin alike
        await one.kill()
        assert len(alive(" ".join(str(other.pid) for other in others))) == 10

    in_a_box(test)


def test_stopping_removes_the_box(tmp_path):
    async def test(runtime):
        await runtime.write("a/b", b"x")
        assert list(tmp_path.iterdir())
        await runtime.stop()
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(SandboxError, match="stopped"):
            await runtime.run(["true"], timeout=1)

    in_a_box(test, root=tmp_path)


def test_stopping_removes_a_box_however_deep_it_is(tmp_path):
    async def test(runtime):
        dig = "import os\nfor _ in range(1500):\n    os.mkdir('d')\n    os.chdir('d')"
        assert (await runtime.run([sys.executable, "-c", dig], timeout=20)).returncode == 0

    in_a_box(test, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_keep_leaves_the_box_to_be_looked_into(tmp_path):
    async def test(runtime):
        await runtime.write("a", b"x")
        return runtime.workdir

    workdir = in_a_box(test, root=tmp_path, keep=True)
    assert (workdir / "a").read_bytes() == b"x"


def test_a_box_nobody_uses_is_never_made(tmp_path):
    async def test(runtime):
        assert runtime.trace_metadata == {"id": "local"}

    in_a_box(test, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_box_that_cannot_be_made_or_has_vanished_is_a_sandbox_error(tmp_path):
    import shutil

    async def nowhere(runtime):
        with pytest.raises(SandboxError, match="cannot create a work directory"):
            await runtime.run(["true"], timeout=1)

    async def vanished(runtime):
        shutil.rmtree(runtime.workdir)
        with pytest.raises(SandboxError, match="cannot run"):
            await runtime.run(["true"], timeout=1)

    in_a_box(nowhere, root=tmp_path / "missing")
    in_a_box(vanished, root=tmp_path)
    assert SandboxError.retryable


def test_a_task_says_where_in_the_box_it_works():
    async def test(runtime):
        ran = await runtime.run(["pwd"], timeout=10)
        assert ran.text.strip().endswith("/src/app")

    in_a_box(test, Task(workdir="src/app"))


@pytest.mark.parametrize("task", [Task(image="ubuntu"), Task(workdir="/etc"), Task(workdir="../..")])
def test_what_a_local_box_does_not_have_is_refused(task):
    with pytest.raises(ConfigInvalid):
        LocalRuntime().check_task(task)
