"""`ramify why RUN`: what a running run is waiting for and since when, or how a run ended.

The orchestrator of a live run is asked. If it holds the run but does not respond, its last state is shown.
While it has not started, the processes of the run are shown.
"""

import platform
import time
import tomllib
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ramify.cli.run_lookup import build_resume_command
from ramify.core.config import CONFIG_FILE
from ramify.core.console import make_console
from ramify.core.errors import CheckpointRefused, ConfigInvalid, RamifyError, RunBusy
from ramify.core.names import format_count
from ramify.launch.status_line import describe_last_state, format_status_line
from ramify.processes.log import ProcessLog
from ramify.run.lookup import find_run
from ramify.run.reader import (
    INTERRUPTED_EVENT,
    ObservedRun,
    RunActivity,
    describe_end,
    get_process_state,
    has_finished,
    observe_run,
)
from ramify.run.state import ProcessStatus, RunPhase, RunState
from ramify.run.store import RunStore
from ramify.run.store.audit import audit, check_storage
from ramify.run.store.index import DATABASE_NAME, has_index_checksum
from ramify.run.store.ledger import Ledger
from ramify.run.store.locks import find_writer
from ramify.run.store.run_log import RunEvent, RunLog
from ramify.run.store.run_store import LOCK_NAME
from ramify.train.checkpoint_manifest import list_checkpoints, verify_checkpoint

MAX_EVENTS = 10  # last events shown
MAX_FAILURES = 3  # most frequent failures shown
TAIL_LINES = 5  # last lines of each log shown


def run(options: Namespace) -> int:
    """Print the state of a running run, or how one ended; with --audit, check its files and its ledger."""
    path = find_run(options.run)
    if options.audit:
        return _print_audit(path)
    _check_is_rl_run(path)
    observed = observe_run(path)
    if observed.is_live:
        _print_state(observed.state)
    elif observed.activity is RunActivity.IDLE:
        try:
            _print_ended_run(path, observed.state)
        except RunBusy as busy:  # by a process on another machine
            _print_unanswered(path, observed, busy.message)
    else:
        holder = observed.holder
        where = f"process {holder.pid}" if holder is not None and holder.pid else "in another container"
        reason = f"`ramify rl`, {where}, is running" if holder is not None else _describe_writer(path)
        _print_unanswered(path, observed, reason)
    return 0


def _describe_writer(path: Path) -> str:
    return f"{path} is in use by process {find_writer(path / LOCK_NAME) or 'in another container'}"


def _print_unanswered(path: Path, observed: ObservedRun, reason: str) -> None:
    """Print the last state of a run whose orchestrator does not answer, or its processes if it has written none."""
    if observed.state.orchestrator is not None:
        _print_unresponsive_run(path, observed.state)
    else:
        _print_starting_run(path, reason, observed.state)


def _check_is_rl_run(path: Path) -> None:
    """Refuse runs of `ramify sft` and `ramify eval`: they are a single process and have no ledger."""
    try:
        keys = tomllib.loads((path / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError):  # missing or damaged: the ledger decides
        return
    if "train" not in keys:
        command = "metrics" if "data" in keys else "show"  # an SFT run has no groups, an eval no steps
        raise ConfigInvalid(f"{path} is not an RL run; use 'ramify {command}' for it")


def _print_state(state: RunState) -> None:
    """Print progress, failures and waits, and the processes of a run on several nodes."""
    console, status = make_console(), state.orchestrator
    assert status is not None
    console.print(Text(f"{status.run} {format_status_line(status)}"))
    for name, error in {error.name: error for error in status.errors}.items():
        console.print(Text(f"{status.failures.get(name, 1)} × {name}, the last: {error.message}"), soft_wrap=True)
    if status.dropped:
        console.print(Text(f"dropped groups: {status.dropped}"), soft_wrap=True)
    if status.waits:
        table = Table("component", "waiting for", "seconds", "timeout", "detail", box=None, padding=(0, 2, 0, 0))
        for wait in sorted(status.waits, key=lambda wait: -wait.since_s):
            timeout = "" if wait.deadline_s is None else f"{wait.deadline_s:.1f}"
            table.add_row(Text(wait.who), Text(wait.waits_for), f"{wait.since_s:.1f}", timeout, Text(wait.detail))
        console.print(table)
    else:
        console.print("nothing is waiting")
    if any(process.node for process in state.processes):
        _print_processes(state.processes)


def _print_processes(processes: Sequence[ProcessStatus]) -> None:
    """Print the state of each process, and its node if some of them are on other nodes than the head."""
    has_nodes = any(process.node for process in processes)
    table = Table("process", *(["node"] if has_nodes else []), "state", "restarts", box=None, padding=(0, 2, 0, 0))
    for process in processes:
        state = "its node does not answer" if process.node and process.state == "silent" else process.state
        nodes = [process.node or "head"] if has_nodes else []
        table.add_row(process.name, *nodes, state, str(process.restarts))
    make_console().print(table)


def _print_starting_run(path: Path, reason: str, state: RunState) -> None:
    """Print that no orchestrator answers yet, and the processes that the supervisor has recorded."""
    line = f"{path} state={RunPhase.STARTING}: {reason}; its orchestrator does not answer yet"
    make_console().print(line, soft_wrap=True)
    if state.processes:
        _print_processes(state.processes)


def _print_unresponsive_run(path: Path, state: RunState) -> None:
    """Print the last state of a run whose orchestrator does not respond."""
    status = state.orchestrator
    assert status is not None
    process_state = get_process_state(status.pid) if status.host == platform.node() else f"on {status.host}"
    address = (state.supervisor and state.supervisor.status_address) or "its status address"
    problem = "is starting" if status.is_starting else f"does not respond at {address}"
    print(f"the orchestrator of {path} {problem}: process {status.pid}, {process_state}")
    if process_state == "stopped":
        print(f"continue it with: kill -CONT {status.pid}")
    print(f"last state, written {status.age:.0f} s ago:")
    _print_state(state)
    _print_log_tails(state, make_console())


def _print_ended_run(path: Path, state: RunState) -> None:
    """Print from the run's files how far it came, its last events, and the last log lines of each process."""
    console = make_console()
    with RunStore.open(path, write=False) as store:
        ledger, events = Ledger.open_readonly(store), RunLog(store).events()
        progress, states = ledger.progress(), ledger.count_by_state()
        dropped, ending = ledger.describe_drops(), describe_end(store)
        num_tries = ledger.count_ended_tries()
    uncommitted = progress.acknowledged - progress.committed
    steps = format_count(progress.committed, "step")
    print(f"{path} is {ending}: {steps} committed, {uncommitted} trained after the last checkpoint")
    if ending != "finished" and (command := build_resume_command(path)):
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
    if ending not in ("stopped", INTERRUPTED_EVENT):
        return
    has_logged_end = bool(events) and events[-1].kind in ("stopped", INTERRUPTED_EVENT)  # later than any state
    if not has_logged_end and state.orchestrator is not None:
        message = f"the orchestrator, process {state.orchestrator.pid}, has exited; {describe_last_state(path)}"
        console.print(message, soft_wrap=True)
    _print_log_tails(state, console)


def _print_log_tails(state: RunState, console: Console) -> None:
    """Print the last lines of each process's log."""
    for process in state.processes:
        where = f" on {process.node}" if process.node else ""
        console.print(f"last lines of {process.name}{where}, {process.log}:", soft_wrap=True)
        for line in ProcessLog(Path(process.log)).tail(TAIL_LINES).splitlines():
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
