"""The message graph: prefix matching, storage, and invalid nodes that leave the trace unchanged."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from ramify.core.errors import OperationInvalid, RamifyError
from ramify.trace import Media, MediaRef, Message, ModelCall, TextPart, Trace, TraceBuilder, VersionSpan, encode_trace
from tests.support import trace_oracle as oracle
from tests.support.trace_scripts import IMAGES, KINDS, Script, big_script, replay, scripts, write_script

RANDOM = st.randoms(use_true_random=False)
USER = Message("user", "hi")


def nasty_prompt(rng: random.Random, script: Script) -> tuple[list[int], oracle.Images]:
    """A prompt of the script, cut or lengthened or with another image, so that near misses are common."""
    seen = rng.choice(script.seen)
    prompt = (seen.prompt + seen.sampled)[: rng.randint(0, 30)] + [rng.randint(0, 3) for _ in range(rng.randint(0, 3))]
    if prompt and rng.random() < 0.2:
        prompt[rng.randint(0, len(prompt) - 1)] = rng.randint(0, 3)
    images = [image for image in seen.images if image[1] <= len(prompt) and rng.random() < 0.9]
    if images and rng.random() < 0.3:
        index = rng.randint(0, len(images) - 1)
        images[index] = (*images[index][:2], rng.choice(IMAGES).hash)
    return prompt, images


def found(trace: Trace, prompt: list[int], images: oracle.Images, after: int = -1) -> tuple[int, int]:
    """What the graph's own search answers, as (node, length of its path)."""
    skip = len(oracle.tokens_to(trace, after))
    placed = [(a - skip, b - skip, digest) for a, b, digest in images if a >= skip]
    node, length = trace.graph.match_prefix(np.array(prompt[skip:], np.int32), placed, after)
    return node, skip + length


@given(scripts(), RANDOM)
def test_match_prefix_finds_the_longest_path_of_complete_nodes(script: Script, rng: random.Random):
    trace, _ = replay(script)
    for _ in range(5):
        prompt, images = nasty_prompt(rng, script)
        expected = oracle.longest_prefix(trace, prompt, images)
        event(f"prefix: {'none' if expected[0] < 0 else 'whole' if expected[1] == len(prompt) else 'part'}")
        assert found(trace, prompt, images) == expected


@given(scripts(), RANDOM)
def test_match_prefix_searches_only_below_prefix_node(script: Script, rng: random.Random):
    trace, _ = replay(script)
    for _ in range(5):
        after = rng.randint(0, len(trace.nodes) - 1)
        known, shown = oracle.tokens_to(trace, after), oracle.images_to(trace, after)
        prompt, images = nasty_prompt(rng, script)
        if rng.random() < 0.5:  # what follows is what follows elsewhere at the same depth
            prompt = known + prompt[len(known) :]
            images = shown + [image for image in images if image[0] >= len(known)]
        else:
            images = shown + [(a + len(known), b + len(known), digest) for a, b, digest in images]
            prompt = known + prompt
        assert found(trace, prompt, images, after) == oracle.longest_prefix(trace, prompt, images, after)


@given(scripts())
def test_parents_precede_children_and_path_lengths_add_up(script: Script):
    trace, _ = replay(script)
    graph = trace.graph
    for node in trace.nodes:
        assert -1 <= node.parent < node.index
        assert node.children == oracle.children(trace, node.index)
        before = oracle.tokens_to(trace, node.parent)
        assert (graph.depth(node.index), graph.path_length(node.index)) == (
            len(before),
            len(before) + len(node.token_ids),
        )
        assert [step.index for step in oracle.path(trace, node.index)] == graph.path_nodes(node.index)
        assert (
            (graph.tokens.view[graph.previous_token_index(node.index)] == before[-1])
            if before
            else graph.previous_token_index(node.index) == -1
        )
    assert graph.children(-1) == oracle.children(trace, -1)
    assert trace.leaves == [node.index for node in trace.nodes if not oracle.children(trace, node.index)]
    assert [branch.leaf for branch in trace.branches] == trace.leaves


