"""The queries of the page: each returns plain data for one view. The server, the export and `ramify show` use them."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any, cast

import msgspec

from ramify.errors import BatchCorrupt, ConfigInvalid, DeadlineExceeded, RamifyError
from ramify.evals.report import compute_scores
from ramify.images import elide_data_urls
from ramify.store import RolloutRecord, RunStore
from ramify.trace import Trace
from ramify.trace.json_view import to_dict
from ramify.train.token_stats import TokenStats
from ramify.view.forest_view import annotate_all, describe_forest
from ramify.view.last_used import MAX_CACHED, LastUsed
from ramify.view.reward_changes import compute_reward_changes
from ramify.view.rollout_filter import RolloutFilter
from ramify.view.rollout_index import SORT_COLUMNS, RolloutIndex
from ramify.view.rollout_view import describe_rollout, format_markdown, read_message_text
from ramify.view.run_folder import CONFIG_FILE, RunFolder
from ramify.view.run_state import (
    LASTING_STATES,
    describe_run,
    get_model_name,
    has_metrics,
    open_last_commit,
    read_change_key,
    read_config,
    summarize_run,
)
from ramify.view.token_texts import TokenTexts
from ramify.view.token_view import FloatArray, TokenMeasures
from ramify.view.training_record import (
    GroupTraining,
    TokenStatsKey,
    find_attempt,
    find_token_stats,
    read_group_training,
)

PAGE_SIZE = 50
MAX_NODES = 60  # whose tokens are sent at once
MAX_EXCERPT_CHARS = 240
MAX_REPLY_CHARS = 4000
MAX_ATTEMPTS = 64  # of a task of an eval that are shown as a group
INDEX_WAIT = 0.4  # seconds a page of rollouts waits for the index
IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")

Traces = Sequence[Trace]


class RunQueries:
    """The queries about the runs in one folder. Methods may be called from several threads.

    They raise ConfigInvalid for a run, a group or a rollout that is not there, and the failures of reading a run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self._indexes = LastUsed[Path, RolloutIndex](RolloutIndex, lambda index: index.close())
        self._texts = LastUsed[str, TokenTexts](TokenTexts.load)
        self._changes: OrderedDict[tuple[Path, str, float], Mapping[int, FloatArray]] = OrderedDict()
        self._changes_lock = Lock()
        self._token_stats = LastUsed[TokenStatsKey, TokenStats](TokenStatsKey.read)
        self._summaries: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self._scores: dict[Path, tuple[Any, list[dict[str, Any]]]] = {}

    def close(self) -> None:
        """Stop what runs in the background."""
        self._indexes.clear()

    # -- runs ----------------------------------------------------------------------------------------------------

    def list_runs(self) -> list[dict[str, Any]]:
        """Return a summary of every run, the last changed first; one that cannot be read has a `problem`."""
        runs = [self._summarize(name, path) for name, path in self.folder.list_runs().items()]
        return sorted(runs, key=lambda run: -run["updated"])

    def _summarize(self, name: str, path: Path) -> dict[str, Any]:
        """Return the summary of a run. The list is asked every few seconds, so a run that has not changed is kept."""
        key = read_change_key(path)
        entry = self._summaries.get(path)
        if entry is None or entry[0] != key:
            entry = key, summarize_run(name, path)
            if entry[1]["state"] in LASTING_STATES:
                self._summaries[path] = entry
        return entry[1]

    def get_run(self, run: str) -> dict[str, Any]:
        """Return state, waits, flow, failures and events of a run, and the scores of an eval."""
        path = self.folder.find_run(run)
        description = describe_run(run, path)
        description["scores"] = self._compute_scores(path) if description["kind"] == "eval" else []
        return description

    def get_config(self, run: str) -> dict[str, Any]:
        """Return the configuration of a run, as text and as one value per dotted key; empty if it cannot be read."""
        path = self.folder.find_run(run)
        try:
            text = (path / CONFIG_FILE).read_text("utf-8", errors="replace")
        except OSError:
            text = ""
        return {"text": text, "values": dict(_flatten(read_config(path)))}

    def get_metrics(self, run: str, names: Sequence[str] = (), after: int = 0) -> dict[str, Any]:
        """Return the points of metrics in the order of writing; a later point of a step replaces an earlier one.

        `after` is the `last` of an earlier answer: only newer points are returned. Without `names`, no points are.
        `all_names` are the names of all metrics of the run.
        """
        path = self.folder.find_run(run)
        points: dict[str, list[tuple[int, float | None]]] = {}
        with open_last_commit(path) as store:
            if not has_metrics(store):
                return {"last": 0, "points": {}, "all_names": []}
            all_names = [name for (name,) in store.select("SELECT DISTINCT name FROM metrics ORDER BY name")]
            ((last,),) = store.select("SELECT coalesce(max(rowid), 0) FROM metrics")
            marks = ", ".join("?" * len(names))
            query = f"SELECT name, step, value FROM metrics WHERE name IN ({marks}) AND rowid > ? ORDER BY rowid"
            for name, step, value in store.select(query, (*names, after)):
                points.setdefault(name, []).append((step, value if isinstance(value, float) else None))
        return {"last": last, "points": points, "all_names": all_names}

    def _compute_scores(self, path: Path) -> list[dict[str, Any]]:
        """Return the scores of an eval with their intervals; they are computed again when rollouts were added."""
        try:
            with open_last_commit(path) as store:
                state = store.select("SELECT number, length FROM segments")
                if path not in self._scores or self._scores[path][0] != state:
                    estimates = compute_scores(store.rollouts(), pass_threshold=1.0)
                    scores = [
                        {
                            "name": name,
                            "mean": estimate.mean,
                            "interval": estimate.interval(),
                            "tasks": estimate.num_tasks,
                        }
                        for name, estimate in estimates
                    ]
                    self._scores[path] = state, scores
                return self._scores[path][1]
        except RamifyError:  # the state of the run says what is wrong
            return []

    # -- rollouts ------------------------------------------------------------------------------------------------

    def list_rollouts(
        self,
        run: str,
        rollout_filter: RolloutFilter | None = None,
        *,
        sort: str = "newest",
        descending: bool = True,
        page: int = 1,
    ) -> dict[str, Any]:
        """Return a page of rollouts, the number of all that match, and counts by source, stop reason and error."""
        path, rollout_filter = self.folder.find_run(run), rollout_filter or RolloutFilter()
        if sort not in SORT_COLUMNS:
            raise ConfigInvalid(f"sort: expected one of {', '.join(SORT_COLUMNS)}, got {sort!r}")
        index = self._indexes.get(path)
        fraction = index.refresh(texts=rollout_filter.text is not None, wait=INDEX_WAIT)
        offset = PAGE_SIZE * (max(1, page) - 1)
        total, rows = index.select(rollout_filter, sort=sort, descending=descending, offset=offset, limit=PAGE_SIZE)
        with open_last_commit(path) as store:
            _add_training(store, rows)
        facets = index.get_facets()
        return {"total": total, "rows": rows, "indexed": fraction, "page_size": PAGE_SIZE, "facets": facets}

    def get_row(self, run: str, id: str) -> dict[str, Any]:
        """Return the row of one rollout in the list."""
        path = self.folder.find_run(run)
        rows = self._indexes.get(path).select_ids([id])
        if not rows:
            raise ConfigInvalid(f"{path} has no rollout {id!r}")
        with open_last_commit(path) as store:
            _add_training(store, rows)
        return rows[0]

    def wait_for_index(self, run: str, timeout: float) -> None:
        """Wait until all rollouts of a run are indexed. Raises DeadlineExceeded."""
        if self._indexes.get(self.folder.find_run(run)).refresh(wait=timeout) < 1.0:
            raise DeadlineExceeded(f"the rollouts of {run} were not indexed within {timeout:g} s")

    def get_excerpts(self, run: str, ids: Sequence[str]) -> dict[str, str]:
        """Return the beginning of the last reply of each rollout."""
        excerpts: dict[str, str] = {}
        with open_last_commit(self.folder.find_run(run)) as store:
            for id in ids[:PAGE_SIZE]:
                try:
                    excerpts[id] = store.read_traces(id)[0].last_reply[:MAX_EXCERPT_CHARS]
                except (KeyError, RamifyError) as error:
                    excerpts[id] = f"cannot be read: {error}"
        return excerpts

    def get_rollout(self, run: str, id: str) -> dict[str, Any]:
        """Return the messages of a rollout as trees, with rewards, timing and training."""
        path = self.folder.find_run(run)
        with open_last_commit(path) as store:
            record, traces, training = _read_rollout(store, id)
            measures = [self._measure_tokens(store, record, trace, training) for trace in traces]
        return describe_rollout(record, measures, training, self._load_texts(path))

    def get_tokens(self, run: str, id: str, trace: int, nodes: Sequence[int]) -> list[dict[str, Any]]:
        """Return the tokens of some nodes of a trace, with the stored values of each."""
        path = self.folder.find_run(run)
        with open_last_commit(path) as store:
            record, traces, training = _read_rollout(store, id)
            selected = _get_trace(traces, trace)
            measures = self._measure_tokens(store, record, selected, training)
        if missing := [node for node in nodes if not 0 <= node < len(selected.nodes)]:
            raise ConfigInvalid(f"rollout {id} has no nodes {missing}")
        return measures.describe_tokens(nodes[:MAX_NODES], self._load_texts(path))

    def get_message(self, run: str, id: str, trace: int, node: int, start: int, count: int) -> dict[str, Any]:
        """Return a part of the text of a long message."""
        with open_last_commit(self.folder.find_run(run)) as store:
            selected = _get_trace(_read_rollout(store, id)[1], trace)
        if not 0 <= node < len(selected.nodes):
            raise ConfigInvalid(f"rollout {id} has no node {node}")
        return read_message_text(selected, node, start, count)

    def get_media(self, run: str, id: str, hash: str) -> tuple[str, bytes]:
        """Return type and bytes of an image of a rollout."""
        path = self.folder.find_run(run)
        with open_last_commit(path) as store:
            traces = _read_rollout(store, id)[1]
        for media in (media for trace in traces for media in trace.graph.media):
            if media.hash == hash and media.mime in IMAGE_TYPES:
                return media.mime, store.images.read(media).data
        raise ConfigInvalid(f"rollout {id} has no image {hash}")

    def export_rollout(self, run: str, id: str, format: str) -> str:
        """Return a rollout as JSON or Markdown text."""
        with open_last_commit(self.folder.find_run(run)) as store:
            record, traces, _ = _read_rollout(store, id)
        if format == "md":
            return format_markdown(record, traces)
        fields = {"id": record.id, "source": record.source, "task": record.task, "reward": record.reward}
        text = msgspec.json.encode({**fields, "traces": [elide_data_urls(to_dict(trace)) for trace in traces]})
        return msgspec.json.format(text, indent=2).decode()

    # -- groups --------------------------------------------------------------------------------------------------

    def get_group(self, run: str, group: int | None = None, source: str = "", task: str = "") -> dict[str, Any]:
        """Return the attempts of a group side by side; of an eval, which has no groups, those at one task."""
        with open_last_commit(self.folder.find_run(run)) as store:
            training, records, advantages = _read_group(store, group, source, task)
            attempts: list[dict[str, Any]] = []
            for record, advantage in zip(records, advantages):
                traces = store.read_traces(record.id)
                attempts.append(
                    {
                        "id": record.id,
                        "reward": record.reward,
                        "advantage": advantage,
                        "stop": record.failure or record.summary.get("stop", ""),
                        "calls": record.summary.get("calls", 0),
                        "tokens": record.summary.get("output", 0),
                        "prompt": next(
                            (node.message.text for node in traces[0].nodes if node.message.role == "user"), ""
                        ),
                        "reply": traces[0].last_reply[:MAX_REPLY_CHARS],
                    }
                )
        prompts = [attempt.pop("prompt")[:MAX_REPLY_CHARS] for attempt in attempts]
        return {
            "group": None if training is None else training.to_dict(),
            "dropped_attempts": [] if training is None else training.list_dropped(),
            "source": source or (training.group.source if training else ""),
            "task": task or (records[0].task if records else ""),
            "prompt": prompts[0] if prompts else "",
            "attempts": attempts,
        }

    def get_forest(self, run: str, group: int | None = None, source: str = "", task: str = "") -> dict[str, Any]:
        """Return the merged forest of a group, or of the attempts at one task of an eval."""
        path = self.folder.find_run(run)
        with open_last_commit(path) as store:
            training, records, advantages = _read_group(store, group, source, task)
            attempts = [store.read_traces(record.id) for record in records]
        batch_group = None if training is None else training.batch_group
        annotated = batch_group or annotate_all(group or 0, source, attempts, advantages)
        seq_len = None if training is None else training.seq_len
        return {
            "group": None if training is None else training.to_dict(),
            "is_trained": batch_group is not None,
            "attempts": [
                {"id": record.id, "reward": record.reward, "advantage": advantage}
                for record, advantage in zip(records, advantages)
            ],
            **describe_forest(annotated, attempts, seq_len, self._load_texts(path)),
        }

    def _measure_tokens(
        self, store: RunStore, record: RolloutRecord, trace: Trace, training: GroupTraining | None
    ) -> TokenMeasures:
        changes = self._compute_changes(store, record, trace)
        key = None if training is None else find_token_stats(store.path, training, trace.id)
        try:
            token_stats = None if key is None else self._token_stats.get(key)
        except BatchCorrupt:  # the other values can still be shown
            token_stats = None
        return TokenMeasures(trace, training, changes, token_stats)

    def _compute_changes(self, store: RunStore, record: RolloutRecord, trace: Trace) -> Mapping[int, FloatArray]:
        """Return the reward changes of a trace; of the last few traces they are kept, as tokens are asked in parts."""
        if record.reward is None:
            return {}
        key = (store.path, trace.id, record.reward)
        with self._changes_lock:
            if key not in self._changes:
                others = _read_other_attempts(store, record, trace.agent)
                self._changes[key] = compute_reward_changes(trace, others, record.reward)
                while len(self._changes) > MAX_CACHED:
                    self._changes.popitem(last=False)
            return self._changes[key]

    def _load_texts(self, path: Path) -> TokenTexts:
        return self._texts.get(get_model_name(read_config(path)))


