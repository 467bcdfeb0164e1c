"""Batches as the ledger stores them.

A stored batch holds rollout ids and annotations; the traces are in the run already. Its forests are rebuilt from the
stored traces, identically for any number of ranks, unless they are still in memory from when the groups were scored.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import numpy as np

from ramify.core.errors import DataCorrupt
from ramify.core.files import fsync_path, mkdir_and_fsync, replace_file, write_and_fsync
from ramify.run.store.ledger import BatchRecord
from ramify.trace import AnnotatedTrace, Annotation, Forest, Trace, build_forest
from ramify.trace.annotation import TOP_DTYPE
from ramify.trace.columns import StructuredArray
from ramify.trace.forest import LOSS_COMPONENTS
from ramify.train.batch import Batch, PackSpec, count_entries, pack_forests, split_across_ranks

NormalizationType = Literal["token", "sequence", "fixed"]


@dataclass(frozen=True, slots=True)
class LossNormalization:
    """How the entries of a source are averaged; `tokens` is the length that `fixed` divides by.

    The trainer divides each component by its number of entries in the batch, so every token counts the same. Another
    mean is a factor of the weights, computed from the whole batch when it is formed: neither packing nor the number of
    ranks changes it, and a source keeps its share of the loss whatever the other sources use.
    """

    type: NormalizationType = "token"
    tokens: int = 1


TOKEN_MEAN = LossNormalization()


TOP_LOGPROBS_DIR = "top_logprobs"  # in the run directory

TopLogprobsByNode = dict[tuple[str, int], StructuredArray]  # by trace id and node: [tokens, k], as TOP_DTYPE
_CRC = struct.Struct("<I")


def write_top_logprobs(run: Path, group_number: int, top_logprobs: TopLogprobsByNode) -> None:
    """Write a teacher's likeliest tokens for a group; they are on disk when this returns, before the group is scored.

    They are not in SQLite, which would write each of k tokens with logprobs for every trained token twice.

        crc32 u32 | msgpack: [trace id, node, k, pairs of token and logprob] for each node
    """
    path = get_top_logprobs_path(run, group_number)
    mkdir_and_fsync(path.parent)
    rows = [
        (trace_id, node, top.shape[1], top.astype(TOP_DTYPE).tobytes())
        for (trace_id, node), top in top_logprobs.items()
    ]
    data = msgspec.msgpack.encode(rows)
    with replace_file(path) as partial_path:
        write_and_fsync(partial_path, _CRC.pack(zlib.crc32(data)) + data)
    fsync_path(path.parent)


def read_top_logprobs(run: Path, group_number: int) -> TopLogprobsByNode:
    """Return the likeliest tokens of a group. Raises DataCorrupt if the file is missing or damaged."""
    path = get_top_logprobs_path(run, group_number)
    try:
        data = path.read_bytes()
        (crc,) = _CRC.unpack_from(data)
        if zlib.crc32(data[_CRC.size :]) != crc:
            raise ValueError("the checksum does not match")
        rows = msgspec.msgpack.decode(data[_CRC.size :], type=list[tuple[str, int, int, bytes]])
        return {(trace, node): np.frombuffer(top, TOP_DTYPE).reshape(-1, top_k) for trace, node, top_k, top in rows}
    except (OSError, struct.error, msgspec.MsgspecError, ValueError) as error:
        raise DataCorrupt(f"{path}: the teacher's likeliest tokens cannot be read: {error}") from error


def remove_top_logprobs(run: Path, group_number: int) -> None:
    """Remove the file of a group, if it has one."""
    get_top_logprobs_path(run, group_number).unlink(missing_ok=True)


def get_top_logprobs_path(run: Path, group_number: int) -> Path:
    """Return the file of a group, which need not exist."""
    return run / TOP_LOGPROBS_DIR / f"{group_number}.bin"


ReadTraces = Callable[[str], Sequence[Trace]]  # returns the traces of a rollout, given its id
ReadTopLogprobs = Callable[[int], TopLogprobsByNode]  # returns the likeliest tokens of a group, given its number


@dataclass(frozen=True, slots=True, eq=False)
class BatchGroup:
    """A group in a batch: its rollouts in the order of the attempts, and the annotations of what is trained."""

    number: int
    source_name: str
    temperature: float
    rollout_ids: tuple[str, ...]
    annotations: tuple[Annotation, ...]
    normalization: LossNormalization = TOKEN_MEAN

    def build_forest(self, traces: Sequence[Trace], seq_len: int | None) -> Forest:
        """Build the forest of the group from its traces; traces without an annotation are left out.

        Raises DataCorrupt if an annotated trace is missing.
        """
        annotations_by_trace: dict[str, list[Annotation]] = {}
        for annotation in self.annotations:
            annotations_by_trace.setdefault(annotation.trace_id, []).append(annotation)
        if missing := sorted(annotations_by_trace.keys() - {trace.id for trace in traces}):
            raise DataCorrupt(f"group {self.number} has annotations of traces {missing}, which are not in the run")
        annotated = [
            AnnotatedTrace(trace, tuple(annotations_by_trace[trace.id]), self.temperature, self.source_name)
            for trace in traces
            if trace.id in annotations_by_trace
        ]
        return build_forest(annotated, seq_len=seq_len)


def encode_batch(step: int, scored_groups: Sequence[tuple[BatchGroup, Forest]], seq_len: int | None) -> BatchRecord:
    """Encode the batch of these groups, in this order, for the ledger; this fixes its number of entries."""
    content = _StoredBatch(seq_len, [_encode_group(group) for group, _ in scored_groups])
    numbers = tuple(group.number for group, _ in scored_groups)
    counts = count_entries([forest for _, forest in scored_groups])
    return BatchRecord(step, numbers, msgspec.msgpack.encode(content), counts)


def decode_batch(stored_batch: BatchRecord) -> tuple[list[BatchGroup], int | None]:
    """Return the groups of a batch in order, and its `seq_len`. Raises DataCorrupt."""
    try:
        content = msgspec.msgpack.decode(stored_batch.annotations, type=_StoredBatch)
        groups = [_decode_group(group) for group in content.groups]
    except (msgspec.MsgspecError, ValueError) as error:
        raise DataCorrupt(f"the annotations of batch {stored_batch.step} cannot be read: {error}") from error
    numbers = [group.number for group in groups]
    expected = list(stored_batch.group_numbers)
    if numbers != expected:
        raise DataCorrupt(f"batch {stored_batch.step} has groups {expected}, its annotations are of {numbers}")
    return groups, content.seq_len


def rebuild_forests(
    stored_batch: BatchRecord, read_traces: ReadTraces, read_top_logprobs: ReadTopLogprobs
) -> list[Forest]:
    """Rebuild the forests of a batch from the stored traces. Raises DataCorrupt if they changed.

    `read_top_logprobs` is called for groups that use the likeliest tokens of a teacher.
    """
    groups, seq_len = decode_batch(stored_batch)
    forests: list[Forest] = []
    for group in groups:
        traces = [trace for rollout_id in group.rollout_ids for trace in read_traces(rollout_id)]
        if any(annotation.top_k for annotation in group.annotations):
            group = _add_top_logprobs(group, read_top_logprobs(group.number))
        forests.append(group.build_forest(traces, seq_len))
    forests = normalize_groups(groups, forests)
    counts = count_entries(forests)
    if counts != stored_batch.counts:
        raise DataCorrupt(
            f"batch {stored_batch.step} was formed with {stored_batch.counts} entries, its traces now give {counts}"
        )
    return forests


def _add_top_logprobs(group: BatchGroup, top_logprobs: TopLogprobsByNode) -> BatchGroup:
    annotations: list[Annotation] = []
    for annotation in group.annotations:
        if annotation.top_k:
            top = top_logprobs.get((annotation.trace_id, annotation.node))
            if top is None:
                problem = f"no likeliest tokens of node {annotation.node} of trace {annotation.trace_id}"
                raise DataCorrupt(f"group {group.number} has {problem}, which its batch refers to")
            annotation = replace(annotation, ref_top=top[:, : annotation.top_k])
        annotations.append(annotation)
    return replace(group, annotations=tuple(annotations))


def normalize_groups(groups: Sequence[BatchGroup], forests: Sequence[Forest]) -> list[Forest]:
    """Return the forests of a batch, with their weights scaled by the normalization of each group's source."""
    result = list(forests)
    for source in dict.fromkeys(group.source_name for group in groups):
        indices = [index for index, group in enumerate(groups) if group.source_name == source]
        normalization = groups[indices[0]].normalization
        if normalization.type != "token":
            for index, forest in zip(indices, _normalize([forests[index] for index in indices], normalization)):
                result[index] = forest
    return result


