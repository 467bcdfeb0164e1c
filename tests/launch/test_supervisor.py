"""The supervisor with real processes: it keeps them alive, ends by name, and leaves none behind."""

import asyncio
import os
import re
import signal
import subprocess
import sys

import pytest

from ramify.errors import ConfigInvalid, DeadlineExceeded, ProcessDied, StorageFull
from ramify.launch import restart_budget
from ramify.launch.parent_watch import KILL_TIMEOUT as WATCH_KILL_TIMEOUT
from ramify.launch.process import KILL_TIMEOUT, STOP_TIMEOUT, ProcessRole, ProcessState, describe_exit
from ramify.launch.restart_budget import MAX_DELAY, RESTART_WINDOW, RestartBudget
from ramify.launch.supervisor import RunOutcome, Supervisor, parse_failure_from_log
from tests.launch.scripts import FOR_EVER, alive, entry, pids, until

DONE = "sys.exit(0)"


def supervised(entries, *, restarts=3, grace=5.0, said=None, changed=None) -> RunOutcome:
    say = (lambda line: None) if said is None else said.append
    return asyncio.run(
        Supervisor(entries, max_restarts=restarts, grace_period=grace, print_line=say, on_change=changed).run()
    )


def after(path: str) -> str:
    """Code that waits for a file."""
    return f"import time\nwhile not os.path.exists(DIR + '/{path}'): time.sleep(0.01)\n"


# -- the end of a run ----------------------------------------------------------------------------------------------


def test_run_ends_with_the_leader_and_stops_all_processes(tmp_path):
    leader = after("inference.pids") + DONE
    entries = [entry(tmp_path, "inference", FOR_EVER), entry(tmp_path, "orchestrator", leader, ProcessRole.LEADER)]
    assert supervised(entries) is RunOutcome.FINISHED
    assert len(pids(tmp_path, "inference")) == 1
    assert alive(tmp_path) == []


def test_crashed_process_is_restarted_and_reported(tmp_path):
    twice = "import signal\nif len(open(DIR + '/env.pids').readlines()) == 1: os.kill(os.getpid(), 9)\n" + FOR_EVER
    leader = "import time\nwhile len(open(DIR + '/env.pids').readlines()) < 2: time.sleep(0.01)\n"
    said = []
    leader = entry(tmp_path, "orchestrator", after("env.pids") + leader, ProcessRole.LEADER)
    assert supervised([entry(tmp_path, "env", twice), leader], said=said) is RunOutcome.FINISHED
    assert len(pids(tmp_path, "env")) == 2
    assert said == ["env was ended by SIGKILL; started again in 0.5 s (1 of 3)"]


def test_repeated_crashes_end_the_run_with_the_end_of_the_log(tmp_path):
    broken = entry(tmp_path, "trainer", "print('no room'); sys.exit(5)", ProcessRole.FOLLOWER)
    said = r"trainer ended with exit code 5, after 1 restarts; the end of .*trainer.log:\nno room$"
    with pytest.raises(ProcessDied, match=said):
        supervised([broken, entry(tmp_path, "orchestrator", FOR_EVER, ProcessRole.LEADER)], restarts=1)
    assert len(pids(tmp_path, "trainer")) == 2
    assert alive(tmp_path) == []


def test_identical_crashes_end_the_run_early(tmp_path, monkeypatch):
    monkeypatch.setattr(restart_budget, "FIRST", 0.01)
    broken = entry(tmp_path, "orchestrator", "raise ValueError('step', 3)", ProcessRole.LEADER)
    with pytest.raises(ProcessDied, match=r"ended with exit code 1, 3 times in a row in the same way(.|\n)*ValueError"):
        supervised([broken], restarts=100)
    assert len(pids(tmp_path, "orchestrator")) == 3


def test_permanent_failure_is_not_retried(tmp_path):
    broken = entry(tmp_path, "trainer", "print('StorageFull: no room on /data'); sys.exit(1)", ProcessRole.FOLLOWER)
    with pytest.raises(StorageFull, match=r"^no room on /data$"):
        supervised([broken, entry(tmp_path, "orchestrator", FOR_EVER, ProcessRole.LEADER)])
    assert len(pids(tmp_path, "trainer")) == 1


def test_failure_of_the_leader_ends_the_run(tmp_path):
    stalled = entry(
        tmp_path, "orchestrator", "print('DeadlineExceeded: waited for inference'); sys.exit(1)", ProcessRole.LEADER
    )
    with pytest.raises(DeadlineExceeded, match="waited for inference"):
        supervised([stalled])


def test_exit_code_two_raises_config_invalid(tmp_path):
    wrong = entry(tmp_path, "env", "print('taskset.max_char: unknown key'); sys.exit(2)")
    with pytest.raises(ConfigInvalid, match=r"env cannot be started:\ntaskset.max_char: unknown key"):
        supervised([wrong, entry(tmp_path, "orchestrator", FOR_EVER, ProcessRole.LEADER)])


