"""The targets of a group: one entry per trained (trace, node, token), from annotations and the sampler's records.

The traces' columns are joined end to end first, so that each step below is one numpy call for the whole group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ramify.errors import TraceInvalid, ValueNotFinite
from ramify.trace.annotation import AnnotatedTrace, Annotation
from ramify.trace.columns import NODE_DTYPE, VERSION_DTYPE, Float32Array, Int32Array, concat_ranges, concat_tables
from ramify.trace.forest import LOSS_COMPONENTS, SEQUENCE_DTYPE, DroppedTargets, PolicyVersion, StructuredArray, Targets

Mask = npt.NDArray[np.bool_]
S = TypeVar("S", bound=np.generic)


class GroupTargets(NamedTuple):
    """What is trained of a group. `index` and `source` of the targets still count the joined tokens."""

    targets: Targets
    sequences: StructuredArray
    envs: tuple[str, ...]
    versions: tuple[PolicyVersion, ...]
    dropped: DroppedTargets


def build_targets(
    annotated_traces: Sequence[AnnotatedTrace], seq_len: int | None, overlong: Literal["drop", "cut"]
) -> GroupTargets:
    """The targets of the traces, those of one node together and in order."""
    notes = [note for sample in annotated_traces for note in _validate_annotations(sample)]
    joined = _ConcatenatedTraces.build(annotated_traces)
    spans = _AnnotatedSpans.build(joined, annotated_traces, notes)
    tokens = concat_ranges(spans.node_starts + spans.span_starts, spans.lengths)
    sources = _find_previous_tokens(joined, annotated_traces, spans, tokens)
    version, versions = _index_versions(joined, annotated_traces)
    place, sampled = _compute_sampled_offsets(joined, spans, tokens)
    found = Targets(
        token=joined.tokens[tokens],
        token_index=tokens.astype(np.int32),
        logits_index=sources,
        sequence=np.repeat(np.arange(len(notes), dtype=np.int32), spans.lengths),
        version=_gather_or_default(version, place, sampled, np.int32(-1)),
        logprob=_gather_or_default(joined.logprobs, place, sampled, np.float32(np.nan)),
        advantage=_expand_per_token(notes, "advantage", spans.lengths),
        rl=_expand_per_token(notes, "rl", spans.lengths),
        ce=_expand_per_token(notes, "ce", spans.lengths),
        ref_kl=_expand_per_token(notes, "ref_kl", spans.lengths),
        ref_logprob=_expand_per_token(notes, "ref_logprobs", spans.lengths),
    )
    on_policy = (found.rl != 0) | (found.ref_kl != 0)
    trained = on_policy | (found.ce != 0)
    _reject_untrainable(joined, annotated_traces, notes, spans, tokens, sources, found, trained)
    dropped = DroppedTargets()
    if seq_len is not None:
        depth = np.repeat(spans.node_depths - spans.node_starts, spans.lengths) + tokens
        over = trained & (depth >= seq_len)
        if overlong == "cut":
            dropped = DroppedTargets(num_truncated_tokens=int(np.count_nonzero(over)))
            trained &= ~over
        elif over.any():
            ends = np.zeros(len(notes), np.int64)  # tokens on the path up to the last trained one of the node
            np.maximum.at(ends, found.sequence[trained], depth[trained] + 1)
            fits = _mask_within_seq_len(annotated_traces, ends, seq_len)
            lost = np.flatnonzero((ends > 0) & ~fits).tolist()
            dropped = DroppedTargets(overlong_calls=tuple((notes[i].trace_id, notes[i].node) for i in lost))
            trained &= fits[found.sequence]
    envs: dict[str, int] = {}
    rows: list[tuple[int, int, int, float]] = []
    for trace, note in zip(map(int, spans.trace_indices), notes, strict=True):
        sample = annotated_traces[trace]
        rows.append((trace, note.node, envs.setdefault(sample.env, len(envs)), sample.temperature))
    if not on_policy.all():
        found = replace(found, logprob=np.where(on_policy, found.logprob, np.float32(np.nan)))
    if not trained.all():
        found = found.select(np.flatnonzero(trained))
    used = np.zeros(len(notes), bool)
    used[found.sequence] = True
    if not used.all():  # a call without a target is no sequence
        found = replace(found, sequence=(np.cumsum(used, dtype=np.int32) - 1)[found.sequence])
    return GroupTargets(found, np.array(rows, SEQUENCE_DTYPE)[used], tuple(envs), versions, dropped)


@dataclass(slots=True, frozen=True)
class _ConcatenatedTraces:
    """The columns of several traces end to end; nodes and tokens count through."""

    nodes: StructuredArray
    node_starts: Int32Array  # of each node in the joined tokens
    node_sizes: Int32Array
    tokens: Int32Array
    num_sampled: Int32Array  # how many tokens of each node are
    sampled_starts: Int32Array  # where they begin among all sampled ones
    logprobs: Float32Array
    placeholder_mask: Mask  # per token
    node_offsets: Int32Array  # of each trace
    token_offsets: Int32Array
    runs: Int32Array  # [run, 2]: first node, tokens on the path before it

    @classmethod
    def build(cls, annotated_traces: Sequence[AnnotatedTrace]) -> _ConcatenatedTraces:
        graphs = [sample.trace.graph for sample in annotated_traces]
        nodes = concat_tables((graph.nodes.view for graph in graphs), NODE_DTYPE)
        counts = np.array([len(graph) for graph in graphs], np.int32)
        lengths = np.array([graph.tokens.size for graph in graphs], np.int32)
        first_node, first_token = (np.cumsum(sizes, dtype=np.int32) - sizes for sizes in (counts, lengths))
        stops = nodes["stop"] + np.repeat(first_token, counts)
        starts = np.concatenate([np.zeros(1, np.int32), stops[:-1]])[: len(stops)]
        tokens = np.concatenate([np.empty(0, np.int32), *(graph.tokens.view for graph in graphs)])
        placeholders = np.zeros(len(tokens), bool)
        for graph, shift in zip(graphs, first_token.tolist(), strict=True):
            for start, stop, _ in graph.media_spans():
                placeholders[shift + start : shift + stop] = True
        logprobs = np.concatenate([np.empty(0, np.float32), *(graph.logprobs.view for graph in graphs)])
        sampled = nodes["sampled_stop"] - nodes["sampled_start"]
        first_sampled = np.cumsum(sampled, dtype=np.int32) - sampled
        runs = [
            (shift + first, depth)
            for graph, shift in zip(graphs, first_node.tolist())
            for first, depth in graph.run_starts()
        ]
        return cls(
            nodes=nodes,
            node_starts=starts,
            node_sizes=stops - starts,
            tokens=tokens,
            num_sampled=sampled,
            sampled_starts=first_sampled,
            logprobs=logprobs,
            placeholder_mask=placeholders,
            node_offsets=first_node,
            token_offsets=first_token,
            runs=np.array(runs, np.int32).reshape(-1, 2),
        )


@dataclass(slots=True, frozen=True)
class _AnnotatedSpans:
    """What each annotation covers: tokens [starts, stops) of its node, whose first is joined token `begins`."""

    trace_indices: Int32Array
    node_indices: Int32Array  # in the joined nodes
    node_starts: Int32Array
    span_starts: Int32Array
    span_stops: Int32Array
    node_depths: Int32Array  # tokens on the path before the node

    @classmethod
    def build(
        cls,
        concatenated: _ConcatenatedTraces,
        annotated_traces: Sequence[AnnotatedTrace],
        annotations: Sequence[Annotation],
    ) -> _AnnotatedSpans:
        counts = [len(sample.annotations) for sample in annotated_traces]
        traces = np.repeat(np.arange(len(annotated_traces), dtype=np.int32), counts)
        nodes = np.array([note.node for note in annotations], np.int32) + concatenated.node_offsets[traces]
        starts, stops = concatenated.nodes["sampled_start"][nodes], concatenated.nodes["sampled_stop"][nodes]
        for i, note in enumerate(annotations):
            if note.span is not None:
                starts[i], stops[i] = note.span
                size = int(concatenated.node_sizes[nodes[i]])
                if not 0 <= note.span[0] <= note.span[1] <= size:
                    raise TraceInvalid(
                        f"span {note.span} leaves the {size} tokens of node {note.node} of {note.trace_id!r}"
                    )
        first, depth = concatenated.runs[np.searchsorted(concatenated.runs[:, 0], nodes, "right") - 1].T
        begins = concatenated.node_starts[nodes]
        return cls(traces, nodes, begins, starts, stops, depth + begins - concatenated.node_starts[first])

    @property
    def lengths(self) -> Int32Array:
        return self.span_stops - self.span_starts


def _validate_annotations(annotated_trace: AnnotatedTrace) -> Sequence[Annotation]:
    """The sample's annotations, each of another node of this very trace."""
    if not 0 < annotated_trace.temperature < float("inf"):
        raise TraceInvalid(
            f"trace {annotated_trace.trace.id!r} has temperature {annotated_trace.temperature}: it must be above 0"
        )
    seen: set[int] = set()
    for note in annotated_trace.annotations:
        if note.trace_id != annotated_trace.trace.id:
            raise TraceInvalid(f"an annotation of trace {note.trace_id!r} came with trace {annotated_trace.trace.id!r}")
        if not 0 <= note.node < len(annotated_trace.trace.graph):
            raise TraceInvalid(f"an annotation is of node {note.node}, which trace {note.trace_id!r} does not have")
        if note.node in seen:
            raise TraceInvalid(f"node {note.node} of trace {note.trace_id!r} has two annotations")
        seen.add(note.node)
    return annotated_trace.annotations


