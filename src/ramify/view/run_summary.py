"""The state of a run: asked at its status address while it runs on this machine, read from its files otherwise."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec

from ramify.core.config import CONFIG_FILE
from ramify.core.errors import ConfigInvalid, RamifyError, failure_classes
from ramify.core.names import suggest
from ramify.run.reader import RunActivity, has_finished, observe_run
from ramify.run.state import OrchestratorState, RunState, Wait
from ramify.run.store import Ledger, RunStore
from ramify.run.store.index import DATABASE_NAME, TRACES_DIR
from ramify.run.store.locks import find_writer
from ramify.run.store.run_log import RunEvent, RunLog
from ramify.run.store.run_store import LOCK_NAME

RUN_CONTENTS = (DATABASE_NAME, CONFIG_FILE, TRACES_DIR)  # a directory with one of these is a run, perhaps a damaged one


class RunFolder:
    """A folder of runs, or the directory of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def list_runs(self) -> dict[str, Path]:
        """Return the directories of the runs by name; none if the folder does not exist."""
        if is_run(self.path):
            return {_get_name(self.path.resolve()): self.path}
        try:
            return {_get_name(path): path for path in sorted(self.path.iterdir()) if is_run(path)}
        except OSError:
            return {}

    def find_run(self, name: str) -> Path:
        """Return the directory of a run. Raises ConfigInvalid if the folder has no run of this name."""
        runs = self.list_runs()
        if name not in runs:
            hint = suggest(name, runs, "open the list of runs to see all of them")
            raise ConfigInvalid(f"{self.path} has no run {name!r}; {hint}")
        return runs[name]


def _get_name(path: Path) -> str:
    """Return the name of a directory; bytes that are not UTF-8, which JSON cannot represent, are written as escapes."""
    return path.name.encode("utf-8", "backslashreplace").decode()


def is_run(path: Path) -> bool:
    """Return whether a directory looks like a run."""
    return path.is_dir() and any((path / name).exists() for name in RUN_CONTENTS)


RunKind = Literal["rl", "sft", "eval"]
PageState = Literal["starting", "running", "unresponsive", "finished", "stopped", "ended", "planned", "damaged"]

CURVE_POINTS = 60  # of the small curve in the list of runs
CURVE_METRICS = ("reward/all/mean", "train/loss")  # the second is the small curve of a run without rewards
STATUS_TIMEOUT = 3.0  # seconds
INDEX_FILES = (DATABASE_NAME, f"{DATABASE_NAME}-wal", CONFIG_FILE)
CHANGING_FILES = (*INDEX_FILES, OrchestratorState.FILE)
# States that change only when a file of the run changes, so a summary can be cached by file times.
CACHEABLE_STATES = ("finished", "stopped", "ended", "planned")
MAX_EVENTS_READ = 2000  # last events whose failures are counted
MAX_EVENTS_SHOWN = 12
MAX_DROP_REASONS = 8


class ShownRun(NamedTuple):
    """Whether a run is running, and what is known of it.

    - `page_state`: `unresponsive` is a run whose orchestrator does not answer. `ended` is an eval or SFT run
      that nothing writes: it does not record whether it is complete. `planned` has a configuration only.
    - `problem`: why the files cannot be read.
    """

    page_state: PageState
    state: RunState = RunState()
    problem: str = ""

    @property
    def waits(self) -> list[Wait]:
        """What its components wait for; none without an orchestrator."""
        return [] if self.state.orchestrator is None else self.state.orchestrator.waits


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration of a run; an empty dict if it cannot be read."""
    try:
        return tomllib.loads((path / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def get_model_name(config: Mapping[str, Any]) -> str:
    """Return the model of a configuration; "" if it names none."""
    return str(_as_table(config.get("model")).get("name", ""))


def _as_table(value: Any) -> Mapping[str, Any]:
    """Return a value of a configuration if it is a table; else an empty one, because a run may hold any file."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def get_kind(config: Mapping[str, Any]) -> RunKind:
    """Return the command that made the run."""
    return "rl" if "train" in config else "sft" if "data" in config else "eval"


def open_last_commit(path: Path) -> RunStore:
    """Open what a run has committed, without its lock: the run may be running."""
    return RunStore.open(path, write=False, lock=False)


def observe_shown_run(path: Path, kind: RunKind) -> ShownRun:
    """Return what the page shows of a run. A part of the state is shown only while the run is running."""
    if not (path / DATABASE_NAME).exists() and not (path / "traces").exists():
        return ShownRun("planned")
    if kind == "rl":
        observed = observe_run(path, ask_any_address=False, timeout=STATUS_TIMEOUT)
        if observed.activity is not RunActivity.IDLE:
            return ShownRun(observed.activity.value, observed.state)
    try:
        with open_last_commit(path) as store:
            if kind == "rl":
                return ShownRun("finished" if has_finished(store) else "stopped")
            return ShownRun("ended" if find_writer(path / LOCK_NAME) is None else "running")
    except RamifyError as error:
        return ShownRun("damaged", problem=f"{error.name}: {error.message}")


def summarize_run(name: str, path: Path) -> dict[str, Any]:
    """Return what the list of runs shows of one run; one that cannot be read does not hide the others."""
    config = read_config(path)
    try:
        return _summarize(name, path, config, observe_shown_run(path, get_kind(config)))
    except (RamifyError, msgspec.MsgspecError) as error:
        problem = f"{type(error).__name__}: {error}"
        return _summarize(name, path, config, ShownRun("damaged", problem=problem))


def read_change_key(path: Path) -> tuple[Any, ...]:
    """Return a value that changes whenever a run is started, continued or written.

    A run that nothing writes keeps its value, so what was read of it is still true.
    """
    return find_writer(path / LOCK_NAME), *(_stat_contents(path / name) for name in CHANGING_FILES)


