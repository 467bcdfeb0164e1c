"""`ramify why RUN`: what a running run is waiting for and since when, or how a run ended.

A live run is queried over HTTP. If its orchestrator holds the run but does not respond, the last state that it wrote to
disk is shown. While the orchestrator has not started, the processes of the run are shown.
"""

import platform
import time
import tomllib
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ramify.cli.run_lookup import build_resume_command, find_run
from ramify.core.console import make_console
from ramify.core.errors import CheckpointRefused, ConfigInvalid, RamifyError, RunBusy
from ramify.core.names import format_count
from ramify.launch.dashboard import format_status_line
from ramify.launch.last_state import describe_last_state
from ramify.launch.liveness import get_process_state
from ramify.launch.run_lock import RunSupervisor, find_supervisor
from ramify.launch.run_queries import INTERRUPTED_EVENT, connect_if_running, describe_end, has_finished
from ramify.launch.run_record import read_record
from ramify.orchestrate.snapshot import OrchestratorState, read_snapshot
from ramify.processes.log import ProcessLog
from ramify.run.store import RunStore
from ramify.run.store.audit import audit
from ramify.run.store.index import DATABASE_NAME, has_index_checksum
from ramify.run.store.integrity import check_storage
from ramify.run.store.ledger import Ledger
from ramify.run.store.run_log import RunEvent, RunLog
from ramify.train.checkpoint_manifest import list_checkpoints, verify_checkpoint

MAX_EVENTS = 10  # last events shown
MAX_FAILURES = 3  # most frequent failures shown
TAIL_LINES = 5  # last lines of each log shown


def run(options: Namespace) -> int:
    """Query the live run, or read the files of an ended one; with --audit, check its files and its ledger."""
    path = find_run(options.run)
    if options.audit:
        return _print_audit(path)
    _check_is_rl_run(path)
    client = connect_if_running(path)
    if client is not None:
        _print_live_run(client.get("/status"), client.get("/why"), client.get("/dropped"))
        _print_nodes(path)
        return 0
    if (supervisor := find_supervisor(path)) is not None and _is_starting(path, supervisor):
        where = f"process {supervisor.pid}" if supervisor.pid else "in another container"
        _print_starting_run(path, f"`ramify rl`, {where}, is running", supervisor)
        return 0
    try:
        _print_ended_run(path)
    except RunBusy as busy:
        if not _print_unresponsive_run(path):
            _print_starting_run(path, busy.message, supervisor)
    return 0


def _check_is_rl_run(path: Path) -> None:
    """Refuse runs of `ramify sft` and `ramify eval`: they are a single process and have no ledger."""
    try:
        keys = tomllib.loads((path / "config.toml").read_text("utf-8"))
    except (OSError, ValueError):  # missing or damaged: the ledger decides
        return
    if "train" not in keys:
        command = "metrics" if "data" in keys else "show"  # an SFT run has no rollouts, an eval no steps
        raise ConfigInvalid(f"{path} is not an RL run; use 'ramify {command}' for it")


def _print_live_run(status: dict[str, Any], waits: Sequence[dict[str, Any]], dropped: str) -> None:
    console = make_console()
    console.print(Text(f"{status.get('run', '')} {format_status_line(status)}"))
    errors: list[dict[str, Any]] = status.get("errors") or []
    counts: dict[str, int] = status.get("failures") or {}
    for name, error in {error["name"]: error for error in errors}.items():
        console.print(Text(f"{counts.get(name, 1)} × {name}, the last: {error['message']}"), soft_wrap=True)
    if dropped:
        console.print(Text(f"dropped groups: {dropped}"), soft_wrap=True)
    if not waits:
        console.print("nothing is waiting")
        return
    table = Table("component", "waiting for", "seconds", "timeout", "detail", box=None, padding=(0, 2, 0, 0))
    for wait in sorted(waits, key=lambda wait: -(wait.get("since_s") or 0)):
        seconds, timeout = wait.get("since_s") or 0, wait.get("deadline_s")
        table.add_row(
            Text(str(wait.get("who"))),
            Text(str(wait.get("waits_for"))),
            f"{seconds:.1f}",
            "" if timeout is None else f"{timeout:.1f}",
            Text(str(wait.get("detail", ""))),
        )
    console.print(table)


