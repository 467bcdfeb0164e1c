"""The queries of the page: each returns plain data for one view. The server, the export and `ramify show` use them."""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import msgspec

from ramify.core.bounded_cache import BoundedCache
from ramify.core.config import CONFIG_FILE
from ramify.core.errors import ConfigInvalid, DataCorrupt, DeadlineExceeded, RamifyError
from ramify.rollout.evals.report import compute_scores, summarize_rollouts
from ramify.run.store import Ledger, RolloutRecord, RunStore
from ramify.run.store.image_store import elide_data_urls
from ramify.trace import Trace
from ramify.trace.json_view import to_dict
from ramify.train.token_stats import TokenStats
from ramify.view.rollout_filter import RolloutFilter
from ramify.view.rollout_index import SORT_COLUMNS, RolloutIndex
from ramify.view.rollout_reader import (
    add_scores,
    add_training,
    compute_reward_changes,
    get_trace,
    list_messages,
    list_other_attempts,
    read_group,
    read_rollout,
)
from ramify.view.rollout_view import annotate_all, describe_forest, describe_rollout, format_markdown, read_message_text
from ramify.view.run_summary import (
    CACHEABLE_STATES,
    RunFolder,
    describe_run,
    get_model_name,
    has_metrics,
    open_last_commit,
    read_change_key,
    read_config,
    summarize_run,
)
from ramify.view.token_view import FloatArray, TokenMeasures, TokenTexts
from ramify.view.training_record import (
    GroupTraining,
    TokenStatsKey,
    find_token_stats,
)

PAGE_SIZE = 50
MAX_NODES = 60  # whose tokens are sent at once
MAX_EXCERPT_CHARS = 240
MAX_REPLY_CHARS = 4000
MAX_CACHED = 8  # runs, tokenizers and rollouts
INDEX_WAIT = 0.4  # seconds a page of rollouts waits for the index
IMAGE_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")

ChangesKey = tuple[Path, str, float, tuple[tuple[str, float], ...]]  # run, trace, reward; ids and rewards of others


