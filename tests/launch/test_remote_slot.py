"""Processes on a node that is cut off: they live as long as their lease, and are replaced no sooner."""

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from ramify.core.errors import DeadlineExceeded, StorageFailed
from ramify.launch.launcher import ProcessRole, ProcessStart
from ramify.launch.local_launcher import LocalSlot
from ramify.launch.remote_slot import ExchangeRequest, NodeProcess
from ramify.launch.supervisor import RunOutcome, Supervisor, SupervisorSettings
from ramify.processes.exit import EXIT_NOT_STARTED
from ramify.processes.log import ProcessLog
from ramify.run.fencing.lease import LeaseTerms, read_lease_clock
from ramify.run.state import ProcessState
from tests.support.launchers import (
    PYTHON,
    SETTINGS,
    InProcessLauncher,
    build_placement,
    daemon_code,
    is_locked,
    open_slots,
    start_code,
    wait_for_line,
)
from tests.support.processes import build_spec

TERMS = LeaseTerms(duration=1.5, slack=1.5)
LEASED = build_placement(lease=TERMS)
STOPS_ITSELF = "\nimport os; os.kill(os.getpid(), signal.SIGSTOP)"
FOREVER = "\nwhile 1: signal.pause()"


@pytest.fixture
def launcher() -> InProcessLauncher:
    return InProcessLauncher()


@pytest.fixture
def log(tmp_path) -> ProcessLog:
    return ProcessLog(tmp_path / "process.log")


@pytest.mark.process
@pytest.mark.promise
@pytest.mark.parametrize("ending", [FOREVER, STOPS_ITSELF])
async def test_cut_off_process_is_dead_before_it_is_given_up(launcher, log, tmp_path, ending):
    async with open_slots(launcher, placement=LEASED) as (slot,):
        await start_code(slot, daemon_code(tmp_path / "lock") + ending, log)
        await wait_for_line(log, "up")
        cut_at = read_lease_clock()
        launcher.clients[0].is_cut = True
        while is_locked(tmp_path / "lock"):
            assert slot.poll() is None
            await asyncio.sleep(0.01)
        killed_at = read_lease_clock()
        assert await slot.wait() == -signal.SIGKILL
        assert slot.is_lost
        assert slot.unreachable_seconds > TERMS.duration  # its node has not answered again
        assert killed_at - cut_at <= TERMS.duration + TERMS.slack
        assert read_lease_clock() - launcher.clients[0].replied_at >= TERMS.replacement_delay


@pytest.mark.process
async def test_process_survives_a_cut_that_is_shorter_than_its_lease(launcher, log):
    async with open_slots(launcher, placement=LEASED) as (slot,):
        await start_code(slot, "import signal; print('up', flush=True)" + FOREVER, log)
        await wait_for_line(log, "up")
        for _ in range(5):  # longer than its lease, all told
            launcher.clients[0].is_cut = True
            await asyncio.sleep(TERMS.duration / 4)
            launcher.clients[0].is_cut = False
            num_calls = launcher.clients[0].num_calls
            while launcher.clients[0].num_calls < num_calls + 4:
                await asyncio.sleep(0.01)
        assert slot.poll() is None
        assert await slot.stop() == 128 + signal.SIGTERM


@pytest.mark.process
@pytest.mark.promise
async def test_lost_rank_ends_the_leases_of_the_gang(launcher, log, tmp_path):
    """The head can still reach rank 1, but grants it no more renewals once rank 0 is lost."""
    async with open_slots(launcher, 2, placement=LEASED) as slots:
        await start_code(slots[0], "import signal; print('up', flush=True)" + FOREVER, log)
        await start_code(slots[1], daemon_code(tmp_path / "lock") + FOREVER, ProcessLog(tmp_path / "other.log"))
        await wait_for_line(log, "up")
        launcher.clients[0].is_cut = True
        assert await slots[0].wait() == -signal.SIGKILL
        assert await slots[1].wait() == 128 + signal.SIGKILL
        assert not is_locked(tmp_path / "lock")