def test_missing_command_is_reported(tmp_path):
    absent = entry(tmp_path, "trainer", "")
    object.__setattr__(absent, "command", ("torchrun-that-is-not-there",))
    with pytest.raises(ProcessDied, match="torchrun-that-is-not-there cannot be started"):
        supervised([absent, entry(tmp_path, "orchestrator", FOR_EVER, ProcessRole.LEADER)], restarts=0)


# -- silence -------------------------------------------------------------------------------------------------------

ANSWERS = """
import http.server, signal
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", {port}), Handler)
server.handle_request()
"""
STOPS = "if len(open(DIR + '/orchestrator.pids').readlines()) == 1: os.kill(os.getpid(), signal.SIGSTOP)"


def stopping(tmp_path, port: int, code: str):
    """A leader that answers once and then runs `code`."""
    address = f"http://127.0.0.1:{port}/health"
    more = {"address": address, "hang_timeout": 0.6, "last_state": lambda: "last state: step=3/4"}
    return entry(tmp_path, "orchestrator", f"{ANSWERS.format(port=port)}\n{code}", ProcessRole.LEADER, **more)


def test_unresponsive_leader_is_reported_killed_and_restarted(tmp_path, free_port):
    said, seen = [], []
    leader = stopping(tmp_path, free_port, STOPS)
    assert supervised([leader], said=said, changed=seen.append) is RunOutcome.FINISHED
    first = pids(tmp_path, "orchestrator")[0]
    silent = rf"orchestrator \(process {first}, stopped\) has not answered at {leader.address} for \d+ s"
    assert re.fullmatch(silent, said[0])
    assert said[1] == "last state: step=3/4"
    assert re.fullmatch(
        r"orchestrator did not answer for \d+ s and was killed; started again in 0.5 s \(1 of 3\)", said[2]
    )
    states = [process.state for (process,) in seen]
    assert states.index(ProcessState.READY) < states.index(ProcessState.SILENT) < states.index(ProcessState.ENDED)
    assert alive(tmp_path) == []


def test_leader_that_stays_unresponsive_ends_the_run(tmp_path, free_port):
    leader = stopping(tmp_path, free_port, "os.kill(os.getpid(), signal.SIGSTOP)")
    with pytest.raises(ProcessDied, match=r"orchestrator did not answer for \d+ s and was killed, after 0 restarts"):
        supervised([leader], restarts=0)
    assert alive(tmp_path) == []


def test_leader_that_responds_in_time_is_not_killed(tmp_path, free_port):
    """It is stopped until it was seen to be silent, for half of the time that it may be."""
    answers = ANSWERS.format(port=free_port) + "import threading\nthreading.Thread(target=server.serve_forever).start()"
    code = f"{answers}\n{after('continued')}server.shutdown()"
    said, states = [], []

    def changed(seen):
        states.append(seen[0].state)
        if states[-1] is ProcessState.READY and ProcessState.SILENT not in states:
            os.kill(seen[0].pid, signal.SIGSTOP)
        elif states[-1] is ProcessState.SILENT:
            os.kill(seen[0].pid, signal.SIGCONT)
        elif ProcessState.SILENT in states:
            (tmp_path / "continued").touch()

    more = {"address": f"http://127.0.0.1:{free_port}/health", "hang_timeout": 6.0}
    leader = entry(tmp_path, "orchestrator", code, ProcessRole.LEADER, **more)
    assert supervised([leader], said=said, changed=changed) is RunOutcome.FINISHED
    assert said == []
    assert len(pids(tmp_path, "orchestrator")) == 1


# -- starts and readiness ------------------------------------------------------------------------------------------


def test_process_that_never_becomes_ready_is_reported(tmp_path, free_port):
    hangs = entry(tmp_path, "inference", FOR_EVER, address=f"tcp://127.0.0.1:{free_port}", deadline=0.3)
    with pytest.raises(
        DeadlineExceeded, match=rf"inference did not answer at tcp://127.0.0.1:{free_port} within 0.3 s"
    ):
        supervised([hangs, entry(tmp_path, "orchestrator", FOR_EVER, ProcessRole.LEADER)])
    assert alive(tmp_path) == []


def test_prepare_runs_before_each_start(tmp_path):
    def prepare():
        with (tmp_path / "prepared").open("a") as file:
            file.write("x")

    crashes = "if len(open(DIR + '/prepared').read()) < 2: sys.exit(9)"
    assert (
        supervised([entry(tmp_path, "orchestrator", crashes, ProcessRole.LEADER, prepare=prepare)])
        is RunOutcome.FINISHED
    )
    assert (tmp_path / "prepared").read_text() == "xx"