def _print_nodes(path: Path) -> None:
    """Print which node runs which process and whether it answers, if the run has processes on several nodes."""
    processes: dict[str, dict[str, Any]] = read_record(path).get("processes", {})
    if any(process.get("node") for process in processes.values()):
        _print_processes(processes)


def _print_processes(processes: Mapping[str, dict[str, Any]]) -> None:
    """Print the state of each process, and its node if some of them are on other nodes than the head."""
    has_nodes = any(process.get("node") for process in processes.values())
    table = Table("process", *(["node"] if has_nodes else []), "state", "restarts", box=None, padding=(0, 2, 0, 0))
    for name, process in processes.items():
        node = process.get("node")
        state = "its node does not answer" if node and process["state"] == "silent" else process["state"]
        table.add_row(name, *([node or "head"] if has_nodes else []), state, str(process["restarts"]))
    make_console().print(table)


def _is_starting(path: Path, supervisor: RunSupervisor) -> bool:
    """Return whether the orchestrator of a supervised run has not written a state yet, and has not ended."""
    record, snapshot = read_record(path), read_snapshot(path)
    if not _is_record_of(record, supervisor):
        return True
    if record.get("processes", {}).get("orchestrator", {}).get("state") == "ended":
        return False
    if snapshot is None or snapshot.time == record.get("earlier_snapshot_time"):
        return True
    return snapshot.host == platform.node() and get_process_state(snapshot.pid) == "gone"


def _is_record_of(record: Mapping[str, Any], supervisor: RunSupervisor) -> bool:
    """Return whether a supervisor has written the record, not one of an earlier start.

    The pid alone does not decide: it is unknown for another container, and may be the same in each new one.
    """
    has_same_pid = not supervisor.pid or record.get("pid") == supervisor.pid
    return has_same_pid and record.get("started", 0.0) >= supervisor.locked_at


def _print_starting_run(path: Path, reason: str, supervisor: RunSupervisor | None) -> None:
    """Print that no orchestrator answers yet, and the processes that the supervisor has recorded."""
    line = f"{path} state={OrchestratorState.STARTING}: {reason}; its orchestrator does not answer yet"
    make_console().print(line, soft_wrap=True)
    record = read_record(path)
    if supervisor is not None and _is_record_of(record, supervisor):
        _print_processes(record.get("processes", {}))


def _print_unresponsive_run(path: Path) -> bool:
    """Print the last state of a run whose orchestrator does not respond; return False if it has written none."""
    snapshot = read_snapshot(path)
    if snapshot is None:
        return False
    is_local = snapshot.host == platform.node()
    state = get_process_state(snapshot.pid) if is_local else f"on {snapshot.host}"
    address = read_record(path).get("status") or "its status address"
    problem = "is starting" if snapshot.is_starting else f"does not respond at {address}"
    print(f"the orchestrator of {path} {problem}: process {snapshot.pid}, {state}")
    if state == "stopped":
        print(f"continue it with: kill -CONT {snapshot.pid}")
    print(f"last state, written {snapshot.age:.0f} s ago:")
    _print_live_run(snapshot.status, snapshot.waits, snapshot.dropped)
    _print_nodes(path)
    _print_log_tails(path, make_console())
    return True


def _print_ended_run(path: Path) -> None:
    """Print from the run's files how far it came, its last events, and the last log lines of each process."""
    console = make_console()
    with RunStore.open(path, write=False) as store:
        ledger, events = Ledger.open_readonly(store), RunLog(store).events()
        progress, states = ledger.progress(), Counter(group.state.value for group in ledger.groups())
        dropped, state = ledger.describe_drops(), describe_end(store)
        num_tries = ledger.count_ended_tries()
    uncommitted = progress.acknowledged - progress.committed
    steps = format_count(progress.committed, "step")
    print(f"{path} is {state}: {steps} committed, {uncommitted} trained after the last checkpoint")
    if state != "finished" and (command := build_resume_command(path)):
        print(f"resume with: {command}")
    print("groups: " + (", ".join(f"{count} {name}" for name, count in sorted(states.items())) or "none"))
    if dropped:
        console.print(f"dropped groups: {dropped}", soft_wrap=True)
    for line in _summarize_failures(events, num_tries):
        console.print(line, soft_wrap=True)
    for event in events[-MAX_EVENTS:]:
        timestamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
        fields = " ".join(f"{key}={value}" for key, value in event.fields.items())
        console.print(f"{timestamp} {event.kind} {fields}", soft_wrap=True)
    if state not in ("stopped", INTERRUPTED_EVENT):
        return
    has_logged_end = bool(events) and events[-1].kind in ("stopped", INTERRUPTED_EVENT)  # later than any snapshot
    if not has_logged_end and (snapshot := read_snapshot(path)) is not None:
        message = f"the orchestrator, process {snapshot.pid}, has exited; {describe_last_state(path)}"
        console.print(message, soft_wrap=True)
    _print_log_tails(path, console)