def _mask_within_seq_len(
    annotated_traces: Sequence[AnnotatedTrace], path_lengths: npt.NDArray[np.int64], seq_len: int
) -> Mask:
    """Which annotated nodes lie on some branch whose last trained token is within `seq_len`."""
    fits: list[bool] = []
    for sample in annotated_traces:
        nodes = [note.node for note in sample.annotations]
        parents: list[int] = sample.trace.graph.nodes.view["parent"].tolist()
        reach = [0] * len(parents)  # the largest end on the path to the node
        for node, end in zip(nodes, path_lengths[len(fits) : len(fits) + len(nodes)].tolist(), strict=True):
            reach[node] = end
        for node, parent in enumerate(parents):
            reach[node] = max(reach[node], reach[parent] if parent >= 0 else 0)
        good = {leaf for leaf in sample.trace.leaves if reach[leaf] <= seq_len}
        for node in reversed(range(len(parents))):  # children before parents
            if node in good:
                good.add(parents[node])
        fits += [node in good for node in nodes]
    return np.array(fits, bool)


def _find_previous_tokens(
    concatenated: _ConcatenatedTraces,
    annotated_traces: Sequence[AnnotatedTrace],
    spans: _AnnotatedSpans,
    tokens: npt.NDArray[np.int64],
) -> Int32Array:
    """For each token the one before it on its path, in the joined tokens; -1 before a root."""
    sources = (tokens - 1).astype(np.int32)
    firsts = np.cumsum(spans.lengths) - spans.lengths
    # Only a node's first token can have its predecessor elsewhere, and only if the node does not follow its parent.
    parents = concatenated.nodes["parent"][spans.node_indices] + concatenated.node_offsets[spans.trace_indices]
    follows = (
        (concatenated.nodes["parent"][spans.node_indices] >= 0)
        & (parents == spans.node_indices - 1)
        & (concatenated.node_sizes[parents] > 0)
    )
    for i in np.flatnonzero((spans.span_starts == 0) & (spans.lengths > 0) & ~follows).tolist():
        trace = int(spans.trace_indices[i])
        before = annotated_traces[trace].trace.graph.previous_token_index(
            int(spans.node_indices[i] - concatenated.node_offsets[trace])
        )
        sources[firsts[i]] = before + int(concatenated.token_offsets[trace]) if before >= 0 else -1
    return sources