def _read_rollout(store: RunStore, id: str) -> tuple[RolloutRecord, Traces, GroupTraining | None]:
    records = store.rollouts(id=id)
    if not records:
        raise ConfigInvalid(f"{store.path} has no rollout {id!r}")
    attempt = find_attempt(store, id)
    training = None if attempt is None else read_group_training(store, attempt[0])
    return records[0], store.read_traces(id), training


def _read_other_attempts(store: RunStore, record: RolloutRecord, agent: str) -> list[tuple[Trace, float]]:
    """Return the traces of an agent in the other attempts at the same task, with their rewards."""
    attempt = find_attempt(store, record.id)
    group, source, task = (None, record.source, record.task) if attempt is None else (attempt[0], "", "")
    _, records, _ = _read_group(store, group, source, task)
    others = [other for other in records if other.id != record.id and other.reward is not None]
    traces = [(trace, other.reward) for other in others for trace in store.read_traces(other.id)]
    return [(trace, reward) for trace, reward in traces if trace.agent == agent and reward is not None]


def _get_trace(traces: Traces, number: int) -> Trace:
    if not 0 <= number < len(traces):
        raise ConfigInvalid(f"the rollout has no trace {number}; it has {len(traces)}")
    return traces[number]


def _read_group(
    store: RunStore, group: int | None, source: str, task: str
) -> tuple[GroupTraining | None, list[RolloutRecord], list[float | None]]:
    """Return the ledger's entry of a group, its rollouts, and the advantage of each.

    An eval has no groups: the rollouts are those of one task, and the advantage is the reward minus their mean.
    """
    if group is None:
        records = store.rollouts(source=source, task=task)[:MAX_ATTEMPTS]
        rewards = [record.reward for record in records if record.reward is not None]
        mean = fmean(rewards) if rewards else 0.0
        return None, records, [None if record.reward is None else record.reward - mean for record in records]
    try:
        training = read_group_training(store, group)
    except KeyError:
        raise ConfigInvalid(f"{store.path} has no group {group}") from None
    ids = [(index, attempt.rollout_id) for index, attempt in sorted(training.attempts.items()) if attempt.rollout_id]
    records_by_id = {record.id: record for _, id in ids for record in store.rollouts(id=id)}
    present = [(index, records_by_id[id]) for index, id in ids if id in records_by_id]
    return training, [record for _, record in present], [training.get_advantage(index) for index, _ in present]


