"""Reads the state of a run: asks its orchestrator while it answers, and reads the files of the run otherwise."""

import contextlib
import http.client
import platform
import time
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

import msgspec
import psutil

from ramify.core.errors import ConfigInvalid, ProviderError
from ramify.run.state import OrchestratorState, ProcessState, RunState, SupervisorState
from ramify.run.store import RunStore
from ramify.run.store.locks import find_writer
from ramify.run.store.run_log import MetricPoint, RunLog
from ramify.run.store.run_store import LOCK_NAME
from ramify.run.supervisor_lock import LockHolder, find_supervisor

DEFAULT_TIMEOUT = 5.0  # seconds for a response
FRESH_STATE = 60.0  # seconds between this machine's clock and the last state of a run that runs on another one
INTERRUPTED_EVENT = "interrupted"  # event of a run that was ended by Ctrl-C
END_EVENTS = ("started", "finished", INTERRUPTED_EVENT, "stopped", "failed", "rolled_back")


class RunActivity(StrEnum):
    """Whether a run is running. UNRESPONSIVE: its orchestrator does not answer. IDLE: nothing holds the run."""

    STARTING = "starting"
    RUNNING = "running"
    UNRESPONSIVE = "unresponsive"
    IDLE = "idle"


class ObservedRun(NamedTuple):
    """The state of a run, and how it was observed.

    `is_live` says that the orchestrator has answered now; `holder` is the supervisor on this machine, if there is one.
    """

    activity: RunActivity
    state: RunState
    is_live: bool = False
    holder: LockHolder | None = None


class MetricRow(msgspec.Struct, frozen=True):
    """A metric as the orchestrator answers with it. NaN is a string."""

    step: int
    name: str
    value: float | str


def observe_run(path: Path, *, ask_any_address: bool = True, timeout: float = DEFAULT_TIMEOUT) -> ObservedRun:
    """Return the state of an RL run, from its orchestrator if it answers within `timeout` seconds.

    Without `ask_any_address`, the address in the run directory is asked only if a process of this machine holds the
    run: anybody may have written the directory, and the address in it.
    """
    supervisor, written = SupervisorState.read(path), OrchestratorState.read(path)
    is_held = find_writer(path / LOCK_NAME) is not None
    if supervisor is not None and supervisor.status_address and (ask_any_address or is_held):
        answer = _ask_run(path, supervisor.status_address, timeout)
        if answer is not None:
            return ObservedRun(RunActivity.RUNNING, RunState(supervisor, answer), is_live=True)
    holder, current = find_supervisor(path), written
    if holder is not None and not _was_written_by(supervisor, holder):  # both parts are of an earlier start
        return ObservedRun(RunActivity.STARTING, RunState(), holder=holder)
    if written is not None and written.host == platform.node() and get_process_state(written.pid) == "gone":
        current = None
    if is_held or (holder is not None and current is None and not _has_ended(supervisor, "orchestrator")):
        is_starting = current is None or current.is_starting
        activity = RunActivity.STARTING if is_starting else RunActivity.UNRESPONSIVE
        return ObservedRun(activity, RunState(supervisor, current), holder=holder)
    activity = RunActivity.IDLE
    if written is not None and _is_running_elsewhere(written):
        activity = RunActivity.STARTING if written.is_starting else RunActivity.RUNNING
    return ObservedRun(activity, RunState(supervisor, written), holder=holder)


def _ask_run(path: Path, address: str, timeout: float) -> OrchestratorState | None:
    """Return what the orchestrator of this run answers; None if nothing answers at the address, or another run does."""
    try:
        state = ask_orchestrator(address, timeout=timeout)
    except ProviderError:
        return None
    return state if Path(state.run).name == path.resolve().name else None


def _was_written_by(state: SupervisorState | None, holder: LockHolder) -> bool:
    """Return whether a supervisor has written the part, not one of an earlier start.

    The pid alone does not decide: it is unknown for another container, and may be the same in each new one.
    """
    if state is None:
        return False
    return (not holder.pid or state.pid == holder.pid) and state.started >= holder.locked_at


def _has_ended(state: SupervisorState | None, name: str) -> bool:
    return state is not None and name in state.processes and state.processes[name].state is ProcessState.ENDED


def _is_running_elsewhere(state: OrchestratorState) -> bool:
    """Return whether an orchestrator on another machine that shares the folder has written its part just now."""
    return state.host != platform.node() and abs(time.time() - state.time) < FRESH_STATE


def get_process_state(pid: int) -> str:
    """Return the state of a process: `stopped`, `running` or `gone`."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "stopped"
    return "gone" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else "running"


# -- requests ----------------------------------------------------------------------------------------------------------


def ask_orchestrator(address: str, *, timeout: float = DEFAULT_TIMEOUT) -> OrchestratorState:
    """Return the state of the orchestrator whose status server is at `address`. Raises ProviderError."""
    body = _get(address, "/status", timeout)
    try:
        return msgspec.json.decode(body, type=OrchestratorState)
    except msgspec.MsgspecError as error:
        raise ProviderError(f"{address}/status responded with something other than a state: {error}") from error


def _get(address: str, target: str, timeout: float) -> bytes:
    """Return the body of a response. A running run must be asked, because its orchestrator holds the database."""
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout)
    try:
        connection.request("GET", target)
        response = connection.getresponse()
        body = response.read()
    except TimeoutError as error:
        raise ProviderError(f"{address}{target} did not respond within {timeout:g} s") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ProviderError(f"{address}{target} does not respond: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ProviderError(f"{address}{target} does not respond: status {response.status}")
    return body


def _ask_metrics(address: str, pattern: str) -> list[MetricPoint]:
    body = _get(address, f"/metrics?{urlencode({'name': pattern})}", DEFAULT_TIMEOUT)
    try:
        rows = msgspec.json.decode(body, type=list[MetricRow])
    except msgspec.MsgspecError as error:
        raise ProviderError(f"{address}/metrics responded with something other than metrics: {error}") from error
    return [MetricPoint(row.step, row.name, float(row.value)) for row in rows]


def read_metrics(path: Path, pattern: str = "*") -> list[MetricPoint]:
    """Return the metrics whose names match, by step and name."""
    observed = observe_run(path)
    if observed.is_live and observed.state.supervisor is not None:
        with contextlib.suppress(ProviderError):  # the run has ended since; its files can be read
            return _ask_metrics(observed.state.supervisor.status_address, pattern)
    with RunStore.open(path, write=False) as store:
        if not store.select("SELECT 1 FROM sqlite_master WHERE name = 'metrics'"):
            raise ConfigInvalid(f"{path} has no metrics; no training step was recorded")
        return RunLog(store).metrics(pattern)


# -- the end of a run --------------------------------------------------------------------------------------------------


def has_finished(store: RunStore) -> bool:
    """Return whether the run reached its last step when it ran last, and was not rolled back since."""
    return describe_end(store) == "finished"


def describe_end(store: RunStore) -> str:
    """Return how a run that does not run now ended: `finished`, `interrupted`, `stopped` or `rolled back to step N`."""
    events = [event for event in RunLog(store).events() if event.kind in END_EVENTS]
    if not events:
        return "stopped"
    last = events[-1]
    if last.kind == "rolled_back":
        return f"rolled back to step {last.fields['step']}"
    return last.kind if last.kind in ("finished", INTERRUPTED_EVENT) else "stopped"
