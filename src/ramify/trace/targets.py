"""Builds the targets of a group: one entry per trained (trace, node, token), from annotations and sampled tokens.

The columns of all traces are concatenated first, so that each step is one numpy call for the whole group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ramify.core.errors import OperationInvalid, ValueNotFinite
from ramify.trace.annotation import TOP_DTYPE, AnnotatedTrace, Annotation
from ramify.trace.columns import (
    NODE_DTYPE,
    VERSION_DTYPE,
    Float32Array,
    Int32Array,
    StructuredArray,
    concat_ranges,
    concat_tables,
)
from ramify.trace.forest import CALL_DTYPE, LOSS_COMPONENTS, START_LOGPROB, DroppedTargets, PolicyVersion, Targets

Mask = npt.NDArray[np.bool_]
S = TypeVar("S", bound=np.generic)


class GroupTargets(NamedTuple):
    """The targets of a group; `token_index` and `logits_index` are still indices into the concatenated tokens."""

    targets: Targets
    calls: StructuredArray
    envs: tuple[str, ...]
    versions: tuple[PolicyVersion, ...]
    dropped: DroppedTargets


def build_targets(
    annotated_traces: Sequence[AnnotatedTrace], seq_len: int | None, overlong: Literal["drop", "cut"]
) -> GroupTargets:
    """Return the targets of the traces; the targets of one node are adjacent and in order."""
    annotations = [annotation for annotated in annotated_traces for annotation in _validate_annotations(annotated)]
    concatenated = _ConcatenatedTraces.build(annotated_traces)
    spans = _AnnotatedSpans.build(concatenated, annotated_traces, annotations)
    tokens = concat_ranges(spans.node_starts + spans.span_starts, spans.lengths)
    previous_tokens = _find_previous_tokens(concatenated, annotated_traces, spans, tokens)
    version, versions = _index_versions(concatenated, annotated_traces)
    offsets, is_sampled = _compute_sampled_offsets(concatenated, spans, tokens)
    targets = Targets(
        token=concatenated.tokens[tokens],
        token_index=tokens.astype(np.int32),
        logits_index=previous_tokens,
        call=np.repeat(np.arange(len(annotations), dtype=np.int32), spans.lengths),
        version=_gather_or_default(version, offsets, is_sampled, np.int32(-1)),
        logprob=_gather_or_default(concatenated.logprobs, offsets, is_sampled, np.float32(np.nan)),
        advantage=_expand_per_token(annotations, "advantage", spans.lengths),
        rl=_expand_per_token(annotations, "rl", spans.lengths),
        ce=_expand_per_token(annotations, "ce", spans.lengths),
        ref_kl=_expand_per_token(annotations, "ref_kl", spans.lengths),
        ref_logprob=_expand_per_token(annotations, "ref_logprobs", spans.lengths),
        kl=_expand_per_token(annotations, "kl", spans.lengths),
        ref_top=_expand_top(annotations, spans.lengths),
    )
    on_policy = (targets.rl != 0) | (targets.ref_kl != 0) | (targets.kl != 0)
    trained = on_policy | (targets.ce != 0)
    _reject_untrainable(concatenated, annotated_traces, annotations, spans, tokens, targets, on_policy, trained)
    dropped = DroppedTargets()
    if seq_len is not None:
        depths = np.repeat(spans.node_depths - spans.node_starts, spans.lengths) + tokens
        is_over = trained & (depths >= seq_len)
        if overlong == "cut":
            dropped = DroppedTargets(num_truncated_tokens=int(np.count_nonzero(is_over)))
            trained &= ~is_over
        elif is_over.any():
            path_lengths = np.zeros(len(annotations), np.int64)  # up to the last trained token of the node
            np.maximum.at(path_lengths, targets.call[trained], depths[trained] + 1)
            fits = _mask_within_seq_len(annotated_traces, path_lengths, seq_len)
            overlong_calls = [annotations[i] for i in np.flatnonzero((path_lengths > 0) & ~fits).tolist()]
            dropped = DroppedTargets(tuple((annotation.trace_id, annotation.node) for annotation in overlong_calls))
            trained &= fits[targets.call]
    envs: dict[str, int] = {}
    calls: list[tuple[int, int, int, float]] = []
    for trace_index, annotation in zip(map(int, spans.trace_indices), annotations, strict=True):
        annotated = annotated_traces[trace_index]
        env_index = envs.setdefault(annotated.env, len(envs))
        calls.append((trace_index, annotation.node, env_index, annotated.temperature))
    if not on_policy.all():
        targets = replace(
            targets,
            logprob=np.where(on_policy, targets.logprob, np.float32(np.nan)),
            version=np.where(on_policy, targets.version, np.int32(-1)),  # another model may have sampled them
        )
    if not trained.all():
        targets = targets.select(np.flatnonzero(trained))
    has_targets = np.zeros(len(annotations), bool)
    has_targets[targets.call] = True
    if not has_targets.all():  # drop the calls without targets
        targets = replace(targets, call=(np.cumsum(has_targets, dtype=np.int32) - 1)[targets.call])
    return GroupTargets(targets, np.array(calls, CALL_DTYPE)[has_targets], tuple(envs), versions, dropped)


@dataclass(slots=True, frozen=True)
class _ConcatenatedTraces:
    """The concatenated columns of several traces; nodes and tokens are numbered across traces."""

    nodes: StructuredArray
    node_starts: Int32Array  # per node: its first token
    node_sizes: Int32Array
    tokens: Int32Array
    num_sampled: Int32Array  # per node
    sampled_starts: Int32Array  # per node: its first one among all sampled tokens
    logprobs: Float32Array
    placeholder_mask: Mask  # per token
    node_offsets: Int32Array  # per trace: its first node
    token_offsets: Int32Array  # per trace: its first token
    runs: Int32Array  # [run, 2]: first node, number of tokens on the path before it

    @classmethod
    def build(cls, annotated_traces: Sequence[AnnotatedTrace]) -> "_ConcatenatedTraces":
        graphs = [annotated.trace.graph for annotated in annotated_traces]
        nodes = concat_tables((graph.nodes.view for graph in graphs), NODE_DTYPE)
        counts = np.array([len(graph) for graph in graphs], np.int32)
        lengths = np.array([graph.tokens.size for graph in graphs], np.int32)
        node_offsets, token_offsets = (np.cumsum(sizes, dtype=np.int32) - sizes for sizes in (counts, lengths))
        stops = nodes["stop"] + np.repeat(token_offsets, counts)
        starts = np.concatenate([np.zeros(1, np.int32), stops[:-1]])[: len(stops)]
        tokens = np.concatenate([np.empty(0, np.int32), *(graph.tokens.view for graph in graphs)])
        placeholder_mask = np.zeros(len(tokens), bool)
        for graph, offset in zip(graphs, token_offsets.tolist(), strict=True):
            for start, stop, _ in graph.media_spans():
                placeholder_mask[offset + start : offset + stop] = True
        logprobs = np.concatenate([np.empty(0, np.float32), *(graph.logprobs.view for graph in graphs)])
        num_sampled = nodes["sampled_stop"] - nodes["sampled_start"]
        runs = [
            (offset + first, depth)
            for graph, offset in zip(graphs, node_offsets.tolist())
            for first, depth in graph.runs()
        ]
        return cls(
            nodes=nodes,
            node_starts=starts,
            node_sizes=stops - starts,
            tokens=tokens,
            num_sampled=num_sampled,
            sampled_starts=np.cumsum(num_sampled, dtype=np.int32) - num_sampled,
            logprobs=logprobs,
            placeholder_mask=placeholder_mask,
            node_offsets=node_offsets,
            token_offsets=token_offsets,
            runs=np.array(runs, np.int32).reshape(-1, 2),
        )


@dataclass(slots=True, frozen=True)
class _AnnotatedSpans:
    """The tokens of each annotation: a span of its node, whose first token is `node_starts`."""

    trace_indices: Int32Array
    node_indices: Int32Array  # among the concatenated nodes
    node_starts: Int32Array
    span_starts: Int32Array
    lengths: Int32Array  # of the spans
    node_depths: Int32Array  # number of tokens on the path before the node

    @classmethod
    def build(
        cls,
        concatenated: _ConcatenatedTraces,
        annotated_traces: Sequence[AnnotatedTrace],
        annotations: Sequence[Annotation],
    ) -> "_AnnotatedSpans":
        counts = [len(annotated.annotations) for annotated in annotated_traces]
        traces = np.repeat(np.arange(len(annotated_traces), dtype=np.int32), counts)
        nodes = np.array([annotation.node for annotation in annotations], np.int32) + concatenated.node_offsets[traces]
        starts, stops = concatenated.nodes["sampled_start"][nodes], concatenated.nodes["sampled_stop"][nodes]
        for i, annotation in enumerate(annotations):
            if annotation.span is not None:
                starts[i], stops[i] = annotation.span
                size = int(concatenated.node_sizes[nodes[i]])
                if not 0 <= annotation.span[0] <= annotation.span[1] <= size:
                    raise OperationInvalid(
                        f"span {annotation.span} exceeds the {size} tokens of node {annotation.node} of trace "
                        f"{annotation.trace_id!r}"
                    )
        first_nodes, run_depths = concatenated.runs[np.searchsorted(concatenated.runs[:, 0], nodes, "right") - 1].T
        node_starts = concatenated.node_starts[nodes]
        node_depths = run_depths + node_starts - concatenated.node_starts[first_nodes]
        return cls(traces, nodes, node_starts, starts, stops - starts, node_depths)


def _validate_annotations(annotated_trace: AnnotatedTrace) -> Sequence[Annotation]:
    """Return the annotations after checking that each is of a different node of this trace."""
    trace = annotated_trace.trace
    if not 0 < annotated_trace.temperature < float("inf"):
        raise OperationInvalid(
            f"temperature of trace {trace.id!r} is {annotated_trace.temperature}: expected a finite number above 0"
        )
    seen: set[int] = set()
    for annotation in annotated_trace.annotations:
        if annotation.trace_id != trace.id:
            raise OperationInvalid(f"an annotation of trace {annotation.trace_id!r} is attached to trace {trace.id!r}")
        if not 0 <= annotation.node < len(trace.graph):
            raise OperationInvalid(
                f"an annotation is of node {annotation.node}, which trace {trace.id!r} does not have"
            )
        if annotation.node in seen:
            raise OperationInvalid(f"node {annotation.node} of trace {trace.id!r} has two annotations")
        seen.add(annotation.node)
    return annotated_trace.annotations


def _mask_within_seq_len(
    annotated_traces: Sequence[AnnotatedTrace], path_lengths: npt.NDArray[np.int64], seq_len: int
) -> Mask:
    """Return for each annotation whether its node is on a branch whose last trained token is within `seq_len`."""
    fits: list[bool] = []
    for annotated in annotated_traces:
        nodes = [annotation.node for annotation in annotated.annotations]
        parents: list[int] = annotated.trace.graph.nodes.view["parent"].tolist()
        longest = [0] * len(parents)  # the largest path length on the path to the node
        for node, length in zip(nodes, path_lengths[len(fits) : len(fits) + len(nodes)].tolist(), strict=True):
            longest[node] = length
        for node, parent in enumerate(parents):
            longest[node] = max(longest[node], longest[parent] if parent >= 0 else 0)
        fitting = {leaf for leaf in annotated.trace.leaves if longest[leaf] <= seq_len}
        for node in reversed(range(len(parents))):  # children before parents
            if node in fitting:
                fitting.add(parents[node])
        fits += [node in fitting for node in nodes]
    return np.array(fits, bool)


def _find_previous_tokens(
    concatenated: _ConcatenatedTraces,
    annotated_traces: Sequence[AnnotatedTrace],
    spans: _AnnotatedSpans,
    tokens: npt.NDArray[np.int64],
) -> Int32Array:
    """Return for each token the index of the previous one on its path, or -1 for the first token of a root."""
    previous = (tokens - 1).astype(np.int32)
    first_entries = np.cumsum(spans.lengths) - spans.lengths
    # Only for a node's first token is it not the index before, and only if the node does not follow its parent.
    parents = concatenated.nodes["parent"][spans.node_indices] + concatenated.node_offsets[spans.trace_indices]
    follows = (
        (concatenated.nodes["parent"][spans.node_indices] >= 0)
        & (parents == spans.node_indices - 1)
        & (concatenated.node_sizes[parents] > 0)
    )
    for i in np.flatnonzero((spans.span_starts == 0) & (spans.lengths > 0) & ~follows).tolist():
        trace_index = int(spans.trace_indices[i])
        node = int(spans.node_indices[i] - concatenated.node_offsets[trace_index])
        token = annotated_traces[trace_index].trace.graph.previous_token_index(node)
        previous[first_entries[i]] = token + int(concatenated.token_offsets[trace_index]) if token >= 0 else -1
    return previous


def _compute_sampled_offsets(
    concatenated: _ConcatenatedTraces, spans: _AnnotatedSpans, tokens: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], Mask]:
    """Return for each token its index among all sampled tokens, and whether it is one of them."""
    first = spans.node_starts + concatenated.nodes["sampled_start"][spans.node_indices]
    offsets = tokens - np.repeat(first, spans.lengths)
    is_sampled = (offsets >= 0) & (offsets < np.repeat(concatenated.num_sampled[spans.node_indices], spans.lengths))
    return offsets + np.repeat(concatenated.sampled_starts[spans.node_indices], spans.lengths), is_sampled


def _index_versions(
    concatenated: _ConcatenatedTraces, annotated_traces: Sequence[AnnotatedTrace]
) -> tuple[Int32Array, tuple[PolicyVersion, ...]]:
    """Return for each sampled token the index of its version, or -1 if unknown; and the versions."""
    version_indices: dict[PolicyVersion, int] = {}
    run_versions: list[int] = []
    graphs = [annotated.trace.graph for annotated in annotated_traces]
    for graph in graphs:
        version_rows: list[tuple[int, int, int, int, int]] = graph.versions.view.tolist()
        for _, policy, incarnation, step, _ in version_rows:
            version = PolicyVersion(graph.policies[policy], incarnation, step)
            run_versions.append(version_indices.setdefault(version, len(version_indices)))
    rows = concat_tables((graph.versions.view for graph in graphs), VERSION_DTYPE)
    per_token = np.repeat(np.array(run_versions, np.int32), rows["count"])
    if len(per_token) < len(concatenated.logprobs):  # some nodes have no versions
        node_offsets = np.repeat(concatenated.node_offsets, [graph.versions.size for graph in graphs])
        nodes = np.unique(rows["node"] + node_offsets)
        known, per_token = per_token, np.full(len(concatenated.logprobs), -1, np.int32)
        per_token[concat_ranges(concatenated.sampled_starts[nodes], concatenated.num_sampled[nodes])] = known
    return per_token, tuple(version_indices)


def _gather_or_default(
    column: npt.NDArray[S], indices: npt.NDArray[np.int64], valid: Mask, default: S
) -> npt.NDArray[S]:
    if valid.all():
        return column[indices]
    values = np.full(len(indices), default)
    values[valid] = column[indices[valid]]
    return values


def _expand_per_token(annotations: Sequence[Annotation], name: str, lengths: Int32Array) -> Float32Array:
    """Return one value per token of an annotation field that holds one value or one per token; None becomes NaN."""
    values = [np.nan if (value := getattr(annotation, name)) is None else value for annotation in annotations]
    if len(set(map(id, values))) == 1 and isinstance(values[0], int | float):  # usually the default
        return np.full(int(lengths.sum()), values[0], np.float32)
    if all(isinstance(value, int | float) for value in values):
        return np.repeat(np.array(values, np.float32), lengths)
    parts: list[Float32Array] = []
    for annotation, value, length in zip(annotations, values, lengths.tolist(), strict=True):
        array = np.asarray(value, np.float32)
        if array.shape not in ((), (length,)):
            raise OperationInvalid(
                f"{name} of node {annotation.node} of trace {annotation.trace_id!r} has shape {array.shape}: "
                f"expected one number, or {length}, one per token"
            )
        parts.append(np.broadcast_to(array, length))
    return np.concatenate(parts)


def _expand_top(annotations: Sequence[Annotation], lengths: Int32Array) -> StructuredArray:
    """Return the reference's likeliest tokens [targets, k], k being the largest `top_k`."""
    top_k = max((annotation.top_k for annotation in annotations), default=0)
    top = np.full((int(lengths.sum()), top_k), np.array((-1, -np.inf), TOP_DTYPE))
    if not top_k:
        return top
    stops = np.cumsum(lengths).tolist()
    for annotation, stop, length in zip(annotations, stops, lengths.tolist(), strict=True):
        if annotation.ref_top is None or not annotation.top_k:
            continue
        if annotation.ref_top.shape != (length, annotation.top_k):
            raise OperationInvalid(
                f"ref_top of node {annotation.node} of trace {annotation.trace_id!r} has shape "
                f"{annotation.ref_top.shape}: expected {(length, annotation.top_k)}"
            )
        top[stop - length : stop, : annotation.top_k] = annotation.ref_top
    return top