def test_finished_follower_restarts_with_the_leader(tmp_path):
    count = "len(open(DIR + '/trainer.pids').readlines())"
    leader = f"""
import time
lives = len(open(DIR + '/orchestrator.pids').readlines())
while not os.path.exists(DIR + '/trainer.pids') or {count} < lives: time.sleep(0.01)
trainer = open(DIR + '/trainer.pids').readlines()[-1].strip()
while os.path.exists('/proc/' + trainer): time.sleep(0.01)  # until the supervisor has seen its end
sys.exit(9 if lives == 1 else 0)
"""
    entries = [
        entry(tmp_path, "trainer", DONE, ProcessRole.FOLLOWER),
        entry(tmp_path, "orchestrator", leader, ProcessRole.LEADER),
    ]
    assert supervised(entries) is RunOutcome.FINISHED
    assert len(pids(tmp_path, "trainer")) == 2


def test_process_states_are_reported(tmp_path):
    seen = []
    entries = [entry(tmp_path, "orchestrator", DONE, ProcessRole.LEADER)]
    supervised(entries, changed=seen.append)
    states = [process.state for (process,) in seen]
    assert states[0] is ProcessState.STARTING
    assert states[-1] is ProcessState.ENDED
    assert seen[0][0].pid == pids(tmp_path, "orchestrator")[0]


# -- signals -------------------------------------------------------------------------------------------------------


@pytest.fixture
def standing(tmp_path):
    """A supervisor in its own process, with everything up: one deaf to SIGTERM, one with a daemon."""
    command = [sys.executable, "-m", "tests.launch.standing", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    names = ("inference", "env", "daemon", "trainer", "orchestrator")
    until(lambda: all(pids(tmp_path, name) for name in names) and (tmp_path / "listening").exists())
    until(lambda: "deaf" in (tmp_path / "trainer.log").read_text())
    yield process
    process.kill()
    process.communicate(timeout=20)


def test_interrupt_ends_all_processes_within_ten_seconds(standing, tmp_path):
    assert len(alive(tmp_path)) == 5
    assert STOP_TIMEOUT + WATCH_KILL_TIMEOUT + KILL_TIMEOUT <= 10
    standing.send_signal(signal.SIGINT)
    assert standing.wait(timeout=10) == 130
    assert alive(tmp_path) == []
    assert "Traceback" not in standing.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_stop_signal_saves_a_checkpoint_and_exits_75(standing, tmp_path, number):
    os.kill(pids(tmp_path, "trainer")[0], signal.SIGKILL)  # the deaf one would make us wait
    standing.send_signal(number)
    assert standing.wait(timeout=15) == 75
    assert (tmp_path / "checkpoint").exists()
    until(lambda: alive(tmp_path) == [], seconds=1)


def test_killed_supervisor_leaves_no_process(standing, tmp_path):
    standing.kill()
    until(lambda: alive(tmp_path) == [], seconds=12)


def test_stop_without_checkpoint_ends_after_the_grace_period(tmp_path):
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); open(DIR + '/deaf', 'w').close(); signal.pause()"
    said = []

    async def run():
        leader = entry(tmp_path, "orchestrator", deaf, ProcessRole.LEADER)
        supervisor = Supervisor([leader], max_restarts=0, grace_period=0.1, stop_timeout=0.1, print_line=said.append)
        running = asyncio.create_task(supervisor.run())
        while not (tmp_path / "deaf").exists():
            await asyncio.sleep(0.01)
        supervisor.request_stop()
        return await running

    assert asyncio.run(run()) is RunOutcome.STOPPED
    assert said[-1] == "no checkpoint was made; the last one holds"


# -- the small parts -----------------------------------------------------------------------------------------------


def test_restart_budget_counts_per_hour_with_growing_delays():
    now = 0.0
    budget = RestartBudget(3, clock=lambda: now)
    assert [budget.take_restart() for _ in range(4)] == [0.5, 1.0, 2.0, None]
    now = RESTART_WINDOW
    assert budget.take_restart() == 0.5
    many = RestartBudget(100, clock=lambda: now)
    assert [many.take_restart() for _ in range(20)][-1] == MAX_DELAY


def test_describe_exit():
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(128 + 9) == describe_exit(-9) == "was ended by SIGKILL"


def test_only_ramify_failures_are_parsed_from_a_log():
    assert parse_failure_from_log("starting\nPortTaken: 8000").message == "8000"
    assert parse_failure_from_log("ProviderError: gone; the end of its log:\nline 1\nline 2").message.endswith("line 2")
    assert parse_failure_from_log("PortTaken: 8000\nTraceback (most recent call last):\n  File\nValueError: x") is None
    assert parse_failure_from_log("ValueError: x") is None
    assert parse_failure_from_log("") is None
