"""The supervisor with real processes: it restarts them, reports failures, and leaves none behind."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from ramify.core.errors import ConfigInvalid, DeadlineExceeded, ProcessDied, StorageFull
from ramify.launch.launcher import ProcessRole
from ramify.launch.local_launcher import LocalLauncher
from ramify.launch.supervisor import (
    RunOutcome,
    Supervisor,
    SupervisorSettings,
)
from ramify.processes.child import KILL_TIMEOUT, STOP_TIMEOUT
from ramify.processes.watcher import DESCENDANTS_TIMEOUT
from ramify.run.state import ProcessState, ProcessStatus
from tests.support.processes import (
    IGNORES_SIGTERM,
    RUNS_FOREVER,
    TIMEOUT,
    async_wait_until,
    build_spec,
    fails_with,
    list_running,
    read_pids,
    wait_until,
)
from tests.support.supervisor_process import SAVES_CHECKPOINT

pytestmark = pytest.mark.process

DONE = "sys.exit(0)"
SETTINGS = SupervisorSettings(first_restart_delay=0.01)


async def supervise(
    specs, *, restarts=3, grace_period=5.0, lines=None, settings=SETTINGS, timeout=TIMEOUT, **options
) -> RunOutcome:
    """Run a supervisor; its messages are appended to `lines`."""
    print_line = (lambda line: None) if lines is None else lines.append
    supervisor = Supervisor(
        specs, max_restarts=restarts, grace_period=grace_period, print_line=print_line, settings=settings, **options
    )
    async with asyncio.timeout(timeout):
        return await supervisor.run()


def waits_for(path: str) -> str:
    """Return code that waits for a file."""
    return f"import time\nwhile not os.path.exists(DIR + '/{path}'): time.sleep(0.01)\n"


# -- the end of a run ----------------------------------------------------------------------------------------------


async def test_crashed_process_is_restarted_and_reported(tmp_path):
    twice = "import signal\nif len(open(DIR + '/env.pids').readlines()) == 1: os.kill(os.getpid(), 9)\n" + RUNS_FOREVER
    leader = "import time\nwhile len(open(DIR + '/env.pids').readlines()) < 2: time.sleep(0.01)\n"
    lines = []
    leader = build_spec(tmp_path, "orchestrator", waits_for("env.pids") + leader, ProcessRole.LEADER)
    assert await supervise([build_spec(tmp_path, "env", twice), leader], lines=lines) is RunOutcome.FINISHED
    assert len(read_pids(tmp_path, "env")) == 2
    assert lines == ["env was killed by SIGKILL; restarting in 0.01 s (restart 1 of 3)"]


async def test_repeated_crashes_end_the_run_with_the_end_of_the_log(tmp_path):
    broken = build_spec(tmp_path, "trainer", "print('no room'); sys.exit(5)", ProcessRole.FOLLOWER)
    message = r"trainer ended with exit code 5, after 1 restarts; last lines of .*trainer.log:\nno room$"
    with pytest.raises(ProcessDied, match=message):
        await supervise([broken, build_spec(tmp_path, "orchestrator", RUNS_FOREVER, ProcessRole.LEADER)], restarts=1)
    assert len(read_pids(tmp_path, "trainer")) == 2
    assert list_running(tmp_path) == []


async def test_identical_crashes_end_the_run_early(tmp_path):
    broken = build_spec(tmp_path, "orchestrator", "raise ValueError('step', 3)", ProcessRole.LEADER)
    with pytest.raises(ProcessDied, match=r"ended with exit code 1, the same error 3 times in a row(.|\n)*ValueError"):
        await supervise([broken], restarts=100)
    assert len(read_pids(tmp_path, "orchestrator")) == 3


async def test_identical_crashes_with_long_times_between_are_no_bug(tmp_path):
    code = "if len(open(DIR + '/env.pids').readlines()) < 5: raise ValueError('no luck')\n" + RUNS_FOREVER
    leader = "import time\nwhile not os.path.exists(DIR + '/env.pids') or "
    leader += "len(open(DIR + '/env.pids').readlines()) < 5: time.sleep(0.01)"
    specs = [build_spec(tmp_path, "env", code), build_spec(tmp_path, "orchestrator", leader, ProcessRole.LEADER)]
    assert await supervise(specs, restarts=10, settings=replace(SETTINGS, restart_window=0.0)) is RunOutcome.FINISHED


@pytest.mark.parametrize(
    ("role", "failure", "expected"),
    [
        (ProcessRole.FOLLOWER, StorageFull("no room on /data"), StorageFull("no room on /data")),
        (ProcessRole.LEADER, DeadlineExceeded("waited"), DeadlineExceeded("waited")),
        (
            ProcessRole.SERVICE,
            ConfigInvalid("unknown key", key="max_char"),
            ConfigInvalid("it cannot be started: unknown key", key="max_char"),
        ),
    ],
    ids=["permanent", "leader", "config"],
)
async def test_failure_that_a_restart_cannot_fix_ends_the_run(tmp_path, role, failure, expected):
    specs = [build_spec(tmp_path, "it", fails_with(failure), role)]
    if role is not ProcessRole.LEADER:
        specs.append(build_spec(tmp_path, "orchestrator", RUNS_FOREVER, ProcessRole.LEADER))
    with pytest.raises(type(expected), match=f"^{expected}$"):
        await supervise(specs)
    assert len(read_pids(tmp_path, "it")) == 1


# -- silence -------------------------------------------------------------------------------------------------------

ANSWERS = """
import http.server, signal
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", {port}), Handler)
server.timeout = 0.01
while not os.path.exists(DIR + "/done"): server.handle_request()
"""


def answering_leader(tmp_path, port: int, **more):
    """Return a leader that answers until there is a file `done`."""
    more["address"] = f"http://127.0.0.1:{port}/health"
    return build_spec(tmp_path, "orchestrator", ANSWERS.format(port=port), ProcessRole.LEADER, **more)


def stop_if_ready(statuses) -> None:
    """Stop the only process when it has answered."""
    if statuses[0].state is ProcessState.READY:
        process = psutil.Process(statuses[0].pid)
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED)


async def test_unresponsive_leader_is_reported_killed_and_restarted(tmp_path, free_port):
    lines, seen = [], []
    leader = answering_leader(tmp_path, free_port, hang_timeout=0.6, last_state=lambda: "last state: step=3/4")

    def on_change(statuses):
        seen.append(statuses)
        stop_if_ready(statuses)
        if statuses[0].state is ProcessState.SILENT:
            (tmp_path / "done").touch()  # for the restarted leader

    assert await supervise([leader], lines=lines, on_change=on_change) is RunOutcome.FINISHED
    first = read_pids(tmp_path, "orchestrator")[0]
    silent = rf"orchestrator \(process {first}, stopped\) has not answered at {leader.address} for \d+ s"
    assert re.fullmatch(silent, lines[0])
    assert lines[1] == "last state: step=3/4"
    assert re.fullmatch(
        r"orchestrator did not answer for \d+ s and was killed; restarting in 0.01 s \(restart 1 of 3\)", lines[2]
    )
    states = [process.state for (process,) in seen]
    assert states.index(ProcessState.READY) < states.index(ProcessState.SILENT) < states.index(ProcessState.ENDED)
    assert list_running(tmp_path) == []


async def test_leader_that_responds_in_time_is_not_killed(tmp_path, free_port):
    """The leader is stopped until it is reported as silent, long before its `hang_timeout`."""
    lines, states = [], []

    def on_change(seen):
        states.append(seen[0].state)
        if states[-1] is ProcessState.READY and ProcessState.SILENT not in states:
            os.kill(seen[0].pid, signal.SIGSTOP)
        elif states[-1] is ProcessState.SILENT:
            os.kill(seen[0].pid, signal.SIGCONT)
        elif ProcessState.SILENT in states:
            (tmp_path / "done").touch()

    leader = answering_leader(tmp_path, free_port, hang_timeout=60.0)
    settings = replace(SETTINGS, max_probe_interval=0.3)
    assert await supervise([leader], lines=lines, on_change=on_change, settings=settings) is RunOutcome.FINISHED
    assert lines == []
    assert len(read_pids(tmp_path, "orchestrator")) == 1


# -- starts and readiness ------------------------------------------------------------------------------------------


async def test_process_that_never_becomes_ready_is_reported(tmp_path, free_port):
    hangs = build_spec(tmp_path, "inference", RUNS_FOREVER, address=f"tcp://127.0.0.1:{free_port}", ready_timeout=0.3)
    with pytest.raises(
        DeadlineExceeded, match=rf"inference did not answer at tcp://127.0.0.1:{free_port} within 0.3 s"
    ):
        await supervise([hangs, build_spec(tmp_path, "orchestrator", RUNS_FOREVER, ProcessRole.LEADER)])
    assert list_running(tmp_path) == []


async def test_start_is_built_before_each_start(tmp_path):
    crashes = "if len(open(DIR + '/built').read()) < 2: sys.exit(9)"
    spec = build_spec(tmp_path, "orchestrator", crashes, ProcessRole.LEADER)

    def build_start(slot):
        with (tmp_path / "built").open("a") as file:
            file.write("x")
        return spec.build_start(slot)

    assert await supervise([replace(spec, build_start=build_start)]) is RunOutcome.FINISHED
    assert (tmp_path / "built").read_text() == "xx"


async def test_finished_follower_restarts_with_the_leader(tmp_path):
    count = "len(open(DIR + '/trainer.pids').readlines())"
    leader = f"""