def _normalize(forests: Sequence[Forest], normalization: LossNormalization) -> list[Forest]:
    """Return all forests of one source in a batch, with scaled weights."""
    weights: list[dict[str, np.ndarray]] = [{} for _ in forests]
    for component in LOSS_COMPONENTS:
        columns = [getattr(forest.targets, component) for forest in forests]
        rollouts = [forest.expand_call_column("trace") for forest in forests]
        # Entries of each rollout, by forest; a rollout is a trace of its group.
        lengths = [
            np.bincount(rollout[column != 0], minlength=len(forest.traces))
            for forest, column, rollout in zip(forests, columns, rollouts)
        ]
        num_entries = sum(int(length.sum()) for length in lengths)
        num_rollouts = sum(int(np.count_nonzero(length)) for length in lengths)
        for values, column, rollout, length in zip(weights, columns, rollouts, lengths):
            divisor = (
                length[rollout] if normalization.type == "sequence" else np.full(len(column), normalization.tokens)
            )
            factor = num_entries / (max(1, num_rollouts) * np.maximum(1, divisor))
            values[component] = (column * factor).astype(np.float32)
    return [replace(forest, targets=replace(forest.targets, **values)) for forest, values in zip(forests, weights)]


def split_by_rank(
    stored_batch: BatchRecord, forests: Sequence[Forest], pack_spec: PackSpec, num_ranks: int
) -> list[Batch]:
    """Return the share of each rank; together they hold the same entries for any number of ranks."""
    packs = pack_forests(forests, pack_spec.pack_tokens, pack_spec.layout)
    return split_across_ranks(Batch(stored_batch.step, packs, stored_batch.counts), pack_spec, num_ranks)