def describe_run(name: str, path: Path) -> dict[str, Any]:
    """Return what the page of a run shows, besides metrics and rollouts."""
    config = read_config(path)
    shown = observe_shown_run(path, get_kind(config))
    status = shown.state.orchestrator
    processes = shown.state.processes if shown.page_state == "running" else []
    description: dict[str, Any] = {
        **_summarize(name, path, config, shown),
        "status": {} if status is None else msgspec.to_builtins(status),
        "wait_list": msgspec.to_builtins(shown.waits),
        "processes": [{"name": row.name, "state": row.state, "restarts": row.restarts} for row in processes],
        "flow": {},
        "drops": [],
        "failures": [],
        "events": [],
    }
    if shown.page_state not in ("planned", "damaged"):
        with open_last_commit(path) as store:
            description |= _read_history(store)
    return description


def _summarize(name: str, path: Path, config: dict[str, Any], shown: ShownRun) -> dict[str, Any]:
    kind = get_kind(config)
    summary: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "state": shown.page_state,
        "problem": shown.problem,
        "model": get_model_name(config),
        "sources": _list_sources(config),
        "step": None,
        "max_steps": config.get("max_steps") if kind != "eval" else None,
        "reward": None,
        "curve": [],
        "rollouts": 0,
        "waits": [f"{wait.who} waits for {wait.waits_for}" for wait in shown.waits],
        "updated": _last_change(path),
    }
    if shown.page_state not in ("planned", "damaged"):
        with open_last_commit(path) as store:
            summary |= _read_progress(store)
    if shown.state.orchestrator is not None:
        summary["step"] = shown.state.orchestrator.step
    return summary


def _list_sources(config: Mapping[str, Any]) -> list[str]:
    """Return the tasksets that a run trains or evaluates on."""
    train = config.get("train")
    tables = [_as_table(table) for table in cast(list[Any], train)] if isinstance(train, list) else [config]
    names = [table.get("name") or _as_table(table.get("taskset")).get("id") for table in tables]
    return [str(name) for name in names if name]


def _last_change(path: Path) -> float:
    """Return the Unix time of the last change of the index."""
    stats = [_stat_contents(path / name) for name in INDEX_FILES]
    return max((stat[0] / 1e9 for stat in stats if stat), default=0.0)


def _stat_contents(file: Path) -> tuple[int, int] | None:
    """Return when a file was written, in ns of Unix time, and its size; None without contents.

    A reader of SQLite creates an empty -wal file.
    """
    try:
        stat = file.stat()
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_size) if stat.st_size else None


def has_metrics(store: RunStore) -> bool:
    """Return whether the run has a table of metrics, as every training run has."""
    return bool(store.select("SELECT 1 FROM sqlite_master WHERE name = 'metrics'"))


def _read_progress(store: RunStore) -> dict[str, Any]:
    """Return steps, reward, reward curve and number of rollouts of a run."""
    ((num_rollouts,),) = store.select("SELECT count(*) FROM rollouts")
    progress: dict[str, Any] = {"rollouts": num_rollouts}
    if Ledger.exists_in(store):
        progress["step"] = Ledger.open_readonly(store).progress().acknowledged
    if has_metrics(store):
        log = RunLog(store)
        name, points = CURVE_METRICS[0], log.metrics(CURVE_METRICS[0])
        if not points:
            name, points = CURVE_METRICS[1], log.metrics(CURVE_METRICS[1])
        stride = max(1, len(points) // CURVE_POINTS)
        progress["curve"] = [point.value for point in points[::-1][::stride]][::-1]
        progress["reward"] = points[-1].value if points and name == CURVE_METRICS[0] else None
        progress.setdefault("step", points[-1].step + 1 if points else 0)
    else:
        ((mean,),) = store.select("SELECT avg(reward) FROM rollouts WHERE failure IS NULL")
        progress["reward"] = mean
    return progress


def _read_history(store: RunStore) -> dict[str, Any]:
    """Return the flow of the ledger, and the last events and failures."""
    rows = store.select("SELECT time, kind, fields FROM events ORDER BY rowid DESC LIMIT ?", (MAX_EVENTS_READ,))
    events = [RunEvent(seconds, kind, msgspec.msgpack.decode(fields)) for seconds, kind, fields in reversed(rows)]
    history: dict[str, Any] = {
        "failures": _count_failures(events),
        "events": [event._asdict() for event in events if event.kind != "failure"][-MAX_EVENTS_SHOWN:],
    }
    if Ledger.exists_in(store):
        ledger = Ledger.open_readonly(store)
        query = "SELECT reason, detail, count(*) FROM groups WHERE state = 'dropped' GROUP BY 1, 2 ORDER BY 3 DESC"
        history["flow"] = ledger.count_by_state()
        history["drops"] = [
            {"reason": reason, "detail": detail, "groups": count}
            for reason, detail, count in store.select(query)[:MAX_DROP_REASONS]
        ]
        history["progress"] = asdict(ledger.progress())
    return history


def _count_failures(events: Sequence[RunEvent]) -> list[dict[str, Any]]:
    """Return the failures by name and origin, the most frequent first, each with its last message and its blame."""
    failures: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        if event.kind != "failure":
            continue
        name, origin = str(event.fields.get("name")), str(event.fields.get("where", ""))
        failure_class = failure_classes().get(name)
        blame = "system" if failure_class is None else failure_class.blame
        entry = failures.setdefault((name, origin), {"name": name, "origin": origin, "blame": blame, "count": 0})
        entry["count"] += 1
        entry["message"] = str(event.fields.get("message", "")).partition("\n")[0]
    return sorted(failures.values(), key=itemgetter("count"), reverse=True)