def _compute_sampled_offsets(
    concatenated: _ConcatenatedTraces, spans: _AnnotatedSpans, tokens: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], Mask]:
    """For each token its place among all sampled ones, and whether it has one."""
    first = spans.node_starts + concatenated.nodes["sampled_start"][spans.node_indices]
    offsets = tokens - np.repeat(first, spans.lengths)
    inside = (offsets >= 0) & (offsets < np.repeat(concatenated.num_sampled[spans.node_indices], spans.lengths))
    return offsets + np.repeat(concatenated.sampled_starts[spans.node_indices], spans.lengths), inside


def _index_versions(
    concatenated: _ConcatenatedTraces, annotated_traces: Sequence[AnnotatedTrace]
) -> tuple[Int32Array, tuple[PolicyVersion, ...]]:
    """For each sampled token which version it came from, -1 where none is known; and the versions."""
    names: dict[tuple[str, int, int], int] = {}
    numbers: list[int] = []
    for sample in annotated_traces:
        graph = sample.trace.graph
        told: list[tuple[int, int, int, int, int]] = graph.versions.view.tolist()
        for _, policy, incarnation, step, _ in told:
            numbers.append(names.setdefault((graph.policies[policy], incarnation, step), len(names)))
    rows = concat_tables((sample.trace.graph.versions.view for sample in annotated_traces), VERSION_DTYPE)
    found = np.repeat(np.array(numbers, np.int32), rows["count"])
    if len(found) < len(concatenated.logprobs):  # some nodes do not say
        shift = np.repeat(concatenated.node_offsets, [sample.trace.graph.versions.size for sample in annotated_traces])
        nodes = np.unique(rows["node"] + shift)
        known, found = found, np.full(len(concatenated.logprobs), -1, np.int32)
        found[concat_ranges(concatenated.sampled_starts[nodes], concatenated.num_sampled[nodes])] = known
    return found, tuple(PolicyVersion(*name) for name in names)


