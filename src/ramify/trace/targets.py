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
from ramify.trace.annotation import Annotation, Sample
from ramify.trace.columns import NODE, VERSION, Floats, Ints, join_tables, ranges
from ramify.trace.forest import COMPONENTS, SEQUENCE, Dropped, Table, Targets, Version

Mask = npt.NDArray[np.bool_]
S = TypeVar("S", bound=np.generic)


class Found(NamedTuple):
    """What is trained of a group. `index` and `source` of the targets still count the joined tokens."""

    targets: Targets
    sequences: Table
    envs: tuple[str, ...]
    versions: tuple[Version, ...]
    dropped: Dropped


def find_targets(samples: Sequence[Sample], seq_len: int | None, overlong: Literal["drop", "cut"]) -> Found:
    """The targets of the traces, those of one node together and in order."""
    notes = [note for sample in samples for note in _checked(sample)]
    joined = _Joined.of(samples)
    spans = _Spans.of(joined, samples, notes)
    tokens = ranges(spans.begins + spans.starts, spans.lengths)
    sources = _sources(joined, samples, spans, tokens)
    version, versions = _versions(joined, samples)
    place, sampled = _sampled(joined, spans, tokens)
    found = Targets(
        token=joined.tokens[tokens],
        index=tokens.astype(np.int32),
        source=sources,
        sequence=np.repeat(np.arange(len(notes), dtype=np.int32), spans.lengths),
        version=_pick(version, place, sampled, np.int32(-1)),
        logprob=_pick(joined.logprobs, place, sampled, np.float32(np.nan)),
        advantage=_spread(notes, "advantage", spans.lengths),
        rl=_spread(notes, "rl", spans.lengths),
        ce=_spread(notes, "ce", spans.lengths),
        ref_kl=_spread(notes, "ref_kl", spans.lengths),
        reference=_spread(notes, "reference", spans.lengths),
    )
    on_policy = (found.rl != 0) | (found.ref_kl != 0)
    trained = on_policy | (found.ce != 0)
    _check(joined, samples, notes, spans, tokens, sources, found, trained)
    dropped = Dropped()
    if seq_len is not None:
        depth = np.repeat(spans.depths - spans.begins, spans.lengths) + tokens
        over = trained & (depth >= seq_len)
        if overlong == "cut":
            dropped = Dropped(cut_tokens=int(np.count_nonzero(over)))
            trained &= ~over
        elif over.any():
            ends = np.zeros(len(notes), np.int64)  # tokens on the path up to the last trained one of the node
            np.maximum.at(ends, found.sequence[trained], depth[trained] + 1)
            fits = _fits(samples, ends, seq_len)
            lost = np.flatnonzero((ends > 0) & ~fits).tolist()
            dropped = Dropped(too_long=tuple((notes[i].trace, notes[i].node) for i in lost))
            trained &= fits[found.sequence]
    envs: dict[str, int] = {}
    rows: list[tuple[int, int, int, float]] = []
    for trace, note in zip(map(int, spans.traces), notes, strict=True):
        sample = samples[trace]
        rows.append((trace, note.node, envs.setdefault(sample.env, len(envs)), sample.temperature))
    if not on_policy.all():
        found = replace(found, logprob=np.where(on_policy, found.logprob, np.float32(np.nan)))
    if not trained.all():
        found = found.take(np.flatnonzero(trained))
    used = np.zeros(len(notes), bool)
    used[found.sequence] = True
    if not used.all():  # a call without a target is no sequence
        found = replace(found, sequence=(np.cumsum(used, dtype=np.int32) - 1)[found.sequence])
    return Found(found, np.array(rows, SEQUENCE)[used], tuple(envs), versions, dropped)


@dataclass(slots=True, frozen=True)
class _Joined:
    """The columns of several traces end to end; nodes and tokens count through."""

    nodes: Table
    starts: Ints  # of each node in the joined tokens
    sizes: Ints
    tokens: Ints
    sampled: Ints  # how many tokens of each node are
    first_sampled: Ints  # where they begin among all sampled ones
    logprobs: Floats
    placeholders: Mask  # per token
    first_node: Ints  # of each trace
    first_token: Ints
    runs: Ints  # [run, 2]: first node, tokens on the path before it

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Joined:
        graphs = [sample.trace.graph for sample in samples]
        nodes = join_tables((graph.nodes.view for graph in graphs), NODE)
        counts = np.array([len(graph) for graph in graphs], np.int32)
        lengths = np.array([graph.tokens.size for graph in graphs], np.int32)
        first_node, first_token = (np.cumsum(sizes, dtype=np.int32) - sizes for sizes in (counts, lengths))
        stops = nodes["stop"] + np.repeat(first_token, counts)
        starts = np.concatenate([np.zeros(1, np.int32), stops[:-1]])[: len(stops)]
        tokens = np.concatenate([np.empty(0, np.int32), *(graph.tokens.view for graph in graphs)])
        placeholders = np.zeros(len(tokens), bool)
        for graph, shift in zip(graphs, first_token.tolist(), strict=True):
            for start, stop, _ in graph.images():
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
            starts=starts,
            sizes=stops - starts,
            tokens=tokens,
            sampled=sampled,
            first_sampled=first_sampled,
            logprobs=logprobs,
            placeholders=placeholders,
            first_node=first_node,
            first_token=first_token,
            runs=np.array(runs, np.int32).reshape(-1, 2),
        )