class RunQueries:
    """The queries about the runs in one folder. Methods may be called from several threads.

    They raise ConfigInvalid for a run, a group or a rollout that is not there, and the failures of reading a run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self._indexes = BoundedCache[Path, RolloutIndex](MAX_CACHED, discard=lambda index: index.close())
        self._texts = BoundedCache[str, TokenTexts](MAX_CACHED)
        self._changes = BoundedCache[ChangesKey, Mapping[int, FloatArray]](MAX_CACHED)
        self._token_stats = BoundedCache[TokenStatsKey, TokenStats](MAX_CACHED)
        self._summaries: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self._scores: dict[Path, tuple[Any, dict[str, Any]]] = {}

    def close(self) -> None:
        """Stop what runs in the background."""
        self._indexes.clear()

    # -- runs ----------------------------------------------------------------------------------------------------

    def list_runs(self) -> list[dict[str, Any]]:
        """Return a summary of every run, the last changed first; one that cannot be read has a `problem`."""
        runs = [self._summarize(name, path) for name, path in self.folder.list_runs().items()]
        return sorted(runs, key=itemgetter("updated"), reverse=True)

    def _summarize(self, name: str, path: Path) -> dict[str, Any]:
        """Return the summary of a run. The list is asked every few seconds, so a run that has not changed is kept."""
        key = read_change_key(path)
        entry = self._summaries.get(path)
        if entry is None or entry[0] != key:
            entry = key, summarize_run(name, path)
            if entry[1]["state"] in CACHEABLE_STATES:
                self._summaries[path] = entry
        return entry[1]

    def get_run(self, run: str) -> dict[str, Any]:
        """Return state, waits, flow, failures and events of a run, and the scores and the summary of an eval."""
        path = self.folder.find_run(run)
        description = describe_run(run, path)
        empty: dict[str, Any] = {"scores": [], "summary": []}
        return description | (self._compute_scores(path) if description["kind"] == "eval" else empty)

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

    def _compute_scores(self, path: Path) -> dict[str, Any]:
        """Return the scores of an eval with their intervals, and the summary that `ramify show` prints below them.

        They are computed again when rollouts were added.
        """
        try:
            with open_last_commit(path) as store:
                state = store.select("SELECT number, length FROM segments")
                if path not in self._scores or self._scores[path][0] != state:
                    rows = store.rollouts()
                    estimates = compute_scores(rows, pass_threshold=1.0)
                    scores = [
                        {
                            "name": name,
                            "mean": estimate.mean,
                            "interval": estimate.interval(),
                            "tasks": estimate.num_tasks,
                        }
                        for name, estimate in estimates
                    ]
                    self._scores[path] = state, {"scores": scores, "summary": list(summarize_rollouts(rows))}
                return self._scores[path][1]
        except RamifyError:  # the state of the run says what is wrong
            return {"scores": [], "summary": []}

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
        """Return a page of rollouts, the number of all that match, and counts by source, stop reason and error.

        `has_groups` is false for a run without a ledger, such as an eval.
        """
        path, rollout_filter = self.folder.find_run(run), rollout_filter or RolloutFilter()
        if sort not in SORT_COLUMNS:
            raise ConfigInvalid(f"sort: expected one of {', '.join(SORT_COLUMNS)}, got {sort!r}")
        index = self._get_index(path)
        fraction = index.refresh(texts=rollout_filter.text is not None, wait=INDEX_WAIT)
        offset = PAGE_SIZE * (max(1, page) - 1)
        total, rows = index.select(rollout_filter, sort=sort, descending=descending, offset=offset, limit=PAGE_SIZE)
        with open_last_commit(path) as store:
            add_training(store, rows)
            add_scores(store, rows)
            has_groups = Ledger.exists_in(store)
        return {
            "total": total,
            "rows": rows,
            "indexed": fraction,
            "page_size": PAGE_SIZE,
            "facets": index.get_facets(),
            "has_groups": has_groups,
        }

    def get_row(self, run: str, id: str) -> dict[str, Any]:
        """Return the row of one rollout in the list."""
        path = self.folder.find_run(run)
        rows = self._get_index(path).select_ids([id])
        if not rows:
            raise ConfigInvalid(f"{path} has no rollout {id!r}")
        with open_last_commit(path) as store:
            add_training(store, rows)
            add_scores(store, rows)
        return rows[0]

    def wait_for_index(self, run: str, timeout: float) -> None:
        """Wait until all rollouts of a run are indexed. Raises DeadlineExceeded."""
        if self._get_index(self.folder.find_run(run)).refresh(wait=timeout) < 1.0:
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
            record, traces, training = read_rollout(store, id)
            measures = [self._measure_tokens(store, record, trace, training) for trace in traces]
        return describe_rollout(record, measures, training, self._load_texts(path))

    def get_tokens(self, run: str, id: str, trace: int, nodes: Sequence[int]) -> list[dict[str, Any]]:
        """Return the tokens of at most MAX_NODES nodes of a trace, with the stored values of each."""
        path = self.folder.find_run(run)
        if len(nodes) > MAX_NODES:
            raise ConfigInvalid(f"expected at most {MAX_NODES} nodes in one request, got {len(nodes)}")
        with open_last_commit(path) as store:
            record, traces, training = read_rollout(store, id)
            selected = get_trace(traces, trace)
            measures = self._measure_tokens(store, record, selected, training)
        if missing := [node for node in nodes if not 0 <= node < len(selected.nodes)]:
            raise ConfigInvalid(f"rollout {id} has no nodes {missing}")
        return measures.describe_tokens(nodes, self._load_texts(path))

    def iter_tokens(self, run: str, id: str, trace: int, nodes: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the tokens of any number of nodes of a trace."""
        for start in range(0, len(nodes), MAX_NODES):
            yield from self.get_tokens(run, id, trace, nodes[start : start + MAX_NODES])

    def get_message(self, run: str, id: str, trace: int, node: int, start: int, count: int) -> dict[str, Any]:
        """Return a part of the text of a long message."""
        with open_last_commit(self.folder.find_run(run)) as store:
            selected = get_trace(read_rollout(store, id)[1], trace)
        if not 0 <= node < len(selected.nodes):
            raise ConfigInvalid(f"rollout {id} has no node {node}")
        return read_message_text(selected, node, start, count)

    def get_media(self, run: str, id: str, hash: str) -> tuple[str, bytes]:
        """Return type and bytes of an image of a rollout."""
        path = self.folder.find_run(run)
        with open_last_commit(path) as store:
            traces = read_rollout(store, id)[1]
        for media in (media for trace in traces for media in trace.graph.media):
            if media.hash == hash and media.mime in IMAGE_TYPES:
                return media.mime, store.images.read(media).data
        raise ConfigInvalid(f"rollout {id} has no image {hash}")

    def export_rollout(self, run: str, id: str, format: str) -> str:
        """Return a rollout as JSON or Markdown text."""
        with open_last_commit(self.folder.find_run(run)) as store:
            record, traces, training = read_rollout(store, id)
        if format == "md":
            return format_markdown(record, traces, training)
        fields = {
            "id": record.id,
            "source": record.source,
            "task": record.task,
            "group": None if training is None else training.to_dict(),
            "reward": record.reward,
            "advantage": None if training is None else training.get_advantage(traces[0].attempt),
        }
        text = msgspec.json.encode({**fields, "traces": [elide_data_urls(to_dict(trace)) for trace in traces]})
        return msgspec.json.format(text, indent=2).decode()

    # -- groups --------------------------------------------------------------------------------------------------

    def get_group(self, run: str, group: int | None = None, source: str = "", task: str = "") -> dict[str, Any]:
        """Return the attempts of a group side by side; of an eval, which has no groups, those at one task."""
        with open_last_commit(self.folder.find_run(run)) as store:
            training, records, advantages = read_group(store, group, source, task)
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
                        "messages": list_messages(traces, MAX_REPLY_CHARS),
                    }
                )
        prompts = [attempt.pop("prompt")[:MAX_REPLY_CHARS] for attempt in attempts]
        return {
            "group": None if training is None else training.to_dict(),
            "dropped_attempts": [] if training is None else training.list_dropped_attempts(),
            "source": source or (training.group.source if training else ""),
            "task": task or (records[0].task if records else ""),
            "prompt": prompts[0] if prompts else "",
            "attempts": attempts,
        }

    def get_forest(self, run: str, group: int | None = None, source: str = "", task: str = "") -> dict[str, Any]:
        """Return the merged forest of a group, or of the attempts at one task of an eval."""
        path = self.folder.find_run(run)
        with open_last_commit(path) as store:
            training, records, advantages = read_group(store, group, source, task)
            attempts = [store.read_traces(record.id) for record in records]
        batch_group, seq_len = (None, None) if training is None else (training.batch_group, training.seq_len)
        annotated = batch_group or annotate_all(group or 0, source, attempts, advantages)
        return {
            "attempts": [
                {"id": record.id, "reward": record.reward, "advantage": advantage}
                for record, advantage in zip(records, advantages)
            ],
            **describe_forest(annotated, attempts, seq_len, self._load_texts(path)),
        }

    def _measure_tokens(
        self, store: RunStore, record: RolloutRecord, trace: Trace, training: GroupTraining | None
    ) -> TokenMeasures:
        changes = self._compute_changes(store, record, trace, training)
        key = None if training is None else find_token_stats(store.path, training, trace.id)
        try:
            token_stats = None if key is None else self._token_stats.get_or_make(key, key.read)
        except DataCorrupt:  # the other values can still be shown
            token_stats = None
        return TokenMeasures(trace, training, changes, token_stats)

    def _compute_changes(
        self, store: RunStore, record: RolloutRecord, trace: Trace, training: GroupTraining | None
    ) -> Mapping[int, FloatArray]:
        """Return the reward changes of a trace.

        Results of the last MAX_CACHED traces are cached, because the page requests tokens in several parts.
        """
        reward = record.reward
        if reward is None:
            return {}
        others = tuple(list_other_attempts(store, record, training))

        def compute() -> Mapping[int, FloatArray]:
            traces = [(other, other_reward) for id, other_reward in others for other in store.read_traces(id)]
            return compute_reward_changes(trace, [entry for entry in traces if entry[0].agent == trace.agent], reward)

        return self._changes.get_or_make((store.path, trace.id, reward, others), compute)

    def _load_texts(self, path: Path) -> TokenTexts:
        model = get_model_name(read_config(path))
        return self._texts.get_or_make(model, lambda: TokenTexts.load(model))

    def _get_index(self, path: Path) -> RolloutIndex:
        return self._indexes.get_or_make(path, lambda: RolloutIndex(path))


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