def _gather_or_default(
    column: npt.NDArray[S], indices: npt.NDArray[np.int64], valid: Mask, default: S
) -> npt.NDArray[S]:
    if valid.all():
        return column[indices]
    found = np.full(len(indices), default)
    found[valid] = column[indices[valid]]
    return found


def _expand_per_token(annotations: Sequence[Annotation], name: str, lengths: Int32Array) -> Float32Array:
    """A column of values, one per token, from annotations that have one value or one per token (NaN: none)."""
    values = [np.nan if (value := getattr(note, name)) is None else value for note in annotations]
    if all(isinstance(value, int | float) for value in values):
        same = all(value is values[0] for value in values)  # a default, most often
        return np.repeat(np.array(values[:1] if same else values, np.float32), lengths.sum() if same else lengths)
    parts: list[Float32Array] = []
    for note, value, n in zip(annotations, values, lengths.tolist(), strict=True):
        array = np.asarray(value, np.float32)
        if array.shape not in ((), (n,)):
            raise TraceInvalid(
                f"{name} of node {note.node} of trace {note.trace_id!r} has shape {array.shape}: "
                f"expected one number, or {n}, one per token"
            )
        parts.append(np.broadcast_to(array, n))
    return np.concatenate(parts)


def _reject_untrainable(
    concatenated: _ConcatenatedTraces,
    annotated_traces: Sequence[AnnotatedTrace],
    annotations: Sequence[Annotation],
    spans: _AnnotatedSpans,
    tokens: npt.NDArray[np.int64],
    previous_tokens: Int32Array,
    targets: Targets,
    trained: Mask,
) -> None:
    """Refuse targets that no loss could use, naming the token."""
    on_policy = (targets.rl != 0) | (targets.ref_kl != 0)
    foreign = concatenated.nodes["trainable"][spans.node_indices] == 0
    heated = np.array([sample.temperature != 1 for sample in annotated_traces], bool)[spans.trace_indices]
    finite = np.isfinite(targets.advantage)
    for name in LOSS_COMPONENTS:
        finite &= np.isfinite(getattr(targets, name))
    not_finite: dict[str, Callable[[], npt.NDArray[Any]]] = {
        "has an rl or ref_kl weight but no finite sampler logprob": lambda: on_policy & ~np.isfinite(targets.logprob),
        "has a ref_kl weight but no finite reference": lambda: (
            (targets.ref_kl != 0) & ~np.isfinite(targets.ref_logprob)
        ),
        "has an advantage or weight that is not finite": lambda: ~finite,
    }
    problems: dict[str, Callable[[], npt.NDArray[Any]]] = {
        "is the first of a root and has no token before it to be predicted from": lambda: (
            trained & (previous_tokens < 0)
        ),
        "has an rl or ref_kl weight but its node is not trainable": lambda: on_policy & foreign[targets.sequence],
        "has a ref_kl weight at a temperature that is not 1": lambda: (targets.ref_kl != 0) & heated[targets.sequence],
        "is an image placeholder": lambda: trained & concatenated.placeholder_mask[tokens],
        **not_finite,
    }
    for problem, test in problems.items():
        wrong = test()
        if wrong.any():
            at = int(wrong.argmax())
            note = annotations[int(targets.sequence[at])]
            offset = int(tokens[at] - spans.node_starts[targets.sequence[at]])
            kind = ValueNotFinite if problem in not_finite else TraceInvalid
            raise kind(f"token {offset} of node {note.node} of trace {note.trace_id!r} {problem}")
