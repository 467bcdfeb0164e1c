"""The binary form: lossless round trips, views without copies, and errors for damaged bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import DataCorrupt, Failure, OperationInvalid
from ramify.trace import (
    TRACE_SCHEMA,
    Episode,
    MediaRef,
    Message,
    ModelCall,
    Trace,
    TraceBuilder,
    VersionSpan,
    decode_episode,
    decode_trace,
    encode_episode,
    encode_trace,
    to_json,
)
from tests.support import trace_frames as frames
from tests.support import trace_oracle as oracle
from tests.support.trace_scripts import IMAGES, Script, decorate, replay, scripts

RANDOM = st.randoms(use_true_random=False)
GOLDEN = Path(__file__).parent / "golden"


def small_trace() -> Trace:
    """Every column, table and header field in as few bytes as they take."""
    trace = Trace(id="t", group="g", info={"a": 1}, rewards={"r": (1.0, 0.5), "due": None})
    image = trace.add_media(IMAGES[0])
    trace.graph.add_node(-1, Message("u", "é"), [7, 0, 9], content_span=(1, 3), media=[MediaRef(0, image, 1, 2)])
    versions = [VersionSpan("p", 0, 1, 1), VersionSpan("q", 0, 2, 1)]
    for name in ("c", "d"):
        trace.graph.add_node(
            0,
            Message("a", "yo"),
            [3, 4, 5],
            sampled_span=(1, 3),
            logprobs=[-0.5, -1.5],
            versions=versions,
            arrays={"x": np.arange(4, dtype=np.int16).reshape(2, 2)},
            call=ModelCall(name),
        )
    return trace


def read_or_refuse(data: bytes) -> None:
    """Whatever the bytes say, the only complaint is DataCorrupt, at once or when the broken part is looked at."""
    try:
        trace = decode_trace(data)
        oracle.look_at_everything(trace)
        to_json(trace)
        TraceBuilder(trace)
        encode_trace(trace)
    except DataCorrupt:
        return


@pytest.mark.promise
@given(scripts(), RANDOM)
def test_round_trip_preserves_the_trace(script: Script, rng: random.Random):
    trace, nodes = replay(script)
    decorate(trace, rng)
    data = encode_trace(trace)
    again = decode_trace(data)
    assert oracle.content(again) == oracle.content(trace)
    assert encode_trace(again) == data
    assert list(again.graph.runs()) == list(trace.graph.runs())
    oracle.assert_records_script(again, nodes, script)


@given(scripts(max_turns=4), st.integers(0, 17), st.sampled_from([bytes, bytearray, memoryview]))
def test_decode_accepts_any_buffer_type_and_alignment(script: Script, offset: int, kind: type):
    trace, _ = replay(script)
    data = encode_trace(trace)
    inside = bytes(offset) + data + b"behind"
    buffer = memoryview(bytearray(inside))[offset : offset + len(data)] if kind is memoryview else kind(data)
    again = decode_trace(buffer)
    assert oracle.content(again) == oracle.content(trace)
    assert encode_trace(again) == data


@given(scripts(max_turns=4))
def test_decoded_arrays_are_read_only_views_of_the_bytes(script: Script):
    buffer = bytearray(encode_trace(replay(script)[0]))
    memory = np.frombuffer(buffer, np.uint8)
    trace = decode_trace(buffer)
    for node in trace.nodes:
        for array in (node.token_ids, node.logprobs, *node.arrays.values()):
            assert not array.flags.writeable
            assert not array.size or np.shares_memory(array, memory)
    for branch in trace.branches:
        if len(list(trace.graph.path_slices(branch.leaf))) == 1 and len(branch):
            assert np.shares_memory(branch.token_ids, memory)


@given(scripts(min_turns=2), st.data())
def test_decoded_trace_can_be_extended_like_the_original(script: Script, data: st.DataObject):
    split = data.draw(st.integers(0, len(script.turns)))
    first, remaining = Script(script.turns[:split]), Script(script.turns[split:])
    received = bytearray(encode_trace(replay(first)[0]))
    decoded_first = bytes(received)
    trace, _ = replay(remaining, decode_trace(received))
    assert encode_trace(trace) == encode_trace(replay(script)[0])
    assert received == decoded_first


def test_empty_traces_and_columns_round_trip():
    assert encode_trace(decode_trace(encode_trace(Trace(id="t")))) == encode_trace(Trace(id="t"))
    trace = Trace(id="")
    trace.graph.add_node(-1, Message(""), arrays={"none": np.zeros((0, 3))})
    assert decode_trace(encode_trace(trace)).nodes[0].arrays["none"].shape == (0, 3)


@pytest.mark.parametrize("dtype", ["?", "i1", "<u2", ">i4", "<f2", ">f8", "<c8", "<U3", "S2", "<M8[s]"])
def test_arrays_of_every_plain_dtype_round_trip(dtype: str):
    array = np.array([0, 1, 1]).astype(dtype)
    trace = Trace(id="t")
    trace.graph.add_node(-1, Message("u"), [1, 2, 3], arrays={"x": array, "strided": np.repeat(array, 2)[::2]})
    again = decode_trace(encode_trace(trace)).nodes[0].arrays
    for name in ("x", "strided"):
        assert again[name].tolist() == array.tolist()
        assert again[name].dtype.newbyteorder("=") == array.dtype.newbyteorder("=")


def test_failures_and_timing_round_trip():
    trace = Trace(id="t", errors=[Failure.from_exception(OperationInvalid("broken"))])
    trace.timing.scoring = 1.5
    again = decode_trace(encode_trace(trace))
    assert (again.errors, again.timing) == (trace.errors, trace.timing)
    assert isinstance(again.errors[0].to_exception(), OperationInvalid)


def test_logprobs_round_trip_bit_exactly():
    odd = np.array([0x7FC00001, 0x80000000, 0xFF800000, 0x00000001], np.uint32).view(np.float32)[1:]
    trace = Trace(id="t")
    trace.graph.add_node(-1, Message("a"), [1, 2, 3], sampled_span=(0, 3), logprobs=odd)
    assert decode_trace(encode_trace(trace)).nodes[0].logprobs.tobytes() == odd.tobytes()


# -- damage --------------------------------------------------------------------------------------------------------


def test_every_flipped_bit_raises():
    data = encode_trace(small_trace())
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataCorrupt):
            decode_trace(damaged)


def test_every_truncation_raises():
    data = encode_trace(small_trace())
    for length in range(len(data)):
        with pytest.raises(DataCorrupt):
            decode_trace(data[:length])


@pytest.mark.parametrize("more", [b"\0", bytes(8), bytes(4096), b"RMFY"])
def test_appended_bytes_raise(more: bytes):
    data = encode_trace(small_trace())
    for wrong in (data + more, more + data):
        with pytest.raises(DataCorrupt):
            decode_trace(wrong)


@given(st.binary(max_size=200))
def test_foreign_bytes_raise(data: bytes):
    for wrong in (data, b"RMFY" + data):
        with pytest.raises(DataCorrupt):
            decode_trace(wrong)


@pytest.mark.parametrize("schema", [0, TRACE_SCHEMA + 1, 65535])
def test_another_schema_is_refused(schema: int):
    frame = frames.take_apart(encode_trace(small_trace()))
    frame.schema = schema
    with pytest.raises(DataCorrupt, match=str(schema)):
        decode_trace(frame.sealed())


# -- nonsense with a right checksum -------------------------------------------------------------------------------


VALUES = {0, 0x7F, 0xFF} if os.environ.get("RAMIFY_FULL") else {0, 0xFF}


def test_any_single_changed_byte_raises_or_decodes():
    """Every byte set to a few values, the checksum made right: refused, or readable to the last node."""
    data = encode_trace(small_trace())
    for index in range(4, len(data)):
        for value in VALUES - {data[index]}:
            if frames.PREFIX.size - 4 <= index < frames.PREFIX.size or index in (4, 5):
                continue  # the checksum itself; the schema
            read_or_refuse(frames.reseal(data[:index] + bytes([value]) + data[index + 1 :]))


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


NODE_NONSENSE = {
    "a parent after its child": ("nodes", 1, "parent", 1),
    "a parent below -1": ("nodes", 0, "parent", -2),
    "a parent far away": ("nodes", 2, "parent", 2**31 - 1),
    "tokens that run backwards": ("nodes", 1, "stop", 2),
    "tokens that end early": ("nodes", 2, "stop", 8),
    "logprobs that run backwards": ("nodes", 1, "logprobs_stop", -2),
    "logprobs of an unsampled node": ("nodes", 0, "logprobs_stop", 1),
    "records that run backwards": ("nodes", 1, "record_stop", 0),
    "records that overflow": ("nodes", 1, "record_stop", -(2**31)),
    "a sampled span that leaves its node": ("nodes", 1, "sampled_stop", 4),
    "a sampled span that runs backwards": ("nodes", 1, "sampled_start", 3),
    "a content span that leaves its node": ("nodes", 0, "content_stop", 4),
    "a content span before its node": ("nodes", 0, "content_start", -1),
    "trainable is neither yes nor no": ("nodes", 0, "trainable", 2),
    "a version of no node": ("versions", 0, "node", 9),
    "a version of a node before the first": ("versions", 0, "node", -1),
    "versions out of order": ("versions", 0, "node", 2),
    "a version of no policy": ("versions", 0, "policy", 2),
    "a version of a policy before the first": ("versions", 0, "policy", -1),
    "versions that cover too much": ("versions", 0, "count", 2),
    "versions that count backwards": ("versions", 0, "count", -1),
    "media of no node": ("media_refs", 0, "node", 3),
    "media out of the table": ("media_refs", 0, "media", 1),
    "media before the table": ("media_refs", 0, "media", -1),
    "media that leaves its node": ("media_refs", 0, "stop", 4),
    "media before its node": ("media_refs", 0, "start", -1),
    "media that runs backwards": ("media_refs", 0, "start", 2),
}


@pytest.mark.parametrize("change", NODE_NONSENSE.values(), ids=NODE_NONSENSE.keys())
def test_inconsistent_tables_raise(change: tuple[str, int, str, int]):
    frame = frames.take_apart(encode_trace(small_trace())).row(*change)
    with pytest.raises(DataCorrupt):
        decode_trace(frame.sealed())


def test_negative_token_ids_raise():
    frame = frames.take_apart(encode_trace(small_trace()))
    frame.columns["tokens"].view("<i4")[1] = -5
    with pytest.raises(DataCorrupt):
        decode_trace(frame.sealed())


def test_invalid_record_raises_when_it_is_read():
    frame = frames.take_apart(encode_trace(small_trace()))
    frame.columns["records"][:] = 0xC1
    with pytest.raises(DataCorrupt):
        oracle.look_at_everything(decode_trace(frame.sealed()))


HEAD_NONSENSE: dict[str, Callable[[dict], object]] = {
    "no trace": lambda head: head.pop("trace"),
    "another trace than its header": lambda head: head.update(trace="u"),
    "another attempt than its header": lambda head: head.update(attempt=4),
    "no header": lambda head: head.pop("header"),
    "a header without id": lambda head: head["header"].pop("id"),
    "a header that is a list": lambda head: head.update(header=[1]),
    "too few lengths": lambda head: head.update(until=head["until"][:4]),
    "lengths of text": lambda head: head.update(until=["x"] * 8),
    "a negative length": lambda head: head["until"].__setitem__(0, -1),
    "a huge length": lambda head: head["until"].__setitem__(1, 2**62),
    "a length of more policies": lambda head: head["until"].__setitem__(6, 3),
    "a length of more media": lambda head: head["until"].__setitem__(7, 3),
    "a policy too few": lambda head: head["policies"].pop(),
    "an unknown key": lambda head: head.update(colour="red"),
    "an unknown key of the header": lambda head: head["header"].update(colour="red"),
    "an unknown key of the media": lambda head: head["media"][0].update(colour="red"),
    "a media hash that is a path": lambda head: head["media"][0].update(hash="../../x"),
    "a media hash of other data": lambda head: head["media"][0].update(data=b"other"),
    "too many lengths": lambda head: head["until"].append(0),
    "a policy too many": lambda head: head["policies"].append("r"),
    "a policy that is a number": lambda head: head["policies"].__setitem__(0, 3),
    "media too few": lambda head: head.update(media=[]),
    "an array of no node": lambda head: head["arrays"][0].__setitem__(0, 3),
    "an array of a node before the first": lambda head: head["arrays"][0].__setitem__(0, -1),
    "an array twice": lambda head: head["arrays"].__setitem__(1, head["arrays"][0]),
    "an array of objects": lambda head: head["arrays"][0].__setitem__(2, "O"),
    "an array of no dtype": lambda head: head["arrays"][0].__setitem__(2, "nonsense"),
    "an array of half a dtype": lambda head: head["arrays"][0].__setitem__(2, "i4,("),
    "an array of records": lambda head: head["arrays"][0].__setitem__(2, "V2"),
    "an array of rows": lambda head: head["arrays"][0].__setitem__(2, "(2,2)i2"),
    "an array of another length": lambda head: head["arrays"][0].__setitem__(3, [4, 1]),
    "an array of no axis": lambda head: head["arrays"][0].__setitem__(3, []),
    "an array of negative length": lambda head: head["arrays"][0].__setitem__(3, [-2, -2]),
    "an array of a length that overflows": lambda head: head["arrays"][0].__setitem__(3, [2**33, 2**33]),
    "an array of a length beyond 64 bits": lambda head: head["arrays"][0].__setitem__(3, [2**63, 2]),
    "an array of too many axes": lambda head: head["arrays"][0].__setitem__(3, [2, 2] + [1] * 80),
    "a reward that is not a number": lambda head: head["header"]["rewards"].update(r=[float("nan"), 1.0]),
    "a reward that is text": lambda head: head["header"]["rewards"].update(r="x"),
    "a metric that is not a number": lambda head: head["header"].update(metrics={"m": float("inf")}),
    "info with bytes": lambda head: head["header"].update(info={"b": b"bytes"}),
    "info with numbers for keys": lambda head: head["header"].update(info={"b": {1: 2}}),
    "info with a time": lambda head: head["header"].update(info={"t": msgspec.msgpack.Ext(-1, bytes(4))}),
    "info with an unknown type": lambda head: head["header"].update(info={"t": msgspec.msgpack.Ext(5, b"")}),
}


@pytest.mark.parametrize("change", HEAD_NONSENSE.values(), ids=HEAD_NONSENSE.keys())
def test_inconsistent_frame_headers_raise(change: Callable[[dict], object]):
    frame = frames.take_apart(encode_trace(small_trace()))
    change(frame.head)
    with pytest.raises(DataCorrupt):
        decode_trace(frame.sealed())


def test_deeply_nested_frame_header_raises():
    head = msgspec.msgpack.encode({"trace": "t", "header": {"id": "t", "info": {"deep": 0}}})
    assert head[-1] == 0
    for depth in (1_000, 100_000):
        with pytest.raises(DataCorrupt):
            decode_trace(frames.seal(head[:-1] + b"\x91" * depth + b"\x00", []))


def test_values_of_maximum_depth_round_trip():
    trace = Trace(id="t", info={"deep": nested(50)})
    assert decode_trace(encode_trace(trace)).info == trace.info


# -- episodes ------------------------------------------------------------------------------------------------------


def episode_of(*scripts: Script) -> Episode:
    return Episode(tuple(replay(s, Trace(id=f"t{i}", episode="e", agent=str(i)))[0] for i, s in enumerate(scripts)))


@given(scripts(max_turns=3), scripts(max_turns=3))
def test_episode_round_trip_preserves_its_traces(one: Script, two: Script):
    episode = episode_of(one, two)
    data = encode_episode(episode)
    again = decode_episode(data)
    assert [oracle.content(trace) for trace in again.traces] == [oracle.content(trace) for trace in episode.traces]
    assert encode_episode(again) == data
    memory = np.frombuffer(data, np.uint8)
    assert all(
        np.shares_memory(node.token_ids, memory)
        for trace in again.traces
        for node in trace.nodes
        if len(node.token_ids)
    )


@pytest.mark.parametrize(
    "other",
    [{"attempt": 2}, {"group": "h"}, {"episode": "f"}, {"agent": "a"}],
    ids=lambda other: next(iter(other)),
)
def test_episode_requires_one_attempt_and_different_agents(other: dict[str, Any]):
    def trace(**fields: Any) -> Trace:
        return Trace(**{"id": "t", "episode": "e", "group": "g", "attempt": 1, **fields})

    Episode((trace(agent="a"), trace(agent="b")))
    with pytest.raises(OperationInvalid):
        Episode((trace(agent="a"), trace(**{"agent": "b", **other})))


def test_damaged_episodes_raise():
    trace = small_trace()
    data = encode_episode(Episode((trace,)))
    for decode, other in ((decode_trace, data), (decode_episode, encode_trace(trace))):
        with pytest.raises(DataCorrupt):
            decode(other)
    for bit in range(0, 8 * len(data), 3):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataCorrupt):
            decode_episode(damaged)
    for length in range(len(data)):
        with pytest.raises(DataCorrupt):
            decode_episode(data[:length])
    with pytest.raises(DataCorrupt):
        decode_episode(data + b"\0")


@pytest.mark.parametrize("lengths", [[-8], [2**40], [8, 8], [], "x", [0.5], [None]])
def test_inconsistent_episodes_raise(lengths: object):
    with pytest.raises(DataCorrupt):
        decode_episode(frames.seal(msgspec.msgpack.encode(lengths), [encode_trace(small_trace())], kind=1))


def test_encoded_episode_of_unrelated_traces_raises():
    parts = [encode_trace(Trace(id="1", attempt=1)), encode_trace(Trace(id="2", attempt=2))]
    with pytest.raises(DataCorrupt):
        decode_episode(frames.seal(msgspec.msgpack.encode([len(part) for part in parts]), parts, kind=1))


# -- the stored format ---------------------------------------------------------------------------------------------


def test_golden_trace_and_episode_are_decoded_and_encoded_alike():
    """The files hold every kind of node; they are written anew only together with TRACE_SCHEMA."""
    data, episode_data = (GOLDEN / "v1.trace").read_bytes(), (GOLDEN / "v1.episode").read_bytes()
    trace, episode = decode_trace(data), decode_episode(episode_data)
    assert to_json(trace, indent=2) + "\n" == (GOLDEN / "v1.json").read_text(encoding="utf-8")
    assert trace.nodes[2].logprobs.tolist() == [-0.5, -1.25, -0.0078125]
    assert trace.nodes[3].arrays["experts"].tolist() == [[1, 2], [3, 4]]
    assert [trace.agent for trace in episode.traces] == ["solver", "critic"]
    assert oracle.content(episode.traces[0]) == oracle.content(trace)
    assert (encode_trace(trace), encode_episode(episode)) == (data, episode_data)
