"""Recording model calls: paths equal prompts, call ids are unique, invalid turns leave the trace unchanged."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from msgspec.structs import replace

from ramify.core.errors import OperationInvalid, RamifyError
from ramify.trace import (
    Branch,
    MediaPart,
    Message,
    MessageSpan,
    ModelCall,
    PromptMedia,
    Trace,
    TraceBuilder,
    Turn,
    VersionSpan,
    decode_trace,
    encode_trace,
)
from tests.support import trace_oracle as oracle
from tests.support.trace_scripts import IMAGES, PLACEHOLDER, Script, replay, scripts, tidy_scripts

RANDOM = st.randoms(use_true_random=False)


def turn(prompt: list[int], ids: list[int], **changes) -> Turn:
    """A turn with one user message that is all of its prompt."""
    base = Turn(
        call=ModelCall("c"),
        prompt_ids=prompt,
        spans=[MessageSpan(Message("user", "hi"), len(prompt), (0, len(prompt)))],
        reply=Message("assistant", "yo"),
        reply_ids=ids,
        logprobs=[-1.0] * len(ids),
    )
    return replace(base, **changes)


@pytest.mark.promise
@given(scripts())
def test_path_to_a_reply_is_prompt_and_sampled_tokens(script: Script):
    for kind, count in script.kinds.items():
        if count:
            event(kind)
    trace, nodes = replay(script)
    oracle.assert_records_script(trace, nodes, script)
    oracle.look_at_everything(trace)


@given(tidy_scripts())
def test_branch_messages_are_those_of_the_prompt(script: Script):
    """Messages without tokens apart, which no token can tell from one another."""
    trace, nodes = replay(script)
    for node, turn in zip(nodes, script.turns, strict=True):
        starts = [0, *(span.stop for span in turn.spans)]
        silent = [span.message for start, span in zip(starts, turn.spans, strict=False) if start == span.stop]
        prompted = [span.message for start, span in zip(starts, turn.spans, strict=False) if start < span.stop]
        event(f"messages without tokens: {len(silent) > 0}")
        recorded = [message for message in Branch(trace, node).messages if message.content not in ("", "unseen")]
        assert recorded == [message for message in [*prompted, turn.reply] if message.content not in ("", "unseen")]


@given(scripts())
def test_new_messages_keep_their_content_span(script: Script):
    """The body of a message that is new as a whole is recorded as told; of the rest, what is new of it."""
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    for turn, seen in zip(script.turns, script.seen, strict=True):
        before = len(trace.nodes)
        node = builder.add_turn(turn)
        new = [step for step in oracle.path(trace, node) if step.index >= before]
        spans = {span.stop: span for span in turn.spans}
        for step in new[:-1]:
            stop = len(oracle.tokens_to(trace, step.index))
            start = stop - len(step.token_ids)
            new_spans = [span for span in turn.spans if span.stop == stop and span.message == step.message]
            assert new_spans and stop in spans
            low, high = step.content_span
            bodies = [(max(span.content_span[0], start), max(span.content_span[1], start)) for span in new_spans]
            assert (low + start, high + start) in bodies
        lead = len(new[-1].token_ids) - len(seen.sampled)
        assert new[-1].content_span == (lead, len(new[-1].token_ids))


def says_where(turn: Turn, prefix_length: int) -> bool:
    """Whether the tokens alone determine which messages are in the prefix: no message without content is at its end."""
    starts = [0, *(span.stop for span in turn.spans)]
    spans = zip(starts, turn.spans, strict=False)
    return not any(
        span.content_span[0] == span.content_span[1] and start <= prefix_length <= span.stop for start, span in spans
    )


def continued(trace: Trace, turn: Turn, prefix_node: int) -> Turn:
    """The turn as a renderer reports it that reused the path of `prefix_node`."""
    prefix_length = len(oracle.tokens_to(trace, prefix_node))
    spans: list[MessageSpan] = []
    starts = [0, *(span.stop for span in turn.spans)]
    for start, span in zip(starts, turn.spans, strict=False):
        if span.stop <= prefix_length or (start < prefix_length and span.content_span[1] <= prefix_length):
            continue  # already on the path, except perhaps for closing template tokens
        low, high = span.content_span
        spans.append(
            MessageSpan(
                span.message, span.stop - prefix_length, (max(0, low - prefix_length), max(0, high - prefix_length))
            )
        )
    skipped = len(turn.spans) - len(spans)
    media = [
        PromptMedia(
            item.media, item.message_index - skipped, item.part, item.start - prefix_length, item.stop - prefix_length
        )
        for item in turn.media
        if item.start >= prefix_length
    ]
    return replace(
        turn, prompt_ids=np.asarray(turn.prompt_ids)[prefix_length:], spans=spans, media=media, prefix_node=prefix_node
    )


@pytest.mark.promise
@given(scripts(), RANDOM)
def test_prefix_node_gives_the_same_trace_as_the_whole_prompt(script: Script, rng: random.Random):
    whole, proven = Trace(id="t"), Trace(id="t")
    told, short = TraceBuilder(whole), TraceBuilder(proven)
    for each, seen in zip(script.turns, script.seen, strict=True):
        best, _ = oracle.longest_prefix(whole, seen.prompt, seen.images)
        steps = [step.index for step in oracle.path(proven, best)]
        ends = [len(oracle.tokens_to(proven, step)) for step in steps]
        clear = [step for i, step in enumerate(steps) if all(says_where(each, end) for end in ends[i:])]
        after = rng.choice([-1, *clear])
        node = told.add_turn(each)
        assert short.add_turn(each if after < 0 else continued(proven, each, after)) == node
    assert encode_trace(proven) == encode_trace(whole)


@given(scripts(), RANDOM)
def test_repeated_call_is_recorded_once(script: Script, rng: random.Random):
    original, nodes = replay(script)
    before = encode_trace(original)
    for trace in (original, decode_trace(before)):
        builder = TraceBuilder(trace)
        for i in rng.sample(range(len(nodes)), len(nodes)):
            assert builder.add_turn(script.turns[i]) == nodes[i]
        assert encode_trace(trace) == before


BASE = turn([1, 2], [3, 4])
CONFLICTS = {
    "another prompt": turn([1, 1], [3, 4]),
    "a longer prompt": turn([1, 2, 3], [3, 4]),
    "another reply": turn([1, 2], [3, 5]),
    "a shorter reply": turn([1, 2], [3]),
    "no reply": turn([1, 2], []),
    "a token moved from the reply to the prompt": turn([1, 2, 3], [4]),
    "a token moved from the prompt to the reply": turn([1], [2, 3, 4]),
    "an image in the prompt": turn([1, 2], [3, 4], media=[PromptMedia(IMAGES[0], 0, 0, 1, 2)]),
    "other logprobs": turn([1, 2], [3, 4], logprobs=[-1.0, -2.0]),
}


@pytest.mark.parametrize("other", CONFLICTS.values(), ids=CONFLICTS.keys())
def test_call_id_with_other_content_raises_call_conflict(other: Turn):
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    node = builder.add_turn(BASE)
    before = encode_trace(trace)
    with pytest.raises(OperationInvalid, match="'c'"):
        builder.add_turn(other)
    assert encode_trace(trace) == before
    assert builder.add_turn(BASE) == node


def test_repeated_call_with_another_prefix_node_raises_call_conflict():
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    first = builder.add_turn(turn([1, 2], [3], call=ModelCall("a")))
    second = builder.add_turn(turn([1, 2], [4], call=ModelCall("b")))
    reply = replace(turn([5], [6], call=ModelCall("c")), prefix_node=first)
    node = builder.add_turn(reply)
    assert builder.add_turn(reply) == node
    with pytest.raises(OperationInvalid):
        builder.add_turn(replace(reply, prefix_node=second))


def test_conversation_without_forks_is_one_branch():
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    prompt: list[int] = []
    spans: list[MessageSpan] = []
    for i in range(20):
        prompt += [1, i]
        spans = [*spans, MessageSpan(Message("user", str(i)), len(prompt), (len(prompt) - 1, len(prompt)))]
        builder.add_turn(turn([*prompt, 2], [3, 4], call=ModelCall(str(i)), spans=spans))
        prompt += [2, 3, 4]
        spans = [*spans, MessageSpan(Message("assistant", "yo"), len(prompt), (len(prompt) - 2, len(prompt)))]
    assert len(trace.nodes) == 40 and len(trace.leaves) == 1
    assert trace.branches[0].num_turns == 20


def test_closing_template_tokens_join_the_next_message():
    """The sampler stopped before the newline of the template; the message after the reply begins with it."""
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    first = builder.add_turn(turn([1, 2], [3], call=ModelCall("a")))
    user, reply = Message("user", "hi"), Message("assistant", "yo")
    spans = [
        MessageSpan(user, 2, (0, 2)),
        MessageSpan(reply, 4, (2, 3)),
        MessageSpan(Message("user", "more"), 6, (5, 6)),
    ]
    second = builder.add_turn(turn([1, 2, 3, 9, 8, 7], [4], call=ModelCall("b"), spans=spans))
    more = trace.nodes[trace.nodes[second].parent]
    assert more.parent == first
    assert (more.token_ids.tolist(), more.content_span) == ([9, 8, 7], (2, 3))


def test_messages_without_tokens_are_recorded_and_matched():
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    silent = Message("system", "unseen")
    spans = [
        MessageSpan(silent, 0, (0, 0)),
        MessageSpan(Message("user", "hi"), 2, (0, 2)),
        MessageSpan(silent, 2, (2, 2)),
    ]
    first = builder.add_turn(turn([1, 2], [3], call=ModelCall("a"), spans=spans))
    second = builder.add_turn(turn([1, 2], [4], call=ModelCall("b"), spans=spans))
    assert Branch(trace, first).messages[:-1] == [silent, Message("user", "hi"), silent]
    assert trace.nodes[first].parent == trace.nodes[second].parent
    assert len(trace.nodes) == 5


def test_message_without_tokens_after_closing_template_tokens_is_matched():
    """Its node holds the closing template token of the previous reply, which is not its own."""
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    builder.add_turn(turn([1, 2], [3], call=ModelCall("a")))
    said = [Message("user", "hi"), Message("assistant", "yo"), Message("system", "unseen")]
    spans = [MessageSpan(said[0], 2, (0, 2)), MessageSpan(said[1], 4, (2, 3)), MessageSpan(said[2], 4, (4, 4))]
    for i in range(3):
        node = builder.add_turn(turn([1, 2, 3, 9, 8], [i], call=ModelCall(str(i)), spans=spans))
        assert Branch(trace, node).messages == [*said, Message("assistant", "yo")]


def test_reply_without_tokens_can_be_continued():
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    said = Message("assistant", "")
    hi, more = Message("user", "hi"), Message("user", "more")
    first = builder.add_turn(turn([1, 2], [], call=ModelCall("a"), reply=said))
    spans = [MessageSpan(hi, 2, (0, 2)), MessageSpan(said, 2, (2, 2)), MessageSpan(more, 3, (2, 3))]
    second = builder.add_turn(turn([1, 2, 5], [6], call=ModelCall("b"), spans=spans))
    assert Branch(trace, second).messages[:3] == [hi, said, more]
    assert trace.graph.path_nodes(second)[1] == first
    assert Branch(trace, second).num_turns == 2


def test_image_outside_the_content_span_is_kept():
    """A path may end inside a message, behind its text but before its image: the image is still part of the prompt."""
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    builder.add_turn(turn([1], [2], call=ModelCall("a")))
    shown = MessageSpan(Message("user", (MediaPart(IMAGES[0].hash),)), 4, (1, 2))
    image = PromptMedia(IMAGES[0], 0, 0, 2, 3)
    node = builder.add_turn(turn([1, 2, PLACEHOLDER, 3], [4], call=ModelCall("b"), spans=[shown], media=[image]))
    assert oracle.tokens_to(trace, node) == [1, 2, PLACEHOLDER, 3, 4]
    assert oracle.images_to(trace, node) == [(2, 3, IMAGES[0].hash)]


SPAN = MessageSpan(Message("user", "hi"), 3, (0, 3))
WRONG_TURNS = {
    "reply is not unicode": {"reply": Message("assistant", "\ud800")},
    "second message is not unicode": {"spans": [SPAN, MessageSpan(Message("user", "\ud800"), 4, (3, 4))]},
    "message of the wrong type": {"spans": [MessageSpan(Message("user", 7), 3, (0, 3))]},
    "a logprob too few": {"logprobs": [-1.0]},
    "reply body leaves the reply": {"reply_content_span": (0, 5)},
    "versions cover too little": {"versions": [VersionSpan("p", 0, 0, 1)]},
    "a version does not fit": {"versions": [VersionSpan("p", 2**40, 0, 2)]},
    "an array is too long": {"arrays": {"x": np.zeros(9)}},
    "span leaves the prompt": {"spans": [MessageSpan(Message("user"), 9, (0, 3))]},
    "spans run backwards": {"spans": [SPAN, MessageSpan(Message("user"), 2, (2, 2))]},
    "body leaves its message": {"spans": [MessageSpan(Message("user"), 2, (0, 3))]},
    "an id is negative": {"reply_ids": [3, -1]},
    "a prompt id is negative": {"prompt_ids": np.array([1, -1, 1, 1], np.int32)},
    "a prompt that is text": {"prompt_ids": "abc"},
    "media leaves its message": {"media": [PromptMedia(IMAGES[0], 0, 0, 2, 4)]},
    "media of a message that is not there": {"media": [PromptMedia(IMAGES[0], 7, 0, 0, 1)]},
    "media of a message before the first": {"media": [PromptMedia(IMAGES[0], -1, 0, 0, 1)]},
    "media without tokens": {"media": [PromptMedia(IMAGES[0], 0, 0, 1, 1)]},
    "media overlap": {"media": [PromptMedia(IMAGES[0], 0, 0, 0, 2), PromptMedia(IMAGES[1], 0, 1, 1, 3)]},
    "media out of order": {"media": [PromptMedia(IMAGES[0], 0, 0, 2, 3), PromptMedia(IMAGES[1], 0, 1, 0, 1)]},
    "continues a node that is not there": {"prefix_node": 99},
    "continues a node before the first": {"prefix_node": -2},
    "sampling holds an object": {"call": ModelCall("x", sampling_params={"seed": object()})},
}


@pytest.mark.parametrize("wrong", WRONG_TURNS.values(), ids=WRONG_TURNS.keys())
def test_invalid_turn_raises_and_leaves_the_trace_unchanged(wrong: dict):
    trace = Trace(id="t")
    builder = TraceBuilder(trace)
    builder.add_turn(turn([1, 2], [3], call=ModelCall("before")))
    before = encode_trace(trace)
    right = turn([1, 1, 1, 1], [3, 4], call=ModelCall("x"), spans=[SPAN])
    with pytest.raises(RamifyError):
        builder.add_turn(replace(right, **wrong))
    assert encode_trace(trace) == before
    builder.add_turn(right)
    oracle.look_at_everything(trace)