@pytest.mark.process
async def test_lost_rank_is_named_although_another_failed_first(launcher, tmp_path):
    lines = []
    code = """
import time
while not os.path.exists(DIR + "/cut"): time.sleep(0.01)
if os.environ["RANK"] == os.environ["RAMIFY_GANG_TOKEN"] == "0": sys.exit(1)
time.sleep(60)
"""
    leader = "import time\nwhile len(open(DIR + '/trainer.pids').readlines()) < 4: time.sleep(0.01)"

    def on_change(statuses):
        if statuses[0].state is ProcessState.READY and not (tmp_path / "cut").exists():
            launcher.clients[1].is_cut = True
            (tmp_path / "cut").touch()

    gang = build_spec(tmp_path, "trainer", code, ProcessRole.FOLLOWER, num_ranks=2, placement=LEASED)
    (tmp_path / "trainer.pids").touch()
    specs = [gang, build_spec(tmp_path, "orchestrator", leader, ProcessRole.LEADER)]
    supervisor = Supervisor(
        specs, max_restarts=1, grace_period=1.0, launcher=launcher, print_line=lines.append, on_change=on_change
    )
    assert await supervisor.run() is RunOutcome.FINISHED
    assert lines[-1].startswith(
        "trainer is lost: its node node-1 could not be reached until its lease ended; restarting"
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("head_node", "report"),
    [
        ("node-9", "env: its node node-0 does not answer; env is replaced when its lease has ended"),
        (
            "node-0",
            "env: its node node-0, which is this machine, does not answer; check `ray status`; if Ray has "
            "ended, press Ctrl-C, start Ray again and repeat the command",
        ),
    ],
    ids=["other", "head"],
)
async def test_supervisor_reports_a_node_that_does_not_answer(tmp_path, head_node, report):
    launcher = InProcessLauncher(replace(SETTINGS, max_silence=0.2))
    lines, states = [], []
    leader = "import time\nwhile not os.path.exists(DIR + '/done'): time.sleep(0.01)"

    def on_change(statuses):
        """Cut the node off until it counts as silent."""
        states.append(statuses[0].state)
        if states[-1] is ProcessState.SILENT:
            launcher.clients[0].is_cut = False
        elif states[-1] is ProcessState.READY:
            launcher.clients[0].is_cut = ProcessState.SILENT not in states
            (tmp_path / "done").write_text("") if ProcessState.SILENT in states else None

    specs = [
        build_spec(tmp_path, "env", "import signal; signal.pause()", placement=build_placement()),
        build_spec(tmp_path, "orchestrator", leader, ProcessRole.LEADER),
    ]
    supervisor = Supervisor(
        specs,
        max_restarts=0,
        grace_period=1.0,
        launcher=launcher,
        print_line=lines.append,
        on_change=on_change,
        head_node=head_node,
        settings=SupervisorSettings(reachability_interval=0.05),
    )
    assert await supervisor.run() is RunOutcome.FINISHED
    assert lines[:2] == [report, "env: its node answers again"]
    assert supervisor.get_process_statuses()[0].node == "node-0"


@pytest.mark.process
async def test_process_that_cannot_be_reached_may_run_after_the_supervisor_has_stopped(tmp_path):
    launcher = InProcessLauncher(replace(SETTINGS, stop_timeout=0.15))
    lines = []
    leader = "import time\nwhile not os.path.exists(DIR + '/cut'): time.sleep(0.01)"

    def on_change(statuses):
        if statuses[0].state is ProcessState.READY:
            launcher.clients[0].is_cut = True
            (tmp_path / "cut").touch()

    lease = LeaseTerms(duration=30.0, slack=2.0)
    engine = build_spec(tmp_path, "inference", "import signal; signal.pause()", placement=build_placement(lease=lease))
    supervisor = Supervisor(
        [engine, build_spec(tmp_path, "orchestrator", leader, ProcessRole.LEADER)],
        max_restarts=0,
        grace_period=1.0,
        launcher=launcher,
        print_line=lines.append,
        on_change=on_change,
    )
    assert await supervisor.run() is RunOutcome.FINISHED
    statuses = supervisor.get_process_statuses()
    assert [status.state for status in statuses] == [ProcessState.SILENT, ProcessState.ENDED]
    assert [status.replacement_delay for status in statuses] == [lease.replacement_delay, None]
    assert lines[-1] == "inference may still run on node-0, which does not answer, until its lease has ended"


