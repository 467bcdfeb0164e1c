"""What every launcher promises: it starts a process on a node, watches it, and stops it with its descendants."""

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from ramify.launch.launcher import Launcher, ProcessStart
from ramify.launch.local_launcher import LocalLauncher
from ramify.launch.ray_launcher import RayLauncher
from ramify.processes.exit import EXIT_NOT_STARTED
from ramify.processes.log import ProcessLog
from tests.support.launchers import (
    PLACEMENT,
    InProcessLauncher,
    build_placement,
    daemon_code,
    is_locked,
    open_slot,
    open_slots,
    start_code,
    wait_for_line,
)

pytestmark = pytest.mark.process

FOREVER = "\nwhile 1: signal.pause()"
RAY_ADDRESS = os.environ.get("RAMIFY_RAY", "")  # of a running cluster, of which this machine is a node
UP = "import signal; print('up', flush=True)" + FOREVER


@pytest.fixture(params=["local", "in-process", *(["ray"] if RAY_ADDRESS else [])])
def launcher(request) -> Launcher:
    if request.param == "ray":
        return request.getfixturevalue("ray_launcher")
    return LocalLauncher() if request.param == "local" else InProcessLauncher()


@pytest.fixture(scope="module")
def ray_launcher() -> Iterator[Launcher]:
    launcher = RayLauncher.connect(RAY_ADDRESS)
    yield launcher
    launcher.disconnect()


@pytest.fixture
def log(tmp_path) -> ProcessLog:
    return ProcessLog(tmp_path / "logs" / "process.log", append=True)


def test_nodes_have_names_hosts_and_cores(launcher):
    nodes = launcher.list_nodes()
    assert len({node.name for node in nodes}) == len(nodes) > 0
    assert all(node.name and node.host and node.num_cpus >= 1 for node in nodes)
    assert sum(node.is_head for node in nodes) == 1


async def test_output_and_variables_are_those_of_one_execution(launcher, log):
    code = "import os, sys; print(os.environ['WORD'], flush=True); print('error', file=sys.stderr)"
    for word in ("first", "second"):
        async with open_slot(launcher) as slot:
            await start_code(slot, code, log, env={"WORD": word})
            assert await slot.wait() == 0
            assert slot.poll() == 0
        assert log.tail() == f"{word}\nerror"
    assert log.path.read_text() == "first\nerror\nsecond\nerror\n"


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 128 + 9)]
)
async def test_exit_code(launcher, log, code, exit_code):
    async with open_slot(launcher) as slot:
        await start_code(slot, code, log)
        assert await asyncio.gather(slot.wait(), slot.wait()) == [exit_code, exit_code]
        assert await slot.stop() == exit_code
        assert not slot.is_lost


async def test_large_output_is_complete_when_the_exit_is_seen(launcher, log):
    async with open_slot(launcher) as slot:
        await start_code(slot, "for number in range(60000): print(number)", log)
        assert await slot.wait() == 0
        assert log.path.read_text() == "".join(f"{number}\n" for number in range(60000))


async def test_command_that_cannot_be_started_is_named_in_the_log(launcher, log):
    async with open_slot(launcher) as slot:
        await slot.start(ProcessStart(("/nowhere/program",)), log)
        assert await slot.wait() == EXIT_NOT_STARTED
        assert log.tail() == "/nowhere/program cannot be started: No such file or directory"


async def test_signals_reach_the_process_once_each(launcher, log):
    code = "import signal, sys; signal.signal(10, lambda *_: print('usr1', flush=True)); signal.signal(15, sys.exit)\n"
    async with open_slot(launcher) as slot:
        await start_code(slot, code + UP, log)
        await wait_for_line(log, "up")
        assert slot.pid > 0
        slot.send_signal(signal.SIGUSR1)
        await wait_for_line(log, "usr1")
        slot.send_signal(signal.SIGTERM)
        await slot.wait()
        assert log.tail().splitlines()[:2] == ["up", "usr1"]


