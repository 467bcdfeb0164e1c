"""Checks the parts of a node before any of them is added, so that a node is never added partially."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.core.errors import OperationInvalid
from ramify.trace.columns import Float32Array, Int32Array, make_readonly
from ramify.trace.message import Media, MediaRef, Message, ModelCall, NodeRecord, VersionSpan
from ramify.trace.plain_data import to_plain

ARRAY_DTYPE_KINDS = "biufcSUmM"  # numpy dtype kinds that are fully described by their string
_SCALAR_TYPES = (int, float, str, bool, type(None))  # need no conversion

_encode = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(NodeRecord).decode


def as_token_ids(values: npt.ArrayLike) -> Int32Array:
    """Return token ids as int32. Raises OperationInvalid for floats and for ids that do not fit.

    The sign of ids that are already int32 is checked by `check_node`, because most of a long prompt is known already.
    """
    array = np.asarray(values)
    if array.dtype == np.int32 and array.ndim == 1:
        return array
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise OperationInvalid(f"token ids: expected a 1-D array of ints, found {array.dtype} of shape {array.shape}")
    if int(array.min()) < 0 or int(array.max()) >= 2**31:
        raise OperationInvalid("token ids: expected ids in [0, 2**31)")
    return array.astype(np.int32)


def as_logprobs(values: npt.ArrayLike) -> Float32Array:
    """Return logprobs as float32. Raises OperationInvalid for None, which numpy would turn into NaN."""
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        raise OperationInvalid(f"logprobs: expected floats, found {array.dtype}")
    return array.astype(np.float32, copy=False)


def check_node(
    node: int,
    parent: int,
    token_ids: Int32Array,
    sampled_span: tuple[int, int],
    content_span: tuple[int, int],
    logprobs: Float32Array,
) -> None:
    """Raise OperationInvalid if the tokens, spans and logprobs of a node do not fit together."""
    if len(token_ids) and np.minimum.reduce(token_ids) < 0:
        raise OperationInvalid(f"token ids of node {node}: expected ids in [0, 2**31), found a negative one")
    if not -1 <= parent < node:
        raise OperationInvalid(f"parent {parent} of node {node}: expected an earlier node or -1")
    for name, (start, stop) in (("sampled", sampled_span), ("content", content_span)):
        if not 0 <= start <= stop <= len(token_ids):
            raise OperationInvalid(f"{name} span [{start}, {stop}) of node {node} exceeds its {len(token_ids)} tokens")
    num_sampled = sampled_span[1] - sampled_span[0]
    if logprobs.shape != (num_sampled,):
        raise OperationInvalid(f"node {node} has {num_sampled} sampled tokens but logprobs of shape {logprobs.shape}")


def check_versions(node: int, versions: Sequence[VersionSpan], num_sampled: int) -> None:
    """Raise if the version spans, where there are any, do not cover the sampled tokens."""
    covered = sum(run.count for run in versions)
    if versions and covered != num_sampled:
        raise OperationInvalid(f"node {node} has {num_sampled} sampled tokens but its versions cover {covered}")
    if any(run.count < 0 for run in versions):
        raise OperationInvalid(f"a version run of node {node} has a negative count")
    for run in versions:
        check_str(run.policy, "versions.policy")


def check_media(node: int, media_refs: Sequence[MediaRef], media_table: Sequence[Media], num_tokens: int) -> None:
    """Raise OperationInvalid if a reference is not to an entry of the table, or out of order or range."""
    previous_stop = 0
    for ref in media_refs:
        if not 0 <= ref.media < len(media_table):
            raise OperationInvalid(f"node {node} refers to media {ref.media} of a table of {len(media_table)}")
        if not previous_stop <= ref.start < ref.stop <= num_tokens:
            raise OperationInvalid(f"media [{ref.start}, {ref.stop}) of node {node} is out of order or range")
        previous_stop = ref.stop


def check_str(value: object, key: str) -> None:
    """Raise OperationInvalid unless the value is a str of valid Unicode."""
    if not isinstance(value, str):
        raise OperationInvalid(f"{key}: expected str, found a {type(value).__qualname__}")
    to_plain(value, key)


def build_table(rows: Sequence[tuple[Any, ...]], dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    """Return the rows as a table of 32-bit ints. Raises OperationInvalid if they do not fit."""
    try:
        return np.array(rows, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise OperationInvalid(f"{name}: expected 32-bit ints, found {rows}") from error


def encode_record(message: Message, call: ModelCall | None) -> bytes:
    """Encode the record of a node, and check that it can be decoded again."""
    if isinstance(call, ModelCall) and not _has_only_scalars(call.sampling_params):
        call = msgspec.structs.replace(call, sampling_params=to_plain(call.sampling_params, "sampling"))
    try:
        record = _encode(NodeRecord(message, call))
        decode_record(record)
    except (TypeError, ValueError, OverflowError, msgspec.ValidationError) as error:
        raise OperationInvalid(f"the message or call of a node cannot be encoded: {error}") from error
    return record


def _has_only_scalars(sampling_params: object) -> bool:
    """Whether the parameters need no conversion; this is the usual case, which has to be fast."""
    is_dict = isinstance(sampling_params, dict)
    values = cast(dict[object, object], sampling_params).values() if is_dict else [sampling_params]
    return all(type(value) in _SCALAR_TYPES for value in values)


def copy_node_array(
    name: str, node: int, array: npt.NDArray[Any], num_tokens: int, num_sampled: int
) -> npt.NDArray[Any]:
    """Return a read-only copy of an extra array, which must have one entry per token or per sampled token."""
    check_str(name, f"arrays of node {node}")
    copy = np.array(array)
    if copy.dtype.kind not in ARRAY_DTYPE_KINDS:
        raise OperationInvalid(f"arrays.{name} of node {node}: dtype {copy.dtype} cannot be encoded")
    if copy.ndim == 0 or len(copy) not in (num_tokens, num_sampled):
        raise OperationInvalid(
            f"arrays.{name} of node {node}: expected {num_tokens} or {num_sampled} entries (tokens or sampled tokens), "
            f"found shape {copy.shape}"
        )
    return make_readonly(copy)
