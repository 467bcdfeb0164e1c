"""Agents that attack the machine around their sandbox: its disk, its process table, the memory and time of the worker,
and the blame for a failure."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from ramify.core.errors import AgentFailed, SandboxError
from ramify.infer.gateway import Gateway
from ramify.processes.child import ChildProcess
from ramify.processes.log import ProcessLog
from ramify.rollout.runtime.sandbox_process import create_sealed_file
from ramify.trace import Trace
from tests.rollout.runtime.conftest import PYTHON, open_runtime, skip_unless_available
from tests.rollout.runtime.test_sandbox import SAME_IN_FORKS
from tests.support.attempts import OneTask, error_names, load_env, run_one_async

pytestmark = [pytest.mark.process, pytest.mark.promise]

SCRIPT_AGENT = (Path(__file__).parent.parent / "harness" / "script_agent.py").read_text()
NUM_SANDBOXES = 20 if os.environ.get("RAMIFY_FULL") else 2


@pytest.fixture(autouse=True)
def needs_sandbox():
    skip_unless_available("sandbox")


# -- the disk of the machine ------------------------------------------------------------------------------------------

# Prints every file that a process has open and that is neither a pipe, a socket or a device nor on a read-only mount.
LIST_OPEN_FILES = """
import glob, os, stat
for path in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/exe"):
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        continue
    mode = os.fstat(fd).st_mode
    is_read_only = os.fstatvfs(fd).f_flag & os.ST_RDONLY
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISCHR(mode) or is_read_only):
        print(path, oct(mode), os.readlink(path))
    os.close(fd)
"""


async def test_no_open_file_of_a_sandbox_is_on_the_machines_disk(sandbox_kind):
    async with open_runtime(sandbox_kind) as runtime:
        await runtime.spawn(["sleep", "1000"])  # its standard files count too
        result = await runtime.run(["python3", "-S", "-c", LIST_OPEN_FILES], timeout=20)
        assert (result.returncode, result.text) == (0, ""), result


def test_files_that_a_sandbox_is_given_cannot_be_written():
    fd = create_sealed_file("request", b"content")
    try:
        assert os.read(fd, 100) == b"content"
        for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 1 << 20), lambda: os.ftruncate(fd, 0)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(fd)


# -- the process table of the machine ---------------------------------------------------------------------------------

# Starts and stops sandboxes; the last one is killed from outside. Waits until its watcher has no children but itself.
LEAVES_ZOMBIES = """
import asyncio, os, signal, sys
import psutil
from ramify.env import Task
from ramify.rollout.runtime import SandboxRuntime

async def main():
    for number in range(int(sys.argv[1])):
        runtime = SandboxRuntime()
        await runtime.start(Task())
        await runtime.run("setsid sleep 1000 & true", timeout=20)
        if number == 0:
            os.kill(runtime._sandbox._bwrap.pid, signal.SIGKILL)
        await runtime.stop()
    while len(psutil.Process(os.getppid()).children()) > 1:
        await asyncio.sleep(0.01)

asyncio.run(asyncio.wait_for(main(), 30))
"""


async def test_stopped_and_killed_sandboxes_leave_no_zombie(tmp_path):
    async with asyncio.timeout(60):
        child = ChildProcess()
        log = ProcessLog(tmp_path / "log")
        with log.open() as output:
            await child.spawn((sys.executable, "-c", LEAVES_ZOMBIES, str(NUM_SANDBOXES)), output.fileno())
        try:
            assert await child.wait() == 0, log.tail()
        finally:
            await child.stop()


# -- the memory and the time of the worker -----------------------------------------------------------------------------

# Holds as many connections as it can with bodies that never end, and then asks for the tokens of a text of 8 MB.
TAKES_MEMORY_AND_TIME = """
import contextlib, json, os, select, socket, time, urllib.error, urllib.request
base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
host, port = base_url.split("/")[2].split(":")
head = f"POST /v1/messages/count_tokens HTTP/1.1\\r\\nHost: {host}\\r\\nAuthorization: Bearer {key}\\r\\n"
held = []
for _ in range(200):
    held.append(socket.create_connection((host, int(port)), 20))
    with contextlib.suppress(ConnectionError):
        held[-1].sendall(f"{head}Content-Length: 25000000\\r\\n\\r\\n".encode() + b" " * 1000)
print("refused connections:", bool(select.select(held, [], [], 20)[0]))
for connection in held:
    connection.close()
body = json.dumps({"messages": [{"role": "user", "content": "a b " * 2_000_000}]}).encode()
request = urllib.request.Request(f"{base_url}/messages/count_tokens", body, {"Authorization": f"Bearer {key}"})
for _ in range(100):
    try:
        urllib.request.urlopen(request, timeout=50)
    except urllib.error.HTTPError as error:
        print("8 MB of text:", error.code)
        break
    except OSError:
        time.sleep(0.1)  # the connections above are not yet closed on the other side