import time
starts = len(open(DIR + '/orchestrator.pids').readlines())
while not os.path.exists(DIR + '/trainer.pids') or {count} < starts: time.sleep(0.01)
trainer = open(DIR + '/trainer.pids').readlines()[-1].strip()
while os.path.exists('/proc/' + trainer): time.sleep(0.01)  # until the supervisor has seen its end
sys.exit(9 if starts == 1 else 0)
"""
    specs = [
        build_spec(tmp_path, "trainer", DONE, ProcessRole.FOLLOWER),
        build_spec(tmp_path, "orchestrator", leader, ProcessRole.LEADER),
    ]
    assert await supervise(specs) is RunOutcome.FINISHED
    assert len(read_pids(tmp_path, "trainer")) == 2


async def test_a_follower_has_the_grace_period_to_write_its_last_weights(tmp_path):
    writes = """
import signal, time
def write(*_):
    time.sleep(1)
    open(DIR + '/written', 'w').close()
    sys.exit(0)
signal.signal(signal.SIGTERM, write)
open(DIR + '/ready', 'w').close()
while True: time.sleep(1)
"""
    specs = [
        build_spec(tmp_path, "trainer", writes, ProcessRole.FOLLOWER),
        build_spec(tmp_path, "orchestrator", waits_for("ready") + DONE, ProcessRole.LEADER),
    ]
    launcher = LocalLauncher(stop_timeout=0.1)
    assert await supervise(specs, grace_period=30.0, launcher=launcher) is RunOutcome.FINISHED
    assert (tmp_path / "written").exists()


async def test_status_that_cannot_be_recorded_at_the_end_keeps_the_outcome(tmp_path):
    lines = []

    def on_change(processes):
        if processes[0].state is ProcessState.ENDED and processes[1].state is ProcessState.ENDED:
            raise StorageFull("no room")

    specs = [
        build_spec(tmp_path, "inference", RUNS_FOREVER),
        build_spec(tmp_path, "orchestrator", waits_for("inference.pids") + DONE, ProcessRole.LEADER),
    ]
    assert await supervise(specs, lines=lines, on_change=on_change) is RunOutcome.FINISHED
    assert lines == ["the last status of the processes was not recorded: no room"]


def test_report_that_was_overtaken_is_dropped(tmp_path):
    reports = []
    supervisor = Supervisor([], max_restarts=0, grace_period=1.0)
    for number in (1, 3, 2):
        status = ProcessStatus("it", ProcessState.READY, pid=number, restarts=0, seconds=0.0)
        supervisor._report(reports.append, number, [status])
    assert [status.pid for (status,) in reports] == [1, 3]


async def test_stop_request_reaches_a_leader_that_is_being_started(tmp_path):
    lines = []
    leader = build_spec(tmp_path, "orchestrator", RUNS_FOREVER, ProcessRole.LEADER)
    supervisor = Supervisor([leader], max_restarts=0, grace_period=60.0, print_line=lines.append)
    running = asyncio.create_task(supervisor.run())
    await async_wait_until(lambda: supervisor._processes)
    supervisor.request_stop()
    async with asyncio.timeout(TIMEOUT):
        assert await running is RunOutcome.STOPPED
    assert lines[-1].startswith("orchestrator was killed by SIGTERM before saving a checkpoint")


# -- signals -------------------------------------------------------------------------------------------------------


@pytest.fixture
def supervisor_process(tmp_path):
    """A supervisor in its own process, with all its processes up: one ignores SIGTERM, one has a daemon."""
    command = [sys.executable, "-m", "tests.support.supervisor_process", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    names = ("inference", "env", "daemon", "trainer", "orchestrator")
    wait_until(lambda: all(read_pids(tmp_path, name) for name in names) and (tmp_path / "listening").exists())
    wait_until(lambda: "ignoring" in (tmp_path / "trainer.log").read_text())
    yield process
    process.kill()
    process.communicate(timeout=60)


def test_interrupt_saves_a_checkpoint_and_ends_all_processes_within_ten_seconds(supervisor_process, tmp_path):
    assert len(list_running(tmp_path)) == 5
    assert STOP_TIMEOUT + DESCENDANTS_TIMEOUT + KILL_TIMEOUT <= 10
    supervisor_process.send_signal(signal.SIGINT)
    assert supervisor_process.wait(timeout=60) == RunOutcome.INTERRUPTED.value == 130
    assert list_running(tmp_path) == []
    assert (tmp_path / "checkpoint").exists()
    assert "Traceback" not in supervisor_process.stderr.read()


def test_killed_supervisor_leaves_no_process(supervisor_process, tmp_path):
    supervisor_process.kill()
    wait_until(lambda: list_running(tmp_path) == [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
async def test_stop_signal_saves_a_checkpoint_and_exits_75(tmp_path, number):
    leader = build_spec(tmp_path, "orchestrator", SAVES_CHECKPOINT, ProcessRole.LEADER)
    running = asyncio.create_task(supervise([leader], grace_period=60.0))
    await async_wait_until((tmp_path / "listening").exists)
    signal.raise_signal(number)
    assert (await running).value == 75
    assert (tmp_path / "checkpoint").exists()
    assert list_running(tmp_path) == []


@pytest.mark.parametrize("first", ["interrupt", "request_stop"])
async def test_interrupt_of_a_stopping_run_ends_it_at_once(tmp_path, first):
    lines = []
    leader = build_spec(tmp_path, "orchestrator", IGNORES_SIGTERM, ProcessRole.LEADER)
    launcher = LocalLauncher(stop_timeout=0.2)
    supervisor = Supervisor([leader], max_restarts=0, grace_period=3600.0, launcher=launcher, print_line=lines.append)
    running = asyncio.create_task(supervisor.run())
    await async_wait_until(lambda: leader.log.exists() and "ignoring" in leader.log.read_text())
    getattr(supervisor, first)()
    await asyncio.sleep(0)
    assert not running.done()
    supervisor.interrupt()
    async with asyncio.timeout(TIMEOUT):
        assert await running is RunOutcome.INTERRUPTED
    assert lines[0].endswith("waiting up to 3600 s for a checkpoint; Ctrl-C ends the run at once")
    assert list_running(tmp_path) == []


async def test_cancelled_supervisor_saves_a_checkpoint(tmp_path):
    """This is how the interrupt of a notebook reaches the supervisor, which runs in another thread."""
    leader = build_spec(tmp_path, "orchestrator", SAVES_CHECKPOINT, ProcessRole.LEADER)
    running = asyncio.create_task(supervise([leader], grace_period=60.0))
    await async_wait_until((tmp_path / "listening").exists)
    running.cancel()
    async with asyncio.timeout(TIMEOUT):
        await asyncio.wait([running])
    assert running.cancelled()
    assert (tmp_path / "checkpoint").exists()


async def test_stop_without_checkpoint_ends_after_the_grace_period(tmp_path):
    lines = []
    leader = build_spec(tmp_path, "orchestrator", IGNORES_SIGTERM, ProcessRole.LEADER)
    launcher = LocalLauncher(stop_timeout=0.2)
    supervisor = Supervisor([leader], max_restarts=0, grace_period=0.1, launcher=launcher, print_line=lines.append)
    running = asyncio.create_task(supervisor.run())
    await async_wait_until(lambda: leader.log.exists() and "ignoring" in leader.log.read_text())
    supervisor.request_stop()
    async with asyncio.timeout(TIMEOUT):
        assert await running is RunOutcome.STOPPED
    assert lines[-1] == "no new checkpoint; the previous one is used"
