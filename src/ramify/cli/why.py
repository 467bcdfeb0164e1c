"""`ramify why RUN`: what a run is waiting for, since when, on whom; or how one that is over ended.

A live run is asked over HTTP. If its orchestrator holds the run but does not answer, the last state that it wrote to
disk is shown.
"""

import argparse
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli.parser import CommandParser
from ramify.errors import CheckpointRefused, ConfigInvalid, RamifyError, RunBusy

if TYPE_CHECKING:
    from rich.console import Console

    from ramify.store import RunStore
    from ramify.store.run_log import RunEvent

MAX_EVENTS = 10  # the last so many are shown
MAX_FAILURES = 3  # kinds of failures that are counted in the output, the most frequent ones
TAIL_LINES = 5  # lines of each log


def run(argv: Sequence[str]) -> int:
    """Ask the run, or read what it left behind; with --audit, check its files and its ledger."""
    options = _build_parser().parse_args(argv)
    from ramify.cli.run_lookup import find_run  # loaded here, not for help
    from ramify.launch.run_queries import connect_if_running

    path = find_run(options.run)
    if options.audit:
        return _print_audit(path)
    _check_is_rl_run(path)
    client = connect_if_running(path)
    if client is not None:
        _print_live_run(client.get("/status"), client.get("/why"), client.get("/dropped"))
        return 0
    try:
        _print_ended_run(path)
    except RunBusy as busy:
        _print_unresponsive_run(path, busy)
    return 0


def _check_is_rl_run(path: Path) -> None:
    """Refuse what has no ledger to speak of: `ramify sft` and `ramify eval` are one process, which waits for nobody."""
    try:
        keys = tomllib.loads((path / "config.toml").read_text("utf-8"))
    except (OSError, ValueError):  # gone, or no longer TOML: the ledger knows what it is
        return
    if "train" not in keys:
        command = "metrics" if "data" in keys else "show"  # an SFT has no rollouts, an eval no steps
        raise ConfigInvalid(f"{path} is no run of `ramify rl`; 'ramify {command}' says what is in it")