@given(scripts())
def test_runs_are_chains_of_consecutive_nodes(script: Script):
    trace, _ = replay(script)
    covered: list[int] = []
    starts = [*trace.graph.runs(), (len(trace.nodes), 0)]
    for run, ((first, depth), (stop, _)) in enumerate(pairwise(starts)):
        nodes = list(range(first, stop))
        assert nodes and all(trace.nodes[node].parent == node - 1 for node in nodes[1:])
        assert depth == len(oracle.tokens_to(trace, trace.nodes[first].parent))
        assert all(trace.graph.find_run(node) == run for node in nodes)
        covered += nodes
    assert covered == list(range(len(trace.nodes)))


@given(scripts())
def test_only_new_tokens_are_stored(script: Script):
    """A turn adds what its longest known prefix leaves over; equal neighbours are samples, never context."""
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    for turn, seen in zip(script.turns, script.seen, strict=True):
        _, matched = oracle.longest_prefix(trace, seen.prompt, seen.images)
        before = trace.graph.tokens.size
        builder.add_turn(turn)
        assert trace.graph.tokens.size - before == len(seen.prompt) - matched + len(seen.sampled)
    for parent in range(-1, len(trace.nodes)):
        stored: set[object] = set()
        for child in map(trace.nodes.__getitem__, oracle.children(trace, parent)):
            refs = tuple((ref.start, ref.stop, ref.media) for ref in child.media)
            key = (tuple(child.token_ids.tolist()), refs, None if len(child.token_ids) else child.message)
            assert key not in stored or child.call is not None
            stored.add(key)


@given(scripts())
def test_views_stay_valid_when_the_trace_grows(script: Script):
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    views: list[tuple[np.ndarray, list[int]]] = []
    for turn in script.turns:
        view = trace.nodes[builder.add_turn(turn)].token_ids
        views.append((view, view.tolist()))
    assert all(view.tolist() == values for view, values in views)


def test_views_are_read_only():
    trace = Trace(id="t")
    trace.graph.add_node(-1, USER, [1, 2], sampled_span=(0, 2), logprobs=[-1, -2], arrays={"x": np.zeros(2)})
    node, branch = trace.nodes[0], trace.branches[0]
    for view in (node.token_ids, node.logprobs, node.arrays["x"], branch.token_ids):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 9


def test_add_node_copies_its_arrays():
    trace = Trace(id="t")
    tokens, logprobs, extra = np.array([1, 2], np.int32), np.zeros(2, np.float32), np.zeros(2)
    trace.graph.add_node(-1, USER, tokens, sampled_span=(0, 2), logprobs=logprobs, arrays={"extra": extra})
    before = encode_trace(trace)
    for array in (tokens, logprobs, extra):
        array[:] = 7
    assert encode_trace(trace) == before