def _print_log_tails(path: Path, console: Console) -> None:
    """Print the last lines of each process's log."""
    for name, process in read_record(path).get("processes", {}).items():
        where = f" on {process['node']}" if process.get("node") else ""
        console.print(f"last lines of {name}{where}, {process['log']}:", soft_wrap=True)
        for line in ProcessLog(Path(process["log"])).tail(TAIL_LINES).splitlines():
            console.print(f"  {line}", soft_wrap=True)


def _summarize_failures(events: Sequence[RunEvent], num_tries: Mapping[str, int]) -> list[str]:
    """Return the most frequent failures, one line each, with number and most frequent message.

    `num_tries` is the number of ended tries of each source.
    """
    messages: dict[tuple[str, str], Counter[str]] = {}
    for fields in (event.fields for event in events if event.kind == "failure"):
        first_line = str(fields.get("message")).partition("\n")[0]
        messages.setdefault((fields.get("where", "the run"), str(fields.get("name"))), Counter())[first_line] += 1
    lines: list[str] = []
    for (origin, name), counts in sorted(messages.items(), key=lambda item: -item[1].total())[:MAX_FAILURES]:
        number = (
            f"{counts.total()} of {num_tries[origin]} attempts ended as"
            if origin in num_tries
            else f"{counts.total()} ×"
        )
        [(message, frequency)] = counts.most_common(1)
        lines.append(f"{number} {name} in {origin}{'' if len(counts) == 1 else f', {frequency} of them'}: {message}")
    return lines


def _print_audit(path: Path) -> int:
    """Print the problems of the run's files and its ledger; return the exit code."""
    try:
        opened = RunStore.open(path, write=False)
    except RunBusy as busy:
        advice = f"stop it first, or use `ramify why {path}` for its state"
        raise RunBusy(f"{busy.message}; the audit needs a stopped run: {advice}") from None
    with opened as store:
        problems = check_storage(store)
        try:
            size, lines = _audit_ledger(store)
        except (RamifyError, msgspec.MsgspecError, ValueError, TypeError) as error:
            size, lines = "no ledger", [f"the ledger cannot be read: {type(error).__name__}: {error}"]
    problems += [*lines, *_audit_checkpoints(path)]
    for problem in problems:
        print(problem)
    verdict = f"{len(problems)} problems" if problems else "no problems"
    reason = "its writer was killed or had a reader beside it"
    note = "" if has_index_checksum(path) else f"; {DATABASE_NAME} has no checksum: {reason}"
    print(f"{path}: {size}: {verdict}{note}")
    return 1 if problems else 0


def _audit_checkpoints(path: Path) -> list[str]:
    """Return a line for every damaged checkpoint."""
    problems: list[str] = []
    for checkpoint in list_checkpoints(path / "checkpoints"):
        try:
            verify_checkpoint(checkpoint)
        except CheckpointRefused as error:
            problems.append(error.message)
    return problems


def _audit_ledger(store: RunStore) -> tuple[str, list[str]]:
    """Return the size of the ledger and its problems; a run of `ramify eval` has no ledger."""
    if not Ledger.exists_in(store):
        return format_count(len(store.rollouts()), "rollout"), []
    ledger = Ledger.open_readonly(store)
    size = f"{format_count(len(ledger.groups()), 'group')}, {format_count(ledger.progress().committed, 'step')}"
    return size, audit(ledger, finished=has_finished(store))