def _print_live_run(status: dict[str, Any], waits: Sequence[dict[str, Any]], dropped: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from ramify.cli.run_lookup import make_console
    from ramify.launch.dashboard import format_status_line

    console = make_console()
    console.print(Text(f"{status.get('run', '')} {format_status_line(status)}"))
    errors: list[dict[str, Any]] = status.get("errors") or []
    for error in errors:
        console.print(Text(f"{error['name']}: {error['message']}"), soft_wrap=True)
    if dropped:
        console.print(Text(f"dropped groups: {dropped}"), soft_wrap=True)
    if not waits:
        console.print("nobody waits")
        return
    table = Table("who", "waits for", "seconds", "at most", "detail", box=None, padding=(0, 2, 0, 0))
    for wait in sorted(waits, key=lambda wait: -(wait.get("since_s") or 0)):
        deadline = wait.get("deadline_s")
        since, most = f"{wait.get('since_s') or 0:.1f}", "" if deadline is None else f"{deadline:.1f}"
        table.add_row(
            Text(str(wait.get("who"))), Text(str(wait.get("waits_for"))), since, most, Text(str(wait.get("detail", "")))
        )
    console.print(table)


def _print_unresponsive_run(path: Path, busy: RunBusy) -> None:
    """Print the last state of a run whose orchestrator does not answer; raise `busy` if it has written none."""
    import platform

    from ramify.cli.run_lookup import make_console
    from ramify.launch.liveness import get_process_state
    from ramify.launch.run_record import read_record
    from ramify.orchestrate.snapshot import read_snapshot

    snapshot = read_snapshot(path)
    if snapshot is None:
        raise busy
    here = snapshot.host == platform.node()
    state = get_process_state(snapshot.pid) if here else f"on {snapshot.host}"
    address = read_record(path).get("status") or "its status address"
    print(f"the orchestrator of {path} does not answer at {address}: process {snapshot.pid}, {state}")
    if state == "stopped":
        print(f"continue it with: kill -CONT {snapshot.pid}")
    print(f"its last state, written {snapshot.age:.0f} s ago:")
    _print_live_run(snapshot.status, snapshot.waits, snapshot.dropped)
    _print_log_tails(path, make_console())


def _print_ended_run(path: Path) -> None:
    """From the files alone: how far it came, what happened last, how each process ended."""
    from ramify.cli.run_lookup import make_console
    from ramify.launch.last_state import describe_last_state
    from ramify.launch.run_queries import has_finished
    from ramify.orchestrate.snapshot import read_snapshot
    from ramify.store import RunStore
    from ramify.store.ledger import Ledger
    from ramify.store.run_log import RunLog

    console = make_console()
    with RunStore.open(path, write=False) as store:
        ledger, journal = Ledger.open_readonly(store), RunLog(store)
        marks, states = ledger.progress(), Counter(group.state.value for group in ledger.groups())
        dropped, done, events = ledger.describe_drops(), has_finished(store), journal.events()
    end = "is finished" if done else "is not running, and not finished"
    print(f"{path} {end}: step {marks.committed} is committed, {marks.acknowledged - marks.committed} done after it")
    print("groups: " + (", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"))
    if dropped:
        console.print(f"dropped groups: {dropped}", markup=False, soft_wrap=True)
    for line in _summarize_failures(events):
        console.print(line, markup=False, soft_wrap=True)
    for event in events[-MAX_EVENTS:]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
        fields = " ".join(f"{key}={value}" for key, value in event.fields.items())
        console.print(f"{at} {event.kind} {fields}", markup=False, soft_wrap=True)
    if not done:
        if (snapshot := read_snapshot(path)) is not None:
            state = f"the orchestrator, process {snapshot.pid}, is gone; {describe_last_state(path)}"
            console.print(state, markup=False, soft_wrap=True)
        _print_log_tails(path, console)


def _print_log_tails(path: Path, console: "Console") -> None:
    """Print the last lines of each process's log."""
    from ramify.launch.run_record import read_record

    for name, process in read_record(path).get("processes", {}).items():
        console.print(f"the end of {name}, {process['log']}:", markup=False, soft_wrap=True)
        for line in _read_log_tail(Path(process["log"])):
            console.print(f"  {line}", markup=False, soft_wrap=True)


def _summarize_failures(events: Sequence["RunEvent"]) -> list[str]:
    """Return the failures that happened most often, one line each, with their number."""
    counts = Counter(
        f"{event.fields.get('name')} in {event.fields.get('where', 'the run')}: {event.fields.get('message')}"
        for event in events
        if event.kind == "failure"
    )
    return [f"{count} × {line}" for line, count in counts.most_common(MAX_FAILURES)]


def _read_log_tail(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return ["(no log)"]


def _print_audit(path: Path) -> int:
    """Print what is wrong with the run's files and its ledger; return the exit code."""
    from ramify.store import RunStore
    from ramify.store.integrity import check_storage

    with RunStore.open(path, write=False) as store:
        problems = check_storage(store)
        try:
            size, lines = _audit_ledger(store)
        except (RamifyError, msgspec.MsgspecError, ValueError, TypeError) as error:
            size, lines = "no ledger", [f"the ledger cannot be read: {type(error).__name__}: {error}"]
    problems += [*lines, *_audit_checkpoints(path)]
    for problem in problems:
        print(problem)
    verdict = "nothing is lost, nothing counts twice" if not problems else f"{len(problems)} problems"
    print(f"{path}: {size}: {verdict}")
    return 1 if problems else 0


def _audit_checkpoints(path: Path) -> list[str]:
    """Return a line for every checkpoint that is damaged; those that have no checksums cannot be checked."""
    from ramify.train.checkpoint_manifest import get_step_directory, list_completed_steps, verify_checkpoint

    problems: list[str] = []
    for step in list_completed_steps(path / "checkpoints"):
        try:
            verify_checkpoint(get_step_directory(path / "checkpoints", step))
        except CheckpointRefused as error:
            problems.append(error.message)
    return problems


def _audit_ledger(store: "RunStore") -> tuple[str, list[str]]:
    """Return how much the ledger holds and what is wrong with it; a run of `ramify eval` has none."""
    from ramify.launch.run_queries import has_finished
    from ramify.store.audit import audit
    from ramify.store.ledger import Ledger

    if not Ledger.exists_in(store):
        return f"{len(store.rollouts())} rollouts", []
    ledger = Ledger.open_readonly(store)
    size = f"{len(ledger.groups())} groups, {ledger.progress().committed} steps"
    return size, audit(ledger, finished=has_finished(store))


def _build_parser() -> argparse.ArgumentParser:
    from ramify.cli.app import COMMANDS

    parser = CommandParser(prog="ramify why", description=COMMANDS["why"].help)
    parser.add_argument("run", metavar="RUN", help="the run's directory, or its name below outputs")
    parser.add_argument(
        "--audit",
        action="store_true",
        help="check the database and the checksums of stored traces and checkpoints, and that every group was trained "
        "once or dropped by name; exit 1 if not",
    )
    return parser
