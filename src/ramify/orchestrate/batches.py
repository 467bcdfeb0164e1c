"""A batch as the ledger keeps it: who is in it and what was said about them; the forest is grown again when needed.

The traces are in the run already, so a batch is only names and numbers, and small. From it and the stored traces the
same forest grows every time, for whatever number of ranks the trainer has by then. Whoever still has the forests that
grew when the groups were judged need not grow them again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ramify.errors import BatchCorrupt
from ramify.store.ledger import BatchRecord
from ramify.trace import AnnotatedTrace, Annotation, Forest, Trace, build_forest
from ramify.trace.forest import LOSS_COMPONENTS
from ramify.train.batch import Batch, PackSpec, pack_forests, split_across_ranks

ReadTraces = Callable[[str], Sequence[Trace]]  # a rollout's traces by its id


@dataclass(frozen=True, slots=True, eq=False)
class BatchGroup:
    """A group in a batch: its rollouts, and what is trained of them."""

    group: int
    env: str
    temperature: float
    rollouts: tuple[str, ...]  # ids in the run's index, in the order of the attempts
    annotations: tuple[Annotation, ...]

    def build_forest(self, traces: Sequence[Trace], seq_len: int | None) -> Forest:
        """The forest of the group; traces without an annotation have no part in it."""
        notes: dict[str, list[Annotation]] = {}
        for note in self.annotations:
            notes.setdefault(note.trace_id, []).append(note)
        known = {trace.id for trace in traces}
        if lost := sorted(notes.keys() - known):
            raise BatchCorrupt(f"group {self.group} has annotations of traces {lost}, which are not in the run")
        samples = [
            AnnotatedTrace(trace, tuple(notes[trace.id]), self.temperature, self.env)
            for trace in traces
            if trace.id in notes
        ]
        return build_forest(samples, seq_len=seq_len)


def encode_batch(step: int, scored_groups: Sequence[tuple[BatchGroup, Forest]], seq_len: int | None) -> BatchRecord:
    """The batch of these groups, in this order, ready for the ledger: N_c is fixed here."""
    content = _StoredContent(seq_len, [_encode_group(member) for member, _ in scored_groups])
    groups = tuple(member.group for member, _ in scored_groups)
    return BatchRecord(
        step, groups, msgspec.msgpack.encode(content), _count_entries([forest for _, forest in scored_groups])
    )


def decode_batch(stored_batch: BatchRecord) -> tuple[list[BatchGroup], int | None]:
    """The groups of a batch in their order, and the longest path that is trained. Raises BatchCorrupt."""
    try:
        content = msgspec.msgpack.decode(stored_batch.annotations, type=_StoredContent)
        members = [_decode_group(member) for member in content.groups]
    except (msgspec.MsgspecError, ValueError) as error:
        raise BatchCorrupt(f"the annotations of batch {stored_batch.step} cannot be read: {error}") from error
    found = tuple(member.group for member in members)
    if found != stored_batch.group_numbers:
        raise BatchCorrupt(
            f"batch {stored_batch.step} has groups {list(stored_batch.group_numbers)}, its "
            f"annotations are of {list(found)}"
        )
    return members, content.seq_len


def rebuild_batch(
    stored_batch: BatchRecord, read_traces: ReadTraces, pack_spec: PackSpec, *, flat: bool = False
) -> Batch:
    """The batch as it is trained, its forest grown from the stored traces; raises BatchCorrupt as `regrow` does."""
    forests = rebuild_forests(stored_batch, read_traces)
    return Batch(
        stored_batch.step,
        pack_forests(forests, pack_spec.pack_tokens, pack_spec.layout, flat=flat),
        stored_batch.counts,
    )


def rebuild_forests(stored_batch: BatchRecord, read_traces: ReadTraces) -> list[Forest]:
    """The forests of a batch, from the stored traces. Raises BatchCorrupt where they are not what was decided."""
    members, seq_len = decode_batch(stored_batch)
    forests: list[Forest] = []
    for member in members:
        traces = [trace for rollout in member.rollouts for trace in read_traces(rollout)]
        forests.append(member.build_forest(traces, seq_len))
    counts = _count_entries(forests)
    if counts != stored_batch.counts:
        raise BatchCorrupt(
            f"batch {stored_batch.step} was cut with {stored_batch.counts} entries, its traces now give {counts}"
        )
    return forests


def split_by_rank(
    stored_batch: BatchRecord, forests: Sequence[Forest], pack_spec: PackSpec, num_ranks: int
) -> list[Batch]:
    """What each of `ranks` ranks is given: the same batch however many there are."""
    batch = Batch(
        stored_batch.step, pack_forests(forests, pack_spec.pack_tokens, pack_spec.layout), stored_batch.counts
    )
    return split_across_ranks(batch, pack_spec, num_ranks)


def _count_entries(forests: Sequence[Forest]) -> dict[str, int]:
    found = [forest.count_by_component() for forest in forests]
    return {name: sum(each[name] for each in found) for name in LOSS_COMPONENTS}


# -- bytes ---------------------------------------------------------------------------------------------------------

_ANNOTATION_VALUES = ("advantage", "rl", "ce", "ref_kl", "ref_logprobs")


class _StoredAnnotation(msgspec.Struct, array_like=True):
    """An annotation; a value per token is float32 bytes, one for all is a number."""

    trace_index: int  # in the member's table of names
    node: int
    span: tuple[int, int] | None
    advantage: float | bytes
    rl: float | bytes
    ce: float | bytes
    ref_kl: float | bytes
    ref_logprobs: bytes | None


class _StoredGroup(msgspec.Struct, array_like=True):
    number: int
    source_name: str
    temperature: float
    rollout_ids: list[str]
    trace_ids: list[str]
    annotations: list[_StoredAnnotation]


class _StoredContent(msgspec.Struct, array_like=True):
    seq_len: int | None
    groups: list[_StoredGroup]


def _encode_group(group: BatchGroup) -> _StoredGroup:
    names: dict[str, int] = {}
    notes = [
        _StoredAnnotation(
            names.setdefault(note.trace_id, len(names)),
            note.node,
            note.span,
            *(_encode_value(getattr(note, v)) for v in _ANNOTATION_VALUES),
        )
        for note in group.annotations
    ]
    return _StoredGroup(group.group, group.env, group.temperature, list(group.rollouts), list(names), notes)


def _decode_group(stored_group: _StoredGroup) -> BatchGroup:
    notes = tuple(
        Annotation(
            stored_group.trace_ids[note.trace_index],
            note.node,
            note.span,
            *(_decode_value(getattr(note, v)) for v in _ANNOTATION_VALUES),
        )
        for note in stored_group.annotations
    )
    return BatchGroup(
        stored_group.number, stored_group.source_name, stored_group.temperature, tuple(stored_group.rollout_ids), notes
    )


def _encode_value(value: Any) -> Any:
    if value is None or isinstance(value, int | float | np.number):
        return None if value is None else float(value)
    return np.asarray(value, "<f4").tobytes()


def _decode_value(value: Any) -> Any:
    return np.frombuffer(value, "<f4") if isinstance(value, bytes) else value