def _add_training(store: RunStore, rows: list[dict[str, Any]]) -> None:
    """Add advantage, state and step to rows of the index, from the ledger."""
    groups = sorted({row["group_number"] for row in rows if row["group_number"] is not None})
    attempts: dict[tuple[int, int], tuple[Any, ...]] = {}
    if groups:
        marks = ", ".join("?" * len(groups))
        query = (
            "SELECT a.number, a.attempt, a.state, a.reason, a.notes, g.step FROM attempts a "
            f"JOIN groups g ON g.number = a.number WHERE a.number IN ({marks})"
        )
        attempts = {(number, attempt): tuple(rest) for number, attempt, *rest in store.select(query, groups)}
    for row in rows:
        state, reason, notes, step = attempts.get((row["group_number"], row["attempt"]), (None, None, b"\x80", None))
        advantage = cast(dict[str, Any], msgspec.msgpack.decode(notes)).get("advantage")
        row |= {"state": state, "reason": reason, "step": step, "advantage": advantage}


def _flatten(table: Mapping[str, Any], prefix: str = "") -> "list[tuple[str, Any]]":
    """Return the values of nested tables and lists of tables by dotted keys."""
    items: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            items += _flatten(cast(dict[str, Any], value), f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(entry, dict) for entry in cast(list[Any], value)):
            for number, entry in enumerate(cast(list[dict[str, Any]], value)):
                items += _flatten(entry, f"{name}.{number}.")
        else:
            items.append((name, cast(Any, value)))
    return items