# -- encoding ------------------------------------------------------------------------------------------------------

_ANNOTATION_VALUES = ("advantage", "rl", "ce", "ref_kl", "ref_logprobs", "kl")


class _StoredAnnotation(msgspec.Struct, array_like=True):
    """An annotation. Per-token values are float32 bytes; a value for all tokens is a number."""

    trace_index: int  # into the `trace_ids` of its group
    node: int
    span: tuple[int, int] | None
    advantage: float | bytes
    rl: float | bytes
    ce: float | bytes
    ref_kl: float | bytes
    ref_logprobs: float | bytes | None
    kl: float | bytes
    top_k: int  # the likeliest tokens themselves are in a file of the group


class _StoredGroup(msgspec.Struct, array_like=True):
    number: int
    source_name: str
    temperature: float
    rollout_ids: list[str]
    trace_ids: list[str]
    annotations: list[_StoredAnnotation]
    normalization: tuple[NormalizationType, int]


class _StoredBatch(msgspec.Struct, array_like=True):
    seq_len: int | None
    groups: list[_StoredGroup]


def _encode_group(group: BatchGroup) -> _StoredGroup:
    indices: dict[str, int] = {}  # by trace id
    annotations = [
        _StoredAnnotation(
            indices.setdefault(annotation.trace_id, len(indices)),
            annotation.node,
            annotation.span,
            *(_encode_value(getattr(annotation, name)) for name in _ANNOTATION_VALUES),
            top_k=annotation.top_k,
        )
        for annotation in group.annotations
    ]
    rollout_ids = list(group.rollout_ids)
    normalization = (group.normalization.type, group.normalization.tokens)
    return _StoredGroup(
        group.number, group.source_name, group.temperature, rollout_ids, list(indices), annotations, normalization
    )


def _decode_group(stored_group: _StoredGroup) -> BatchGroup:
    annotations = tuple(
        Annotation(
            stored_group.trace_ids[stored.trace_index],
            stored.node,
            stored.span,
            *(_decode_value(getattr(stored, name)) for name in _ANNOTATION_VALUES),
            top_k=stored.top_k,
        )
        for stored in stored_group.annotations
    )
    rollout_ids = tuple(stored_group.rollout_ids)
    return BatchGroup(
        stored_group.number,
        stored_group.source_name,
        stored_group.temperature,
        rollout_ids,
        annotations,
        LossNormalization(*stored_group.normalization),
    )


def _encode_value(value: Any) -> Any:
    if value is None or isinstance(value, int | float | np.number):
        return None if value is None else float(cast(float, value))
    return np.asarray(value, "<f4").tobytes()


def _decode_value(value: Any) -> Any:
    return np.frombuffer(value, "<f4") if isinstance(value, bytes) else value
