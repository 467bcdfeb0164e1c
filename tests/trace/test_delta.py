"""Deltas: in order they give the trace; lost, repeated, reordered or foreign ones raise and change nothing."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import DataCorrupt, OperationInvalid, RamifyError
from ramify.trace import Message, Trace, TraceBuilder, TraceDeltaDecoder, TraceDeltaEncoder, decode_trace, encode_trace
from tests.support import trace_frames as frames
from tests.support import trace_oracle as oracle
from tests.support.trace_scripts import IMAGES, Script, big_script, decorate, scripts

RANDOM = st.randoms(use_true_random=False)


def growth(script: Script, rng: random.Random, trace: Trace) -> Iterator[None]:
    """Record the script in `trace`, stopping at random points, with header changes, media and silence between."""
    builder = TraceBuilder(trace)
    yield
    for turn in script.turns:
        builder.add_turn(turn)
        if rng.random() < 0.3:
            decorate(trace, rng)
        if rng.random() < 0.6:
            yield
        if rng.random() < 0.15:
            decorate(trace, rng)
            yield
        if rng.random() < 0.1:
            trace.add_media(rng.choice(IMAGES))
            yield
        if rng.random() < 0.1:
            yield
    yield


def sent(script: Script, rng: random.Random, trace: Trace | None = None) -> tuple[Trace, list[bytes]]:
    """The grown trace and the deltas that were sent on the way."""
    trace = Trace(id="t") if trace is None else trace
    writer = TraceDeltaEncoder(trace)
    deltas = [writer.next_delta() for _ in growth(script, rng, trace)]
    return trace, [delta for delta in deltas if delta is not None]


def received(deltas: list[bytes]) -> TraceDeltaDecoder:
    reader = TraceDeltaDecoder()
    for delta in deltas:
        reader.apply(delta)
    return reader


def state(reader: TraceDeltaDecoder) -> bytes | None:
    try:
        return encode_trace(reader.trace)
    except OperationInvalid:  # nothing has arrived
        return None


def refused(reader: TraceDeltaDecoder, delta: bytes | bytearray, *errors: type[RamifyError]) -> None:
    """The delta is refused by name and the reader is as it was."""
    before = state(reader)
    with pytest.raises(errors):
        reader.apply(delta)
    assert state(reader) == before


@pytest.mark.promise
@given(scripts(max_turns=6), RANDOM)
def test_decoder_equals_the_trace_after_every_delta(script: Script, rng: random.Random):
    trace, reader = Trace(id="t"), TraceDeltaDecoder()
    writer = TraceDeltaEncoder(trace)
    for _ in growth(script, rng, trace):
        before = encode_trace(trace)
        delta = writer.next_delta()
        if delta is not None:
            reader.apply(memoryview(delta))
        assert encode_trace(reader.trace) == before == encode_trace(trace)
        assert writer.next_delta() is None


@given(scripts(min_turns=3, max_turns=6), RANDOM)
def test_reordered_delta_raises_and_the_right_order_still_works(script: Script, rng: random.Random):
    trace, deltas = sent(script, rng)
    arrivals = [rng.randint(0, len(deltas) - 1) for _ in range(len(deltas))]
    reader, expected = TraceDeltaDecoder(), 0
    for number in arrivals:
        if number == expected:
            reader.apply(deltas[number])
            expected += 1
        else:
            refused(reader, deltas[number], DataCorrupt)
    for delta in deltas[expected:]:
        reader.apply(delta)
    assert encode_trace(reader.trace) == encode_trace(trace)


@given(scripts(max_turns=4), scripts(max_turns=4), RANDOM)
def test_later_attempt_replaces_the_earlier_one(one: Script, two: Script, rng: random.Random):
    _, old = sent(one, rng, Trace(id="t", attempt=1))
    trace, new = sent(two, rng, Trace(id="t", attempt=2))
    seen = rng.randint(1, len(old))
    reader = received(old[:seen])
    for later in new[1:]:
        refused(reader, later, DataCorrupt)
    for delta in new:
        reader.apply(delta)
        refused(reader, rng.choice(old), DataCorrupt)
    assert encode_trace(reader.trace) == encode_trace(trace)


@given(scripts(max_turns=4), RANDOM)
def test_delta_of_another_trace_raises(script: Script, rng: random.Random):
    trace, deltas = sent(script, rng)
    _, foreign = sent(script, rng, Trace(id="other"))
    reader = received(deltas)
    for delta in foreign:
        refused(reader, delta, OperationInvalid)
    assert encode_trace(reader.trace) == encode_trace(trace)


@given(scripts(max_turns=3), RANDOM)
def test_damaged_delta_raises(script: Script, rng: random.Random):
    trace, deltas = sent(script, rng)
    reader = TraceDeltaDecoder()
    for delta in deltas:
        for _ in range(4):
            damaged = bytearray(delta)
            damaged[rng.randint(0, len(delta) - 1)] ^= 1 << rng.randint(0, 7)
            refused(reader, damaged, DataCorrupt)
        refused(reader, delta[: rng.randint(0, len(delta) - 1)], DataCorrupt)
        refused(reader, delta + b"\0", DataCorrupt)
        reader.apply(delta)
    assert encode_trace(reader.trace) == encode_trace(trace)


@given(scripts(max_turns=4), RANDOM)
def test_invalid_delta_raises_and_leaves_the_trace_unchanged(script: Script, rng: random.Random):
    """With a right checksum: refused and without effect, or readable; never anything but a named error."""
    _, deltas = sent(script, rng)
    reader = TraceDeltaDecoder()
    for delta in deltas:
        nonsense = bytearray(delta)
        for _ in range(rng.randint(1, 3)):
            nonsense[rng.randint(frames.PREFIX.size, len(delta) - 1)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        before = state(reader)
        try:
            reader.apply(frames.reseal(bytes(nonsense)))
        except (DataCorrupt, OperationInvalid):
            assert state(reader) == before
            reader.apply(delta)
        else:
            with contextlib.suppress(DataCorrupt):  # a message that cannot be decoded
                oracle.look_at_everything(reader.trace)
            return


def test_delta_with_invalid_header_raises_when_applied():
    trace = Trace(id="t", rewards={"r": (1.0, 1.0)})
    delta = TraceDeltaEncoder(trace).next_delta()
    assert delta is not None
    frame = frames.take_apart(delta)
    frame.head["header"]["rewards"]["r"] = [float("nan"), 1.0]
    reader = TraceDeltaDecoder()
    refused(reader, frame.sealed(), DataCorrupt)
    reader.apply(delta)
    assert encode_trace(reader.trace) == encode_trace(trace)


def test_delta_with_other_column_lengths_raises():
    """Two writers of one trace count alike and cut elsewhere: their deltas do not mix."""
    trace = Trace(id="t")
    early, late = TraceDeltaEncoder(trace), TraceDeltaEncoder(trace)
    first = early.next_delta() or b""
    trace.graph.add_node(-1, Message("user"), [1])
    other_first = late.next_delta() or b""
    trace.graph.add_node(0, Message("user"), [2])
    second, other_second = early.next_delta() or b"", late.next_delta() or b""
    for own, foreign in (((first, second), other_second), ((other_first, other_second), second)):
        reader = received([own[0]])
        refused(reader, foreign, DataCorrupt)
        reader.apply(own[1])
        assert encode_trace(reader.trace) == encode_trace(trace)


def test_delta_holds_only_what_is_new():
    trace = Trace(id="t")
    writer = TraceDeltaEncoder(trace)
    trace.graph.add_node(-1, Message("user", "x" * 1000), list(range(1000)))
    trace.add_media(IMAGES[0])
    assert len(writer.next_delta() or b"") > 5000
    trace.graph.add_node(0, Message("user", "y"), [5])
    assert len(writer.next_delta() or b"") < 250


def test_delta_is_no_complete_trace_but_a_complete_trace_is_a_first_delta():
    trace = Trace(id="t")
    writer = TraceDeltaEncoder(trace)
    writer.next_delta()
    trace.graph.add_node(-1, Message("user"), [1])
    delta = writer.next_delta()
    assert delta is not None
    with pytest.raises(DataCorrupt):
        decode_trace(delta)
    assert encode_trace(received([encode_trace(trace)]).trace) == encode_trace(trace)


def test_invalid_value_raises_by_name_and_the_encoder_continues():
    """A list inside `info` is an ordinary list; what was put into it afterwards is found when it is sent."""
    trace = Trace(id="t", info={"log": [1]})
    writer = TraceDeltaEncoder(trace)
    reader = received([writer.next_delta() or b""])
    trace.info["log"].append(object())
    for send in (writer.next_delta, lambda: encode_trace(trace)):
        with pytest.raises(RamifyError):
            send()
    trace.info["log"].pop()
    trace.info["log"].append(2)
    reader.apply(writer.next_delta() or b"")
    assert encode_trace(reader.trace) == encode_trace(trace)


def test_large_trace_round_trips_through_deltas():
    num_turns = 1600 if os.environ.get("RAMIFY_FULL") else 300
    script = big_script(5, num_turns)
    trace, deltas = sent(script, random.Random(5))
    num_runs = len(list(trace.graph.runs()))
    assert len(trace.nodes) >= 1.8 * num_turns and min(num_runs, len(deltas)) > 0.6 * num_turns
    nodes = {node.call.id: node.index for node in trace.nodes if node.call is not None}
    oracle.assert_records_script(trace, [nodes[turn.call.id] for turn in script.turns], script)
    data = encode_trace(trace)
    again = decode_trace(data)
    assert encode_trace(again) == data == encode_trace(received(deltas).trace)
    assert list(again.graph.runs()) == list(trace.graph.runs())
    assert oracle.content(again) == oracle.content(trace)
