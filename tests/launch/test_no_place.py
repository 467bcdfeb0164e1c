"""A process that finds no place: the run continues without it while others do the same work."""

import pytest

from ramify.core.errors import DeadlineExceeded, ProcessDied
from ramify.launch.launcher import ProcessRole
from ramify.launch.local_launcher import LocalLauncher
from ramify.launch.supervisor import RunOutcome, SupervisorSettings
from ramify.run.state import ProcessState
from tests.launch.test_supervisor import supervise
from tests.support.launchers import build_placement
from tests.support.processes import RUNS_FOREVER, build_spec, list_running, read_pids

pytestmark = pytest.mark.process


class FullLauncher(LocalLauncher):
    """Opens no slot for the roles in `refused`."""

    def __init__(self, refused, failure=DeadlineExceeded):
        super().__init__()
        self.refused, self.failure = set(refused), failure

    async def open_slots(self, leases, placement, *, timeout):
        if leases.role in self.refused:
            raise self.failure(f"{leases.role} could not be placed")
        return await super().open_slots(leases, placement, timeout=timeout)


class UnstoppableLauncher(LocalLauncher):
    """Opens slots that stop their process and then raise, for the roles in `failing`."""

    def __init__(self, failing):
        super().__init__()
        self.failing = failing

    async def open_slots(self, leases, placement, *, timeout):
        slots = await super().open_slots(leases, placement, timeout=timeout)
        if leases.role in self.failing:
            for slot in slots:
                slot.stop = self._fail_after(slot.stop)
        return slots

    def _fail_after(self, stop):
        async def stop_and_fail():
            await stop()
            raise ConnectionResetError("the node is gone")

        return stop_and_fail


async def run(specs, launcher, *, restarts=0, **options) -> RunOutcome:
    settings = SupervisorSettings(first_restart_delay=0.01, place_retry_delay=0.05)
    return await supervise(specs, restarts=restarts, launcher=launcher, settings=settings, **options)


def build_engine(directory, name, service="inference"):
    return build_spec(directory, name, RUNS_FOREVER, placement=build_placement(), service=service)


@pytest.mark.parametrize("failure", [DeadlineExceeded, ProcessDied])
async def test_run_starts_without_an_engine_and_adds_it_when_there_is_a_place(tmp_path, failure):
    launcher, lines, seen = FullLauncher(["second"], failure), [], []
    leader = "import time\nwhile not os.path.exists(DIR + '/second.pids'): time.sleep(0.01)"

    def on_change(statuses):
        seen.append((statuses[1].state, statuses[2].state))
        if seen[-1] == (ProcessState.WAITING, ProcessState.READY):
            launcher.refused.clear()

    specs = [build_engine(tmp_path, "first"), build_engine(tmp_path, "second")]
    leader = build_spec(tmp_path, "orchestrator", leader, ProcessRole.LEADER, start_after=("first", "second"))
    assert await run([*specs, leader], launcher, on_change=on_change, lines=lines) is RunOutcome.FINISHED
    assert lines[0] == "second could not be placed; the run continues without second, which is tried again"
    assert (ProcessState.STARTING, ProcessState.READY) in seen
    assert len(read_pids(tmp_path, "second")) == 1
    assert list_running(tmp_path) == []


@pytest.mark.parametrize("refused", [["env"], ["first", "second"]])
async def test_process_that_nobody_replaces_ends_the_run(tmp_path, refused):
    engines = [build_engine(tmp_path, "first"), build_engine(tmp_path, "second")]
    env = build_engine(tmp_path, "env", service="env/train/words")
    leader = build_spec(tmp_path, "orchestrator", RUNS_FOREVER, ProcessRole.LEADER)
    with pytest.raises(DeadlineExceeded, match=f"({'|'.join(refused)}) could not be placed"):
        await run([*engines, env, leader], FullLauncher(refused))
    assert list_running(tmp_path) == []


async def test_last_engine_that_is_lost_ends_a_run_in_which_another_waits(tmp_path):
    launcher = FullLauncher(["second"])

    def on_change(statuses):
        if statuses[1].state is ProcessState.WAITING:
            launcher.refused.add("first")
            (tmp_path / "ended").touch()

    ends = "import time\nwhile not os.path.exists(DIR + '/ended'): time.sleep(0.01)\nsys.exit(3)"
    first = build_spec(tmp_path, "first", ends, placement=build_placement(), service="inference")
    leader = build_spec(tmp_path, "orchestrator", RUNS_FOREVER, ProcessRole.LEADER)
    with pytest.raises(DeadlineExceeded, match="could not be placed"):
        await run([first, build_engine(tmp_path, "second"), leader], launcher, restarts=1, on_change=on_change)
    assert len(read_pids(tmp_path, "first")) == 1


async def test_process_that_cannot_be_stopped_does_not_replace_the_outcome(tmp_path):
    lines = []
    started = "all(os.path.exists(DIR + f'/{name}.pids') for name in ('first', 'second'))"
    leader = f"import time\nwhile not {started}: time.sleep(0.01)"
    specs = [build_engine(tmp_path, "first"), build_engine(tmp_path, "second")]
    leader = build_spec(tmp_path, "orchestrator", leader, ProcessRole.LEADER)
    assert await run([*specs, leader], UnstoppableLauncher(["first"]), lines=lines) is RunOutcome.FINISHED
    assert "first could not be stopped: ConnectionResetError: the node is gone" in lines
    assert list_running(tmp_path) == []
