"""A new head waits for the leases that a lost head has granted, unless that head ended all its processes."""

import contextlib

import pytest

from ramify.core.errors import ProcessReplaced, StorageFailed
from ramify.launch.execution import hold_leases
from ramify.launch.head import prepare_head
from ramify.launch.local_launcher import LocalLauncher
from ramify.launch.supervised_process import EarlierProcess
from ramify.run.fencing.lease import LeaseTerms
from ramify.run.fencing.token import FencingToken
from ramify.run.state import ProcessState, ProcessStatus, SupervisorState
from ramify.run.store.head_replication import POLL_INTERVAL
from tests.launch.test_head import make_config, train_step
from tests.support.launchers import InProcessLauncher, build_placement
from tests.support.processes import build_spec

pytestmark = pytest.mark.promise


def make_specs(tmp_path, duration=60.0):
    leased = [
        build_spec(tmp_path, name, "", placement=build_placement(lease=LeaseTerms(duration))) for name in ("a", "b")
    ]
    return [*leased, build_spec(tmp_path, "orchestrator", "")]


@contextlib.contextmanager
def run_head(tmp_path, config, duration=60.0, states=(ProcessState.ENDED, ProcessState.ENDED)):
    """Run a head, whose processes are in these states at its end. Without them, it is lost."""
    term = prepare_head(config, print_line=lambda line: None)
    specs = make_specs(tmp_path, duration)
    with hold_leases(config.path, config.shared_path, term, specs, InProcessLauncher()) as earlier:
        yield earlier
        if not states:
            raise KeyboardInterrupt
        statuses = [
            ProcessStatus(name, state, 1, 0, 0.0, token=f"{term}.0", replacement_delay=duration)
            for name, state in zip("ab", states)
        ]
        SupervisorState.begin(config.path, "").with_processes(statuses).write(config.path)


def find_waits(tmp_path, head) -> dict[str, EarlierProcess]:
    """Return for what a new head waits."""
    with run_head(tmp_path, make_config(tmp_path, head)) as earlier:
        return earlier


def make_earlier(duration: float, term: int = 0) -> EarlierProcess:
    delay = LeaseTerms(duration).replacement_delay + POLL_INTERVAL
    return EarlierProcess(FencingToken(term), replacement_delay=delay)


def test_new_head_waits_for_the_leases_of_a_lost_one(tmp_path):
    first = make_config(tmp_path, "first")
    train_step(first)
    with pytest.raises(KeyboardInterrupt), run_head(tmp_path, first, duration=300.0, states=()):
        pass
    assert find_waits(tmp_path, "second") == {name: make_earlier(300.0) for name in "ab"}  # not from its own file
    assert find_waits(tmp_path, "third") == {}  # the second has waited, and has ended its processes


def test_new_head_waits_while_the_old_one_still_runs(tmp_path):
    first = make_config(tmp_path, "first")
    train_step(first)
    with run_head(tmp_path, first) as earlier:
        assert earlier == {}
        assert find_waits(tmp_path, "second") == {name: make_earlier(60.0) for name in "ab"}


@pytest.mark.parametrize("last_state", [ProcessState.ENDED, ProcessState.SILENT])
def test_new_head_waits_unless_all_processes_were_seen_to_end(tmp_path, last_state):
    first = make_config(tmp_path, "first")
    train_step(first)
    with run_head(tmp_path, first, states=(ProcessState.ENDED, last_state)):
        pass
    waits = {} if last_state is ProcessState.ENDED else {name: make_earlier(60.0) for name in "ab"}
    assert find_waits(tmp_path, "second") == waits


def test_second_of_two_lost_heads_does_not_shorten_the_leases_of_the_first(tmp_path):
    train_step(make_config(tmp_path, "first"))
    for head, duration in (("first", 300.0), ("second", 60.0)):
        with pytest.raises(KeyboardInterrupt), run_head(tmp_path, make_config(tmp_path, head), duration, states=()):
            pass
    assert find_waits(tmp_path, "third") == {name: make_earlier(300.0, term=1) for name in "ab"}


def test_head_that_was_replaced_before_it_has_written_its_leases_starts_nothing(tmp_path):
    first = make_config(tmp_path, "first")
    train_step(first)
    term = prepare_head(first, print_line=lambda line: None)
    assert find_waits(tmp_path, "second") == {}
    with (
        pytest.raises(ProcessReplaced),
        hold_leases(first.path, first.shared_path, term, make_specs(tmp_path), InProcessLauncher()),
    ):
        raise AssertionError("it would start its processes beside the new head's")


def test_damaged_file_is_named(tmp_path):
    first = make_config(tmp_path, "first")
    train_step(first)
    with run_head(tmp_path, first):
        (first.shared_path / "leases" / "0").write_bytes(b"")
        with pytest.raises(StorageFailed, match=r"leases/0 is damaged: .*; remove it when no process of term 0 runs"):
            find_waits(tmp_path, "second")


def test_run_without_placed_processes_or_shared_directory_has_no_leases(tmp_path):
    config = make_config(tmp_path, "first")
    train_step(config)
    with hold_leases(config.path, config.shared_path, 0, make_specs(tmp_path), LocalLauncher()) as earlier:
        assert earlier == {}
    with hold_leases(config.path, None, 0, make_specs(tmp_path), InProcessLauncher()) as earlier:
        assert earlier == {}
    assert not (config.shared_path / "leases").exists()