@pytest.mark.process
@pytest.mark.promise
async def test_start_that_arrives_after_the_lease_has_no_effect(tmp_path):
    process = NodeProcess(LeaseTerms(duration=0.1, slack=1.0), node="node", host="127.0.0.1")
    start = ProcessStart((*PYTHON, f"open({str(tmp_path / 'started')!r}, 'w')"))
    reply = await process.exchange(ExchangeRequest(start=start))
    assert not reply.is_started  # nothing is granted yet
    await asyncio.sleep(0.2)
    reply = await process.exchange(ExchangeRequest(granted_renewal=reply.renewal, start=start))
    assert not reply.is_started
    while not reply.is_started:  # until a grant arrives in time
        reply = await process.exchange(ExchangeRequest(granted_renewal=reply.renewal, start=start))
    await process.close()


async def test_stopped_slot_starts_nothing_any_more(tmp_path):
    process = NodeProcess(TERMS, node="node", host="127.0.0.1")
    start = ProcessStart((*PYTHON, f"open({str(tmp_path / 'started')!r}, 'w')"))
    first = await process.exchange(ExchangeRequest(is_stop_requested=True))
    reply = await process.exchange(ExchangeRequest(granted_renewal=first.renewal, start=start))
    assert reply.exit_code is not None
    assert reply.pid == 0
    await process.close()


class SlowSlot(LocalSlot):
    """A slot whose process may or may not start after `start` has failed."""

    has_exited = False

    async def start(self, start, log):
        raise DeadlineExceeded("python did not start within 60 s")


async def test_start_that_timed_out_is_no_exit_and_ends_with_its_lease(log):
    async with open_slots(InProcessLauncher(slot_class=SlowSlot), placement=LEASED) as (slot,):
        await start_code(slot, "", log)
        await wait_for_line(log, "DeadlineExceeded: python did not start within 60 s")
        failed_at = read_lease_clock()
        assert slot.poll() is None and not slot.has_exited
        assert await slot.wait() == -signal.SIGKILL
        assert slot.is_lost
        assert read_lease_clock() - failed_at > TERMS.duration  # the start may have succeeded just after its timeout


async def test_start_that_timed_out_is_an_exit_when_its_process_tree_is_empty(log, monkeypatch):
    async with open_slots(InProcessLauncher(slot_class=SlowSlot), placement=LEASED) as (slot,):
        await start_code(slot, "", log)
        await wait_for_line(log, "DeadlineExceeded: python did not start within 60 s")
        monkeypatch.setattr(SlowSlot, "has_exited", True)
        assert await slot.wait() == EXIT_NOT_STARTED
        assert not slot.is_lost


async def test_output_that_cannot_be_read_is_a_storage_failure():
    process = NodeProcess(TERMS, node="node", host="127.0.0.1")
    (Path(process.get_address().directory) / "output.log").unlink()
    with pytest.raises(StorageFailed, match=r"output.log"):
        await process.exchange(ExchangeRequest())
    await process.close()


async def test_output_that_the_head_has_takes_no_space_on_the_node():
    process = NodeProcess(TERMS, node="node", host="127.0.0.1", release_bytes=4096)
    log = Path(process.get_address().directory) / "output.log"
    output = bytes(range(1, 251)) * 200  # 50,000 bytes
    log.write_bytes(output)
    if not ProcessLog(log).release_space(0x1000):
        pytest.skip("the file system of temporary files cannot release the space of a part of a file")
    log.write_bytes(output)
    received = b""
    while len(received) < len(output):
        reply = await process.exchange(ExchangeRequest(log_offset=len(received)))
        received += reply.output[:10_000]  # as if replies were small
    await process.exchange(ExchangeRequest(log_offset=len(received)))
    assert received == output
    assert reply.log_size == len(output)
    assert log.stat().st_blocks * 512 <= 8192
    await process.close()