"""


async def test_agent_takes_neither_the_connections_nor_the_time_of_its_neighbour():
    async def run(gateway: Gateway, script: str, *command: str) -> Trace:
        harness = {"id": "program", "command": command, "prompt": "stdin", "files": {"agent.py": script}}
        env = load_env(OneTask, harness=harness, runtime={"id": "sandbox"}, seq_len=4096)
        try:
            return await run_one_async(env, ["forty-two"], gateway=gateway)
        finally:
            await env.close()

    async with asyncio.timeout(100):
        async with Gateway() as gateway:
            attack = asyncio.create_task(run(gateway, TAKES_MEMORY_AND_TIME, *PYTHON, "agent.py"))
            neighbours = [await run(gateway, SCRIPT_AGENT, *PYTHON, "agent.py", "openai", "-") for _ in range(2)]
            attacker = await attack
        assert [error_names(trace) for trace in neighbours] == [[], []]
        assert attacker.info["program"]["stdout"] == "refused connections: True\n8 MB of text: 400\n", attacker.info
        assert [refusal["name"] for refusal in attacker.info["refusals"]] == ["ContextOverflow"]


# -- who is to blame for the end of a sandbox -------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["bwrap", "first process"])
async def test_sandbox_that_is_killed_from_outside_is_a_failure_of_the_system(victim):
    async with open_runtime("sandbox") as runtime:
        process = await runtime.spawn("sleep 1000")
        assert runtime._sandbox is not None and runtime._sandbox._bwrap is not None
        bwrap = psutil.Process(runtime._sandbox._bwrap.pid)
        (bwrap if victim == "bwrap" else bwrap.children()[0]).kill()
        with pytest.raises(SandboxError, match="killed from outside"):
            await process.wait(20)
        with pytest.raises(SandboxError, match="killed from outside"):
            await process.kill()
        for call in (runtime.run("true", timeout=20), runtime.read("file"), runtime.write("file", b"")):
            with pytest.raises(SandboxError, match="killed from outside"):
                await call


async def test_rollout_whose_sandbox_is_killed_is_not_scored():
    nap = f"98764.{os.getpid()}"

    async def kill_sandbox() -> None:
        while True:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # programs of the sandbox come and go
                    if process.cmdline()[:2] == ["sleep", nap]:
                        next(parent for parent in process.parents() if parent.name() == "bwrap").kill()
                        return
            await asyncio.sleep(0.02)

    async with asyncio.timeout(60):
        command = ["sh", "-c", f"python3 -S agent.py openai go; sleep {nap}"]
        harness = {"id": "program", "command": command, "prompt": "stdin", "files": {"agent.py": SCRIPT_AGENT}}
        env = load_env(OneTask, harness=harness, runtime={"id": "sandbox"})
        killer = asyncio.create_task(kill_sandbox())
        try:
            async with Gateway() as gateway:
                trace = await run_one_async(env, ["forty-two"], gateway=gateway)
        finally:
            killer.cancel()
            await env.close()
        assert error_names(trace) == ["SandboxError"]


# What a program may try to end or to stop the first program of its sandbox, or to take it over.
ATTACKS_ON_THE_FIRST_PROGRAM = """
import ctypes, os, resource, signal
for number in set(signal.Signals) - {signal.SIGCHLD}:
    os.kill(1, number)
for attack in (
    lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)),
    lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)),
    lambda: open("/proc/1/mem", "rb"),
    lambda: os.listdir("/proc/1/map_files"),
    lambda: os.readlink("/proc/1/fd/0"),
):
    try:
        attack()
    except OSError as error:
        print(error.strerror)
"""


@SAME_IN_FORKS
async def test_agent_cannot_end_its_sandbox(sandbox_kind):
    async with open_runtime(sandbox_kind) as runtime:
        result = await runtime.run(["python3", "-S", "-c", ATTACKS_ON_THE_FIRST_PROGRAM], timeout=20)
        assert result.text.splitlines() == ["Operation not permitted"] * 2 + ["Permission denied"] * 3
        await runtime.run("kill -9 -1", timeout=20)
        assert (await runtime.run("echo alive", timeout=20)).text == "alive\n"


async def test_agent_is_blamed_for_a_sandbox_that_does_not_answer_and_is_killed(sandbox_kind):
    async with open_runtime(sandbox_kind) as runtime:
        process = await runtime.spawn("sleep 1000")
        assert runtime._sandbox is not None
        runtime._sandbox.kill()  # as after a request without a reply
        assert (await process.wait(20)).returncode == -signal.SIGKILL
        with pytest.raises(AgentFailed, match="the sandbox has ended"):
            await runtime.run("true", timeout=20)