async def test_signal_before_the_start_is_delivered_after_it(launcher, log):
    async with open_slot(launcher) as slot:
        slot.send_signal(signal.SIGTERM)
        await start_code(slot, UP, log)
        assert await slot.wait() == 128 + signal.SIGTERM


async def test_stop_ends_the_process_and_its_descendants(launcher, log, tmp_path):
    async with open_slot(launcher) as slot:
        await start_code(slot, daemon_code(tmp_path / "lock") + FOREVER, log)
        await wait_for_line(log, "up")
        assert slot.poll() is None
        assert is_locked(tmp_path / "lock")
        assert await slot.stop() == 128 + signal.SIGTERM
        assert not is_locked(tmp_path / "lock")


async def test_requested_stop_is_seen_as_an_exit(launcher, log):
    async with open_slot(launcher) as slot:
        await start_code(slot, UP, log)
        await wait_for_line(log, "up")
        slot.request_stop()
        assert await slot.wait() == 128 + signal.SIGTERM


async def test_exit_is_seen_when_no_descendant_is_left(launcher, log, tmp_path):
    async with open_slot(launcher) as slot:
        await start_code(slot, daemon_code(tmp_path / "lock"), log)
        assert await slot.wait() == 0
        assert not is_locked(tmp_path / "lock")


async def test_kill_ends_a_stopped_process(launcher, log):
    async with open_slot(launcher) as slot:
        await start_code(slot, "import os, signal; print('up', flush=True); os.kill(os.getpid(), signal.SIGSTOP)", log)
        await wait_for_line(log, "up")
        killing = asyncio.create_task(slot.kill())
        assert await slot.wait() == 128 + signal.SIGKILL
        killing.cancel()


async def test_files_are_written_where_the_process_runs_and_removed(launcher, log):
    async with open_slot(launcher) as slot:
        files = {"config.toml": "name = 'ü'\n", "sub/more.txt": ""}
        names = [str(slot.directory / name) for name in files]
        code = f"import os; print(open({names[0]!r}, encoding='utf-8').read(), os.path.exists({names[1]!r}))"
        await start_code(slot, code, log, files=files, env={"PYTHONIOENCODING": "utf-8"})
        assert await slot.wait() == 0
        assert log.tail() == "name = 'ü'\n True"
    async with open_slot(launcher) as slot:
        await start_code(slot, f"import os; print([os.path.exists(name) for name in {names!r}])", log)
        await slot.wait()
        assert log.tail() == "[False, False]"


async def test_port_is_held_for_the_process_alone_unless_it_is_released(launcher, log):
    code = """
import socket, sys
from ramify.processes.wire.listener import open_listener
host, port = sys.argv[1], int(sys.argv[2])
try:
    socket.create_server((host, port))
except OSError as error:
    print(error.errno)
open_listener(host, port)
print("listening")
"""
    async with open_slots(launcher, 2, build_placement(2, num_cpus=0.1)) as slots:
        assert len({(slot.host, slot.port) for slot in slots}) == 2
        slot = slots[0]
        await slot.start(ProcessStart((sys.executable, "-c", code, slot.host, str(slot.port))), log)
        await slot.wait()
        assert log.tail().splitlines() == [str(errno.EADDRINUSE), "listening"]
        await slots[1].start(
            ProcessStart((sys.executable, "-c", code, slots[1].host, str(slots[1].port)), releases_port=True), log
        )
        await slots[1].wait()
        assert log.tail() == "listening"


async def test_slot_of_a_process_with_a_fixed_address_has_no_port(launcher):
    async with open_slot(launcher, placement=None) as slot:
        assert slot.port == 0
        assert slot.node == ""


async def test_stop_before_the_start_does_nothing(launcher):
    for placement in (None, PLACEMENT):
        async with open_slot(launcher, placement) as slot:
            assert await slot.stop() is None
