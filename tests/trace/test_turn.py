"""Recording model calls: the path to a reply is what the engine saw, a call id counts once, refusals leave no mark."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from ramify.errors import CallConflict, RamifyError
from ramify.trace import (
    Branch,
    Call,
    MediaPart,
    Message,
    PlacedMedia,
    Span,
    Trace,
    Turn,
    TurnBuilder,
    VersionRun,
    decode,
    encode,
)
from tests.trace import oracle
from tests.trace.strategies import IMAGES, PLACEHOLDER, Script, replay, scripts, tidy_scripts

RANDOM = st.randoms(use_true_random=False)


def turn(prompt: list[int], ids: list[int], **changes) -> Turn:
    """A turn with one user message that is all of its prompt."""
    base = Turn(
        call=Call("c"),
        prompt=prompt,
        spans=[Span(Message("user", "hi"), len(prompt), (0, len(prompt)))],
        reply=Message("assistant", "yo"),
        reply_ids=ids,
        logprobs=[-1.0] * len(ids),
    )
    return replace(base, **changes)


@given(scripts())
def test_the_path_to_a_reply_is_what_the_engine_saw(script: Script):
    for kind, count in script.kinds.items():
        if count:
            event(kind)
    trace, nodes = replay(script)
    oracle.assert_records_script(trace, nodes, script)
    oracle.look_at_everything(trace)


@given(tidy_scripts())
def test_a_branch_says_what_the_prompt_said(script: Script):
    """Messages without tokens apart, which no token can tell from one another."""
    trace, nodes = replay(script)
    for node, each in zip(nodes, script.turns, strict=True):
        starts = [0, *(span.stop for span in each.spans)]
        silent = [span.message for start, span in zip(starts, each.spans, strict=False) if start == span.stop]
        said = [span.message for start, span in zip(starts, each.spans, strict=False) if start < span.stop]
        event(f"messages without tokens: {len(silent) > 0}")
        found = [message for message in Branch(trace, node).messages if message.content not in ("", "unseen")]
        assert found == [message for message in [*said, each.reply] if message.content not in ("", "unseen")]


@given(scripts(max_turns=8))
def test_a_turn_hangs_off_the_longest_known_path(script: Script):
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    for each, seen in zip(script.turns, script.seen, strict=True):
        expected, length = oracle.longest_prefix(trace, seen.prompt, seen.images)
        before = len(trace.nodes)
        node = builder.attach(each)
        old = [step for step in oracle.path(trace, node) if step.index < before]
        assert len(oracle.tokens_to(trace, old[-1].index if old else -1)) == length
        with_tokens = [step.index for step in old if len(step.tokens)]
        assert (with_tokens[-1] if with_tokens else -1) == expected
        assert [step.index for step in oracle.path(trace, node)][len(old) :] == list(range(before, len(trace.nodes)))


@given(scripts())
def test_new_messages_keep_their_body(script: Script):
    """The body of a message that is new as a whole is recorded as told; of the rest, what is new of it."""
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    for each, seen in zip(script.turns, script.seen, strict=True):
        before = len(trace.nodes)
        node = builder.attach(each)
        new = [step for step in oracle.path(trace, node) if step.index >= before]
        spans = {span.stop: span for span in each.spans}
        for step in new[:-1]:
            stop = len(oracle.tokens_to(trace, step.index))
            start = stop - len(step.tokens)
            told = [span for span in each.spans if span.stop == stop and span.message == step.message]
            assert told and stop in spans
            low, high = step.content
            bodies = [(max(span.body[0], start), max(span.body[1], start)) for span in told]
            assert (low + start, high + start) in bodies
        lead = len(new[-1].tokens) - len(seen.sampled)
        assert new[-1].content == (lead, len(new[-1].tokens))


def says_where(each: Turn, known: int) -> bool:
    """Whether the tokens alone say which messages a path of `known` tokens holds: one without a body may be on it."""
    starts = [0, *(span.stop for span in each.spans)]
    spans = zip(starts, each.spans, strict=False)
    return not any(span.body[0] == span.body[1] and start <= known <= span.stop for start, span in spans)


def continued(trace: Trace, each: Turn, after: int) -> Turn:
    """The turn as a renderer reports it that kept the path of `after` verbatim."""
    known = len(oracle.tokens_to(trace, after))
    spans: list[Span] = []
    starts = [0, *(span.stop for span in each.spans)]
    for start, span in zip(starts, each.spans, strict=False):
        if span.stop <= known or (start < known and span.body[1] <= known):
            continue  # on the path already, at most its closing scaffold follows
        low, high = span.body
        spans.append(Span(span.message, span.stop - known, (max(0, low - known), max(0, high - known))))
    skipped = len(each.spans) - len(spans)
    media = [
        PlacedMedia(item.media, item.span - skipped, item.part, item.start - known, item.stop - known)
        for item in each.media
        if item.start >= known
    ]
    return replace(each, prompt=np.asarray(each.prompt)[known:], spans=spans, media=media, after=after)


@given(scripts(), RANDOM)
def test_a_proven_prefix_gives_the_same_trace_as_the_whole_prompt(script: Script, rng: random.Random):
    whole, proven = Trace(id="t"), Trace(id="t")
    told, short = TurnBuilder(whole), TurnBuilder(proven)
    for each, seen in zip(script.turns, script.seen, strict=True):
        best, _ = oracle.longest_prefix(whole, seen.prompt, seen.images)
        steps = [step.index for step in oracle.path(proven, best)]
        ends = [len(oracle.tokens_to(proven, step)) for step in steps]
        clear = [step for i, step in enumerate(steps) if all(says_where(each, end) for end in ends[i:])]
        after = rng.choice([-1, *clear])
        node = told.attach(each)
        assert short.attach(each if after < 0 else continued(proven, each, after)) == node
    assert encode(proven) == encode(whole)


@given(scripts(), RANDOM)
def test_a_call_counts_once(script: Script, rng: random.Random):
    original, nodes = replay(script)
    before = encode(original)
    for trace in (original, decode(before)):
        builder = TurnBuilder(trace)
        for i in rng.sample(range(len(nodes)), len(nodes)):
            assert builder.attach(script.turns[i]) == nodes[i]
        assert encode(trace) == before


@given(scripts(), RANDOM)
def test_repeats_while_the_trace_grows_change_nothing(script: Script, rng: random.Random):
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    nodes: list[int] = []
    for each in script.turns:
        nodes.append(builder.attach(each))
        again = rng.randint(0, len(nodes) - 1)
        assert builder.attach(script.turns[again]) == nodes[again]
    assert encode(trace) == encode(replay(script)[0])


@given(scripts(max_turns=6), RANDOM)
def test_refused_turns_leave_a_growing_trace_as_it_was(script: Script, rng: random.Random):
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    for each in script.turns:
        before = encode(trace)
        wrong = rng.choice([{"reply": Message("assistant", "\ud800")}, {"logprobs": [0.0] * 9}])
        with pytest.raises(RamifyError):
            builder.attach(replace(each, call=Call("wrong"), **wrong))
        assert encode(trace) == before
        assert list(trace.graph.runs()) == list(decode(before).graph.runs())
        builder.attach(each)
    assert encode(trace) == encode(replay(script)[0])
    assert [node.children for node in trace.nodes] == [oracle.children(trace, i) for i in range(len(trace.nodes))]


@given(scripts(), RANDOM)
def test_equal_requests_are_two_samples(script: Script, rng: random.Random):
    trace, nodes = replay(script)
    builder = TurnBuilder(trace)
    i = rng.randint(0, len(nodes) - 1)
    other = builder.attach(replace(script.turns[i], call=Call("another")))
    assert other == len(trace.nodes) - 1 and other not in nodes
    seen = script.seen[i]
    assert oracle.tokens_to(trace, other) == seen.prompt + seen.sampled
    a, b = trace.nodes[other].sampled
    assert trace.nodes[other].tokens[a:b].tolist() == seen.sampled


BASE = turn([1, 2], [3, 4])
CONFLICTS = {
    "another prompt": turn([1, 1], [3, 4]),
    "a longer prompt": turn([1, 2, 3], [3, 4]),
    "another reply": turn([1, 2], [3, 5]),
    "a shorter reply": turn([1, 2], [3]),
    "no reply": turn([1, 2], []),
    "a token moved from the reply to the prompt": turn([1, 2, 3], [4]),
    "a token moved from the prompt to the reply": turn([1], [2, 3, 4]),
    "an image in the prompt": turn([1, 2], [3, 4], media=[PlacedMedia(IMAGES[0], 0, 0, 1, 2)]),
    "other logprobs": turn([1, 2], [3, 4], logprobs=[-1.0, -2.0]),
}


@pytest.mark.parametrize("other", CONFLICTS.values(), ids=CONFLICTS.keys())
def test_a_call_id_with_other_content_is_a_conflict(other: Turn):
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    node = builder.attach(BASE)
    before = encode(trace)
    with pytest.raises(CallConflict, match="'c'"):
        builder.attach(other)
    assert encode(trace) == before
    assert builder.attach(BASE) == node


def test_a_repeat_that_claims_another_prefix_is_a_conflict():
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    first = builder.attach(turn([1, 2], [3], call=Call("a")))
    second = builder.attach(turn([1, 2], [4], call=Call("b")))
    reply = replace(turn([5], [6], call=Call("c")), after=first)
    node = builder.attach(reply)
    assert builder.attach(reply) == node
    with pytest.raises(CallConflict):
        builder.attach(replace(reply, after=second))


def test_call_ids_are_known_after_a_new_builder_takes_over():
    trace = Trace(id="t")
    old, new = TurnBuilder(trace), TurnBuilder(trace)
    node = old.attach(BASE)
    assert new.attach(BASE) == node


def test_conversations_without_forks_are_one_path():
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    prompt: list[int] = []
    spans: list[Span] = []
    for i in range(20):
        prompt += [1, i]
        spans = [*spans, Span(Message("user", str(i)), len(prompt), (len(prompt) - 1, len(prompt)))]
        builder.attach(turn([*prompt, 2], [3, 4], call=Call(str(i)), spans=spans))
        prompt += [2, 3, 4]
        spans = [*spans, Span(Message("assistant", "yo"), len(prompt), (len(prompt) - 2, len(prompt)))]
    assert len(trace.nodes) == 40 and len(trace.leaves) == 1
    assert trace.branches[0].turns == 20


def test_closing_scaffold_after_a_known_reply_joins_the_next_message():
    """The sampler stopped before the newline of the template; the message after the reply begins with it."""
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    first = builder.attach(turn([1, 2], [3], call=Call("a")))
    user, reply = Message("user", "hi"), Message("assistant", "yo")
    spans = [Span(user, 2, (0, 2)), Span(reply, 4, (2, 3)), Span(Message("user", "more"), 6, (5, 6))]
    second = builder.attach(turn([1, 2, 3, 9, 8, 7], [4], call=Call("b"), spans=spans))
    more = trace.nodes[trace.nodes[second].parent]
    assert more.parent == first
    assert (more.tokens.tolist(), more.content) == ([9, 8, 7], (2, 3))


def test_messages_without_tokens_are_kept_and_known_again():
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    silent = Message("system", "unseen")
    spans = [Span(silent, 0, (0, 0)), Span(Message("user", "hi"), 2, (0, 2)), Span(silent, 2, (2, 2))]
    first = builder.attach(turn([1, 2], [3], call=Call("a"), spans=spans))
    second = builder.attach(turn([1, 2], [4], call=Call("b"), spans=spans))
    assert Branch(trace, first).messages[:-1] == [silent, Message("user", "hi"), silent]
    assert trace.nodes[first].parent == trace.nodes[second].parent
    assert len(trace.nodes) == 5


def test_a_message_without_tokens_behind_closing_scaffold_is_known_again():
    """It stands where the scaffold of the reply before it goes, so its node has a token that is not its own."""
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    builder.attach(turn([1, 2], [3], call=Call("a")))
    said = [Message("user", "hi"), Message("assistant", "yo"), Message("system", "unseen")]
    spans = [Span(said[0], 2, (0, 2)), Span(said[1], 4, (2, 3)), Span(said[2], 4, (4, 4))]
    for i in range(3):
        node = builder.attach(turn([1, 2, 3, 9, 8], [i], call=Call(str(i)), spans=spans))
        assert Branch(trace, node).messages == [*said, Message("assistant", "yo")]


def test_a_reply_without_any_token_can_be_continued():
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    said = Message("assistant", "")
    hi, more = Message("user", "hi"), Message("user", "more")
    first = builder.attach(turn([1, 2], [], call=Call("a"), reply=said))
    spans = [Span(hi, 2, (0, 2)), Span(said, 2, (2, 2)), Span(more, 3, (2, 3))]
    second = builder.attach(turn([1, 2, 5], [6], call=Call("b"), spans=spans))
    assert Branch(trace, second).messages[:3] == [hi, said, more]
    assert trace.graph.path(second)[1] == first
    assert Branch(trace, second).turns == 2


def test_an_image_outside_the_body_is_never_lost():
    """A path may end inside a message, behind its text but before its image: the image is still part of the prompt."""
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    builder.attach(turn([1], [2], call=Call("a")))
    shown = Span(Message("user", (MediaPart(IMAGES[0].hash),)), 4, (1, 2))
    image = PlacedMedia(IMAGES[0], 0, 0, 2, 3)
    node = builder.attach(turn([1, 2, PLACEHOLDER, 3], [4], call=Call("b"), spans=[shown], media=[image]))
    assert oracle.tokens_to(trace, node) == [1, 2, PLACEHOLDER, 3, 4]
    assert oracle.images_to(trace, node) == [(2, 3, IMAGES[0].hash)]


SPAN = Span(Message("user", "hi"), 3, (0, 3))
WRONG_TURNS = {
    "reply is not unicode": {"reply": Message("assistant", "\ud800")},
    "second message is not unicode": {"spans": [SPAN, Span(Message("user", "\ud800"), 4, (3, 4))]},
    "message of the wrong type": {"spans": [Span(Message("user", 7), 3, (0, 3))]},  # pyright: ignore[reportArgumentType]
    "a logprob too few": {"logprobs": [-1.0]},
    "reply body leaves the reply": {"reply_body": (0, 5)},
    "versions cover too little": {"versions": [VersionRun("p", 0, 0, 1)]},
    "a version does not fit": {"versions": [VersionRun("p", 2**40, 0, 2)]},
    "an array is too long": {"arrays": {"x": np.zeros(9)}},
    "span leaves the prompt": {"spans": [Span(Message("user"), 9, (0, 3))]},
    "spans run backwards": {"spans": [SPAN, Span(Message("user"), 2, (2, 2))]},
    "body leaves its message": {"spans": [Span(Message("user"), 2, (0, 3))]},
    "an id is negative": {"reply_ids": [3, -1]},
    "a prompt id is negative": {"prompt": np.array([1, -1, 1, 1], np.int32)},
    "a prompt that is text": {"prompt": "abc"},
    "media leaves its message": {"media": [PlacedMedia(IMAGES[0], 0, 0, 2, 4)]},
    "media of a message that is not there": {"media": [PlacedMedia(IMAGES[0], 7, 0, 0, 1)]},
    "media of a message before the first": {"media": [PlacedMedia(IMAGES[0], -1, 0, 0, 1)]},
    "media without tokens": {"media": [PlacedMedia(IMAGES[0], 0, 0, 1, 1)]},
    "media overlap": {"media": [PlacedMedia(IMAGES[0], 0, 0, 0, 2), PlacedMedia(IMAGES[1], 0, 1, 1, 3)]},
    "media out of order": {"media": [PlacedMedia(IMAGES[0], 0, 0, 2, 3), PlacedMedia(IMAGES[1], 0, 1, 0, 1)]},
    "continues a node that is not there": {"after": 99},
    "continues a node before the first": {"after": -2},
    "sampling holds an object": {"call": Call("x", sampling={"seed": object()})},
}


@pytest.mark.parametrize("wrong", WRONG_TURNS.values(), ids=WRONG_TURNS.keys())
def test_a_wrong_turn_is_refused_by_name_and_leaves_no_mark(wrong: dict):
    trace = Trace(id="t")
    builder = TurnBuilder(trace)
    builder.attach(turn([1, 2], [3], call=Call("before")))
    before = encode(trace)
    right = turn([1, 1, 1, 1], [3, 4], call=Call("x"), spans=[SPAN])
    with pytest.raises(RamifyError):
        builder.attach(replace(right, **wrong))
    assert encode(trace) == before
    builder.attach(right)
    oracle.look_at_everything(trace)


@given(scripts())
def test_flattening_gives_every_branch_as_it_is(script: Script):
    trace, _ = replay(script)
    flat = trace.flatten()
    assert len(flat) == len(trace.branches)
    for branch, arrays in zip(trace.branches, flat, strict=True):
        assert np.array_equal(arrays.token_ids, branch.token_ids)
        assert np.array_equal(arrays.sampled_mask, branch.sampled_mask)
        assert np.array_equal(arrays.logprobs, branch.logprobs, equal_nan=True)
