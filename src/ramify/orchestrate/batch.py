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

Read = Callable[[str], Sequence[Trace]]  # a rollout's traces by its id


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A group in a batch: its rollouts, and what is trained of them."""

    group: int
    env: str
    temperature: float
    rollouts: tuple[str, ...]  # ids in the run's index, in the order of the attempts
    annotations: tuple[Annotation, ...]

    def grow(self, traces: Sequence[Trace], seq_len: int | None) -> Forest:
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


def decide(step: int, members: Sequence[tuple[Member, Forest]], seq_len: int | None) -> BatchRecord:
    """The batch of these groups, in this order, ready for the ledger: N_c is fixed here."""
    content = _Content(seq_len, [_member(member) for member, _ in members])
    groups = tuple(member.group for member, _ in members)
    return BatchRecord(step, groups, msgspec.msgpack.encode(content), _counts([forest for _, forest in members]))


def members_of(stored: BatchRecord) -> tuple[list[Member], int | None]:
    """The groups of a batch in their order, and the longest path that is trained. Raises BatchCorrupt."""
    try:
        content = msgspec.msgpack.decode(stored.annotations, type=_Content)
        members = [_read_member(member) for member in content.members]
    except (msgspec.MsgspecError, ValueError) as error:
        raise BatchCorrupt(f"the annotations of batch {stored.step} cannot be read: {error}") from error
    found = tuple(member.group for member in members)
    if found != stored.group_numbers:
        raise BatchCorrupt(
            f"batch {stored.step} has groups {list(stored.group_numbers)}, its annotations are of {list(found)}"
        )
    return members, content.seq_len


def rebuild(stored: BatchRecord, read: Read, laying: PackSpec, *, flat: bool = False) -> Batch:
    """The batch as it is trained, its forest grown from the stored traces; raises BatchCorrupt as `regrow` does."""
    forests = regrow(stored, read)
    return Batch(stored.step, pack_forests(forests, laying.pack_tokens, laying.layout, flat=flat), stored.counts)


def regrow(stored: BatchRecord, read: Read) -> list[Forest]:
    """The forests of a batch, from the stored traces. Raises BatchCorrupt where they are not what was decided."""
    members, seq_len = members_of(stored)
    forests: list[Forest] = []
    for member in members:
        traces = [trace for rollout in member.rollouts for trace in read(rollout)]
        forests.append(member.grow(traces, seq_len))
    counts = _counts(forests)
    if counts != stored.counts:
        raise BatchCorrupt(f"batch {stored.step} was cut with {stored.counts} entries, its traces now give {counts}")
    return forests


def share_out(stored: BatchRecord, forests: Sequence[Forest], laying: PackSpec, ranks: int) -> list[Batch]:
    """What each of `ranks` ranks is given: the same batch however many there are."""
    batch = Batch(stored.step, pack_forests(forests, laying.pack_tokens, laying.layout), stored.counts)
    return split_across_ranks(batch, laying, ranks)


def _counts(forests: Sequence[Forest]) -> dict[str, int]:
    found = [forest.count_by_component() for forest in forests]
    return {name: sum(each[name] for each in found) for name in LOSS_COMPONENTS}


# -- bytes ---------------------------------------------------------------------------------------------------------

_VALUES = ("advantage", "rl", "ce", "ref_kl", "reference")


class _Note(msgspec.Struct, array_like=True):
    """An annotation; a value per token is float32 bytes, one for all is a number."""

    trace: int  # in the member's table of names
    node: int
    span: tuple[int, int] | None
    advantage: float | bytes
    rl: float | bytes
    ce: float | bytes
    ref_kl: float | bytes
    reference: bytes | None


class _Member(msgspec.Struct, array_like=True):
    group: int
    env: str
    temperature: float
    rollouts: list[str]
    traces: list[str]
    notes: list[_Note]


class _Content(msgspec.Struct, array_like=True):
    seq_len: int | None
    members: list[_Member]


def _member(member: Member) -> _Member:
    names: dict[str, int] = {}
    notes = [
        _Note(
            names.setdefault(note.trace_id, len(names)),
            note.node,
            note.span,
            *(_packed(getattr(note, v)) for v in _VALUES),
        )
        for note in member.annotations
    ]
    return _Member(member.group, member.env, member.temperature, list(member.rollouts), list(names), notes)


def _read_member(member: _Member) -> Member:
    notes = tuple(
        Annotation(member.traces[note.trace], note.node, note.span, *(_unpacked(getattr(note, v)) for v in _VALUES))
        for note in member.notes
    )
    return Member(member.group, member.env, member.temperature, tuple(member.rollouts), notes)


def _packed(value: Any) -> Any:
    if value is None or isinstance(value, int | float | np.number):
        return None if value is None else float(value)
    return np.asarray(value, "<f4").tobytes()


def _unpacked(value: Any) -> Any:
    return np.frombuffer(value, "<f4") if isinstance(value, bytes) else value