VALID = {"token_ids": [1, 2, 3], "sampled_span": (1, 3), "logprobs": [-1.0, -2.0], "content_span": (1, 2)}
WRONG_NODES = {
    "parent is itself": {"parent": 1},
    "parent below -1": {"parent": -2},
    "sampled leaves the tokens": {"sampled_span": (2, 4)},
    "sampled runs backwards": {"sampled_span": (3, 1)},
    "sampled starts before the node": {"sampled_span": (-1, 1)},
    "content leaves the tokens": {"content_span": (0, 4)},
    "a logprob too few": {"logprobs": [-1.0]},
    "logprobs of two axes": {"logprobs": [[-1.0], [-2.0]]},
    "logprobs that are text": {"logprobs": ["x", "y"]},
    "a logprob is missing": {"logprobs": [None, -1.0]},
    "ids are fractions": {"token_ids": [1.0, 2.0, 3.0]},
    "an id is negative": {"token_ids": [1, -2, 3]},
    "an int32 id is negative": {"token_ids": np.array([1, -2, 3], np.int32)},
    "an id is too large": {"token_ids": [1, 2**31, 3]},
    "ids are text": {"token_ids": "abc"},
    "ids of two axes": {"token_ids": np.array([[1, 2, 3]], np.int32)},
    "versions cover too little": {"versions": [VersionSpan("p", 0, 0, 1)]},
    "versions have a negative count": {"versions": [VersionSpan("p", 0, 0, 3), VersionSpan("p", 0, 1, -1)]},
    "a version does not fit": {"versions": [VersionSpan("p", 2**40, 0, 2)]},
    "a step does not fit": {"versions": [VersionSpan("p", 0, 2**31, 2)]},
    "a policy is not a name": {"versions": [VersionSpan(5, 0, 0, 2)]},
    "a policy is not unicode": {"versions": [VersionSpan("\ud800", 0, 0, 2)]},
    "media that is not there": {"media": [MediaRef(0, 1, 0, 1)]},
    "media before the table": {"media": [MediaRef(0, -1, 0, 1)]},
    "media leaves the tokens": {"media": [MediaRef(0, 0, 2, 4)]},
    "media overlaps": {"media": [MediaRef(0, 0, 0, 2), MediaRef(0, 0, 1, 3)]},
    "media is empty": {"media": [MediaRef(0, 0, 1, 1)]},
    "media is a part too far": {"media": [MediaRef(2**40, 0, 1, 2)]},
    "an array is of another length": {"arrays": {"x": np.zeros(5)}},
    "an array has no axis": {"arrays": {"x": np.float32(1)}},
    "an array holds objects": {"arrays": {"x": np.array([object()] * 3)}},
    "an array holds records": {"arrays": {"x": np.zeros(3, [("a", "i4"), ("b", "f4")])}},
    "an array's name is a number": {"arrays": {5: np.zeros(3)}},
    "an array's name is not unicode": {"arrays": {"\ud800": np.zeros(3)}},
    "a role is a number": {"message": Message(5)},
    "text is not unicode": {"message": Message("user", "\ud800")},
    "a part is not unicode": {"message": Message("user", (TextPart("\udfff"),))},
    "content is a number": {"message": Message("user", 7)},
    "no message": {"message": None},
    "a call without name": {"call": ModelCall(5)},
    "sampling holds an object": {"call": ModelCall("c", sampling_params={"seed": object()})},
    "sampling holds a set": {"call": ModelCall("c", sampling_params={"stop": {1, 2}})},
}


@pytest.mark.parametrize("wrong", WRONG_NODES.values(), ids=WRONG_NODES.keys())
def test_invalid_node_raises_and_leaves_the_trace_unchanged(wrong: dict):
    trace = Trace(id="t")
    trace.add_media(IMAGES[0])
    trace.graph.add_node(-1, USER, [9])
    before = encode_trace(trace)
    node = {"parent": 0, "message": USER} | VALID | wrong
    with pytest.raises(OperationInvalid):
        trace.graph.add_node(node.pop("parent"), node.pop("message"), node.pop("token_ids"), **node)
    assert encode_trace(trace) == before
    assert trace.graph.add_node(0, USER, [1]) == 1
    oracle.look_at_everything(trace)


def test_numpy_numbers_in_sampling_params_are_converted():
    trace = Trace(id="t")
    trace.graph.add_node(
        -1, USER, call=ModelCall("c", sampling_params={"temperature": np.float32(0.5), "seed": np.int64(3)})
    )
    call = trace.nodes[0].call
    assert call is not None and call.sampling_params == {"temperature": 0.5, "seed": 3}


INVALID_MEDIA = [
    ("h", None, b""),
    ("\ud800", "x", b""),
    ("h", "x", "text"),
    ("../../x", "x", b"data"),
    ("../../x", "x", b""),
    (IMAGES[0].hash, "x", b"other data"),
]


@pytest.mark.parametrize("wrong", INVALID_MEDIA, ids=repr)
def test_invalid_media_raises_when_added(wrong: tuple[Any, Any, Any]):
    trace = Trace(id="t")
    with pytest.raises(RamifyError):
        trace.add_media(Media(*wrong))
    assert trace.graph.media == []


def test_generator_covers_every_kind_of_event():
    scripts = [write_script(random.Random(seed), 10) for seed in range(30)]
    assert set(KINDS) <= {kind for script in scripts for kind, count in script.kinds.items() if count}
    big = big_script(1, 300)
    assert all(big.kinds[kind] > 3 for kind in KINDS)