@dataclass(slots=True, frozen=True)
class _Spans:
    """What each annotation covers: tokens [starts, stops) of its node, whose first is joined token `begins`."""

    traces: Ints
    nodes: Ints  # in the joined nodes
    begins: Ints
    starts: Ints
    stops: Ints
    depths: Ints  # tokens on the path before the node

    @classmethod
    def of(cls, joined: _Joined, samples: Sequence[Sample], notes: Sequence[Annotation]) -> _Spans:
        counts = [len(sample.annotations) for sample in samples]
        traces = np.repeat(np.arange(len(samples), dtype=np.int32), counts)
        nodes = np.array([note.node for note in notes], np.int32) + joined.first_node[traces]
        starts, stops = joined.nodes["sampled_start"][nodes], joined.nodes["sampled_stop"][nodes]
        for i, note in enumerate(notes):
            if note.span is not None:
                starts[i], stops[i] = note.span
                size = int(joined.sizes[nodes[i]])
                if not 0 <= note.span[0] <= note.span[1] <= size:
                    raise TraceInvalid(
                        f"span {note.span} leaves the {size} tokens of node {note.node} of {note.trace!r}"
                    )
        first, depth = joined.runs[np.searchsorted(joined.runs[:, 0], nodes, "right") - 1].T
        begins = joined.starts[nodes]
        return cls(traces, nodes, begins, starts, stops, depth + begins - joined.starts[first])

    @property
    def lengths(self) -> Ints:
        return self.stops - self.starts


def _checked(sample: Sample) -> Sequence[Annotation]:
    """The sample's annotations, each of another node of this very trace."""
    if not 0 < sample.temperature < float("inf"):
        raise TraceInvalid(f"trace {sample.trace.id!r} has temperature {sample.temperature}: it must be above 0")
    seen: set[int] = set()
    for note in sample.annotations:
        if note.trace != sample.trace.id:
            raise TraceInvalid(f"an annotation of trace {note.trace!r} came with trace {sample.trace.id!r}")
        if not 0 <= note.node < len(sample.trace.graph):
            raise TraceInvalid(f"an annotation is of node {note.node}, which trace {note.trace!r} does not have")
        if note.node in seen:
            raise TraceInvalid(f"node {note.node} of trace {note.trace!r} has two annotations")
        seen.add(note.node)
    return sample.annotations


def _fits(samples: Sequence[Sample], ends: npt.NDArray[np.int64], seq_len: int) -> Mask:
    """Which annotated nodes lie on some branch whose last trained token is within `seq_len`."""
    fits: list[bool] = []
    for sample in samples:
        nodes = [note.node for note in sample.annotations]
        parents: list[int] = sample.trace.graph.nodes.view["parent"].tolist()
        reach = [0] * len(parents)  # the largest end on the path to the node
        for node, end in zip(nodes, ends[len(fits) : len(fits) + len(nodes)].tolist(), strict=True):
            reach[node] = end
        for node, parent in enumerate(parents):
            reach[node] = max(reach[node], reach[parent] if parent >= 0 else 0)
        good = {leaf for leaf in sample.trace.leaves if reach[leaf] <= seq_len}
        for node in reversed(range(len(parents))):  # children before parents
            if node in good:
                good.add(parents[node])
        fits += [node in good for node in nodes]
    return np.array(fits, bool)


def _sources(joined: _Joined, samples: Sequence[Sample], spans: _Spans, tokens: npt.NDArray[np.int64]) -> Ints:
    """For each token the one before it on its path, in the joined tokens; -1 before a root."""
    sources = (tokens - 1).astype(np.int32)
    firsts = np.cumsum(spans.lengths) - spans.lengths
    # Only a node's first token can have its predecessor elsewhere, and only if the node does not follow its parent.
    parents = joined.nodes["parent"][spans.nodes] + joined.first_node[spans.traces]
    follows = (joined.nodes["parent"][spans.nodes] >= 0) & (parents == spans.nodes - 1) & (joined.sizes[parents] > 0)
    for i in np.flatnonzero((spans.starts == 0) & (spans.lengths > 0) & ~follows).tolist():
        trace = int(spans.traces[i])
        before = samples[trace].trace.graph.before(int(spans.nodes[i] - joined.first_node[trace]))
        sources[firsts[i]] = before + int(joined.first_token[trace]) if before >= 0 else -1
    return sources


