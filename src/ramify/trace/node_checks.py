"""What may become part of a node, checked before anything is added, so that nothing is added by halves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.errors import TraceInvalid, ValueRefused
from ramify.trace.columns import Float32Array, Int32Array, make_readonly
from ramify.trace.message import Media, MediaRef, Message, ModelCall, NodeRecord, VersionRun
from ramify.trace.plain_data import to_plain

ARRAY_DTYPE_KINDS = "biufcSUmM"  # dtypes that their name describes in full
_SCALAR_TYPES = (int, float, str, bool, type(None))  # plain as they are

_encode = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(NodeRecord).decode


def as_token_ids(values: npt.ArrayLike) -> Int32Array:
    """Token ids as int32; floats and ids that do not fit are refused rather than rounded.

    The sign of ids that are int32 already is left to `check_node`: most of a long prompt is known and needs no look.
    """
    found = np.asarray(values)
    if found.dtype == np.int32 and found.ndim == 1:
        return found
    if found.size == 0:
        return np.empty(0, np.int32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TraceInvalid(f"token ids must be a row of ints, found {found.dtype} of shape {found.shape}")
    if int(found.min()) < 0 or int(found.max()) >= 2**31:
        raise TraceInvalid("token ids must lie in [0, 2**31)")
    return found.astype(np.int32)


def as_logprobs(values: npt.ArrayLike) -> Float32Array:
    """Logprobs as float32; a missing one is refused rather than turned into NaN."""
    found = np.asarray(values)
    if found.dtype.kind not in "iuf":
        raise TraceInvalid(f"logprobs must be a row of floats, found {found.dtype}")
    return found.astype(np.float32, copy=False)


def check_node(
    node: int,
    parent: int,
    token_ids: Int32Array,
    sampled_span: tuple[int, int],
    content_span: tuple[int, int],
    logprobs: Float32Array,
) -> None:
    """The numbers of a node fit together."""
    if len(token_ids) and int(token_ids.min()) < 0:
        raise TraceInvalid(f"token ids must lie in [0, 2**31), node {node} has a negative one")
    if not -1 <= parent < node:
        raise TraceInvalid(f"parent {parent} of node {node} must come before it")
    for name, (start, stop) in (("sampled", sampled_span), ("content", content_span)):
        if not 0 <= start <= stop <= len(token_ids):
            raise TraceInvalid(f"{name} span [{start}, {stop}) of node {node} leaves its {len(token_ids)} tokens")
    count = sampled_span[1] - sampled_span[0]
    if logprobs.shape != (count,):
        raise TraceInvalid(f"node {node} samples {count} tokens but has logprobs {logprobs.shape}")


def check_versions(node: int, versions: Sequence[VersionRun], num_sampled: int) -> None:
    covered = sum(run.count for run in versions)
    if versions and covered != num_sampled:
        raise TraceInvalid(f"node {node} samples {num_sampled} tokens but its versions cover {covered}")
    if any(run.count < 0 for run in versions):
        raise TraceInvalid(f"a version run of node {node} has a negative count")
    for run in versions:
        check_str(run.policy, "versions.policy")


def check_media(node: int, media_refs: Sequence[MediaRef], media_table: Sequence[Media], num_tokens: int) -> None:
    before = 0
    for ref in media_refs:
        if not 0 <= ref.media < len(media_table):
            raise TraceInvalid(f"node {node} shows media {ref.media} of {len(media_table)}")
        if not before <= ref.start < ref.stop <= num_tokens:
            raise TraceInvalid(f"media [{ref.start}, {ref.stop}) of node {node} out of place")
        before = ref.stop


def check_str(value: object, key: str) -> None:
    if not isinstance(value, str):
        raise ValueRefused(f"{key}: expected str, found a {type(value).__qualname__}")
    to_plain(value, key)


def build_table(rows: Sequence[tuple[Any, ...]], dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    """Rows of a table of 32-bit ints."""
    try:
        return np.array(rows, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise TraceInvalid(f"{name}: expected ints of 32 bits, found {rows}") from error


def encode_record(message: Message, call: ModelCall | None) -> bytes:
    """The record of a node, known to be readable again."""
    if isinstance(call, ModelCall) and not _has_only_scalars(call.sampling_params):
        call = msgspec.structs.replace(call, sampling_params=to_plain(call.sampling_params, "sampling"))
    try:
        record = _encode(NodeRecord(message, call))
        decode_record(record)
    except (TypeError, ValueError, OverflowError, msgspec.ValidationError) as error:
        raise ValueRefused(f"message or call of a node cannot be encoded: {error}") from error
    return record


def _has_only_scalars(sampling_params: object) -> bool:
    """Whether the usual settings are all there is: they are plain already, and every call has them."""
    values = (
        cast(dict[object, object], sampling_params).values() if isinstance(sampling_params, dict) else [sampling_params]
    )
    return all(type(value) in _SCALAR_TYPES for value in values)


def copy_node_array(
    name: str, node: int, array: npt.NDArray[Any], num_tokens: int, num_sampled: int
) -> npt.NDArray[Any]:
    """A copy of an extra array that has one entry per token, or per sampled token, of its node."""
    check_str(name, f"arrays of node {node}")
    found = np.array(array)
    if found.dtype.kind not in ARRAY_DTYPE_KINDS:
        raise ValueRefused(f"arrays.{name} of node {node}: dtype {found.dtype} cannot be encoded")
    if found.ndim == 0 or len(found) not in (num_tokens, num_sampled):
        raise TraceInvalid(
            f"arrays.{name} of node {node}: {found.shape} is neither {num_tokens} tokens nor {num_sampled} sampled ones"
        )
    return make_readonly(found)