def _reject_untrainable(
    concatenated: _ConcatenatedTraces,
    annotated_traces: Sequence[AnnotatedTrace],
    annotations: Sequence[Annotation],
    spans: _AnnotatedSpans,
    tokens: npt.NDArray[np.int64],
    targets: Targets,
    on_policy: Mask,
    trained: Mask,
) -> None:
    """Raise if a target cannot be used by its loss; the message names the token."""

    def reject(is_wrong: Mask, problem: str, error_class: type[OperationInvalid] = OperationInvalid) -> None:
        if is_wrong.any():
            entry = int(is_wrong.argmax())
            annotation = annotations[int(targets.call[entry])]
            offset = int(tokens[entry] - spans.node_starts[targets.call[entry]])
            raise error_class(f"token {offset} of node {annotation.node} of trace {annotation.trace_id!r} {problem}")

    reject(trained & (targets.logits_index < 0), "is the first token of a root, so no token predicts it")
    not_trainable = concatenated.nodes["trainable"][spans.node_indices] == 0
    if not_trainable.any():
        problem = "has an rl, ref_kl or kl weight but its node is not trainable"
        reject(on_policy & not_trainable[targets.call], problem)
    if concatenated.placeholder_mask.any():
        reject(trained & concatenated.placeholder_mask[tokens], "is an image placeholder")
    problem = "has an rl, ref_kl or kl weight but no finite sampler logprob"
    reject(on_policy & ~np.isfinite(targets.logprob), problem, ValueNotFinite)
    has_reference = (targets.ref_kl != 0) | (targets.kl != 0)
    if has_reference.any():
        tempered = np.array([annotated.temperature != 1 for annotated in annotated_traces], bool)[spans.trace_indices]
        reject(has_reference & tempered[targets.call], "has a ref_kl or kl weight at a temperature that is not 1")
        is_known = np.isfinite(targets.ref_logprob) | (targets.ref_logprob == START_LOGPROB)
        problem = "has a ref_kl or kl weight but no finite reference logprob"
        reject(has_reference & ~is_known, problem, ValueNotFinite)
        uses_top = np.array([annotation.top_k > 0 for annotation in annotations], bool)
        lacks_top = uses_top[targets.call] & ~np.isfinite(targets.ref_top["logprob"]).any(1)
        problem = "has a ref_kl weight with top_k but not the likeliest tokens of the reference"
        reject((targets.ref_kl != 0) & lacks_top, problem, ValueNotFinite)
    finite = np.isfinite(targets.advantage)
    for name in LOSS_COMPONENTS:
        finite &= np.isfinite(getattr(targets, name))
    reject(~finite, "has an advantage or weight that is not finite", ValueNotFinite)