def _sampled(joined: _Joined, spans: _Spans, tokens: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Mask]:
    """For each token its place among all sampled ones, and whether it has one."""
    first = spans.begins + joined.nodes["sampled_start"][spans.nodes]
    offsets = tokens - np.repeat(first, spans.lengths)
    inside = (offsets >= 0) & (offsets < np.repeat(joined.sampled[spans.nodes], spans.lengths))
    return offsets + np.repeat(joined.first_sampled[spans.nodes], spans.lengths), inside


def _versions(joined: _Joined, samples: Sequence[Sample]) -> tuple[Ints, tuple[Version, ...]]:
    """For each sampled token which version it came from, -1 where none is known; and the versions."""
    names: dict[tuple[str, int, int], int] = {}
    numbers: list[int] = []
    for sample in samples:
        graph = sample.trace.graph
        told: list[tuple[int, int, int, int, int]] = graph.versions.view.tolist()
        for _, policy, incarnation, step, _ in told:
            numbers.append(names.setdefault((graph.policies[policy], incarnation, step), len(names)))
    rows = join_tables((sample.trace.graph.versions.view for sample in samples), VERSION)
    found = np.repeat(np.array(numbers, np.int32), rows["count"])
    if len(found) < len(joined.logprobs):  # some nodes do not say
        shift = np.repeat(joined.first_node, [sample.trace.graph.versions.size for sample in samples])
        nodes = np.unique(rows["node"] + shift)
        known, found = found, np.full(len(joined.logprobs), -1, np.int32)
        found[ranges(joined.first_sampled[nodes], joined.sampled[nodes])] = known
    return found, tuple(Version(*name) for name in names)


def _pick(column: npt.NDArray[S], place: npt.NDArray[np.int64], known: Mask, otherwise: S) -> npt.NDArray[S]:
    if known.all():
        return column[place]
    found = np.full(len(place), otherwise)
    found[known] = column[place[known]]
    return found


def _spread(notes: Sequence[Annotation], name: str, lengths: Ints) -> Floats:
    """A column of values, one per token, from annotations that have one value or one per token (NaN: none)."""
    values = [np.nan if (value := getattr(note, name)) is None else value for note in notes]
    if all(isinstance(value, int | float) for value in values):
        same = all(value is values[0] for value in values)  # a default, most often
        return np.repeat(np.array(values[:1] if same else values, np.float32), lengths.sum() if same else lengths)
    parts: list[Floats] = []
    for note, value, n in zip(notes, values, lengths.tolist(), strict=True):
        array = np.asarray(value, np.float32)
        if array.shape not in ((), (n,)):
            raise TraceInvalid(
                f"{name} of node {note.node} of trace {note.trace!r} has shape {array.shape}: "
                f"expected one number, or {n}, one per token"
            )
        parts.append(np.broadcast_to(array, n))
    return np.concatenate(parts)


def _check(
    joined: _Joined,
    samples: Sequence[Sample],
    notes: Sequence[Annotation],
    spans: _Spans,
    tokens: npt.NDArray[np.int64],
    sources: Ints,
    found: Targets,
    trained: Mask,
) -> None:
    """Refuse targets that no loss could use, naming the token."""
    on_policy = (found.rl != 0) | (found.ref_kl != 0)
    foreign = joined.nodes["trainable"][spans.nodes] == 0
    heated = np.array([sample.temperature != 1 for sample in samples], bool)[spans.traces]
    finite = np.isfinite(found.advantage)
    for name in COMPONENTS:
        finite &= np.isfinite(getattr(found, name))
    not_finite: dict[str, Callable[[], npt.NDArray[Any]]] = {
        "has an rl or ref_kl weight but no finite sampler logprob": lambda: on_policy & ~np.isfinite(found.logprob),
        "has a ref_kl weight but no finite reference": lambda: (found.ref_kl != 0) & ~np.isfinite(found.reference),
        "has an advantage or weight that is not finite": lambda: ~finite,
    }
    problems: dict[str, Callable[[], npt.NDArray[Any]]] = {
        "is the first of a root and has no token before it to be predicted from": lambda: trained & (sources < 0),
        "has an rl or ref_kl weight but its node is not trainable": lambda: on_policy & foreign[found.sequence],
        "has a ref_kl weight at a temperature that is not 1": lambda: (found.ref_kl != 0) & heated[found.sequence],
        "is an image placeholder": lambda: trained & joined.placeholders[tokens],
        **not_finite,
    }
    for problem, test in problems.items():
        wrong = test()
        if wrong.any():
            at = int(wrong.argmax())
            note = notes[int(found.sequence[at])]
            offset = int(tokens[at] - spans.begins[found.sequence[at]])
            kind = ValueNotFinite if problem in not_finite else TraceInvalid
            raise kind(f"token {offset} of node {note.node} of trace {note.trace!r} {problem}")
