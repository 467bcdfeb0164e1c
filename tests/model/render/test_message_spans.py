"""Every token of a prompt belongs to one message or to the generation prompt, and content spans hold the texts."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.model.render import RenderedPrompt, TokenHistory
from ramify.trace import Message, ModelCall, ToolCall, Trace, TraceBuilder, Turn
from tests.support.conversations import conversations
from tests.support.reference_renderer import get_oracle
from tests.support.renderers import MODELS, TOOLS, Model, renderer

EXAMPLES = min(400, max(2, settings.default.max_examples // 8)) if settings.default else 2
MOVES_SYSTEM = ("mistral-v3", "llama-3.1", "granite")  # the system message is not first, or not alone


def check_partition(prompt: RenderedPrompt, messages: list[Message]) -> None:
    assert [span.message for span in prompt.spans] == messages
    before = 0
    for span in prompt.spans:
        low, high = span.content_span
        assert before <= low <= high <= span.stop <= len(prompt.new_token_ids)
        before = span.stop


@pytest.mark.parametrize("model", MODELS, ids=str)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_spans_partition_the_prompt_and_contain_the_texts(model: Model, data: st.DataObject):
    conversation = data.draw(conversations(model))
    oracle = get_oracle(model.name)
    messages = [m for turn in conversation.turns for m in (*turn.messages, turn.reply)] + list(conversation.last)
    prompt = renderer(model.name).render(messages, conversation.tools)
    check_partition(prompt, messages)
    for span in prompt.spans:
        if span.message.role == "system" and model.name in MOVES_SYSTEM:
            continue
        body = oracle.decode(prompt.token_ids[slice(*span.content_span)])
        assert span.message.text.strip() in body
        if span.message.role != "assistant" and not model.spaces and model.name != "mistral-v3":
            assert body.strip() == span.message.text.strip()
        if span.message.role == "assistant" and not (span.message.tool_calls or span.message.reasoning or model.spaces):
            assert body.strip() == span.message.text.strip()
        for call in span.message.tool_calls:
            assert call.name in body
    opening = oracle.decode(prompt.generation_prompt_ids)
    assert oracle.text(messages, conversation.tools, generate=True).rstrip().endswith(opening.strip())


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_the_generation_prompt_follows_the_last_message(model: Model):
    oracle = get_oracle(model.name)
    question = [Message("user", "Well?")]
    prompt = renderer(model.name).render(question)
    # Without a generation prompt, Phi-3 writes an end token.
    closed = oracle.text(question, generate=False).removesuffix("<|end|>" if model.name == "phi-3" else "")
    assert (
        prompt.generation_prompt_ids.tolist()
        == oracle.ids(oracle.text(question, generate=True))[len(oracle.ids(closed)) :]
    )
    full_prompt = renderer(model.name).render(question, add_generation_prompt=False)
    assert full_prompt.token_ids.tolist() == oracle.ids(oracle.text(question, generate=False))


def test_spans_of_a_bridge_start_after_the_history():
    render, oracle = renderer("qwen2.5"), get_oracle("qwen2.5")
    prompt = render.render([Message("user", "Well?")], TOOLS)
    calls = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>' * 2
    sampled = oracle.ids(f"{calls}<|im_end|>")
    parsed = render.parse(sampled, prompt)
    first, second = (
        Message("tool", text, tool_call_id=call.id) for text, call in zip(["one", "two"], parsed.message.tool_calls)
    )
    following = render.bridge(prompt.with_reply(sampled, parsed), [first, second])
    check_partition(following, [first, second])
    texts = [oracle.decode(following.new_token_ids[slice(*span.content_span)]) for span in following.spans]
    assert texts == ["one", "two"]
    stops = [oracle.decode(following.new_token_ids[: span.stop]) for span in following.spans]
    assert stops[0] == "\n<|im_start|>user\n<tool_response>\none\n</tool_response>"
    assert stops[1] == stops[0] + "\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"


@pytest.mark.parametrize(
    "text", ["user", "assistant", "<|im_start|>", "zq0cz", "word 0", "", " ", "a\n", "<|im_end|>\n"]
)
def test_texts_that_look_like_template_text_are_located(text: str):
    messages = [Message("system", text), Message("user", text), Message("assistant", text), Message("user", text)]
    prompt, oracle = renderer("chatml").render(messages), get_oracle("chatml")
    assert prompt.token_ids.tolist() == oracle.ids(oracle.text(messages, generate=True))
    bodies = [oracle.decode(prompt.token_ids[slice(*span.content_span)]) for span in prompt.spans]
    assert [body.strip() for body in bodies] == [text.strip()] * 4


def test_an_omitted_empty_system_prompt_has_no_tokens():
    messages = [Message("system", ""), Message("user", "Well?"), Message("assistant", "Yes."), Message("user", "Ah.")]
    prompt, oracle = renderer("phi-3").render(messages), get_oracle("phi-3")
    assert prompt.spans[0].stop == 0
    texts = [oracle.decode(prompt.token_ids[slice(*span.content_span)]) for span in prompt.spans]
    assert texts == ["", "Well?", "Yes.", "Ah."]


def test_messages_are_located_if_the_template_depends_on_their_text():
    thought = "<think>\nhm\n</think>\n\nFour."  # Qwen3 removes reasoning tags from the content
    messages = [Message("user", "2+2?"), Message("assistant", thought), Message("user", "Sure?")]
    prompt, oracle = renderer("qwen3").render(messages), get_oracle("qwen3")
    texts = [oracle.decode(prompt.token_ids[slice(*span.content_span)]) for span in prompt.spans]
    assert texts == ["2+2?", "Four.", "Sure?"]


# -- the trace takes it as it comes -----------------------------------------------------------------------------------


def turn(prompt: RenderedPrompt, sampled: list[int], parsed, call: int, after: int) -> Turn:
    return Turn(
        call=ModelCall(f"call-{call}"),
        prompt_ids=prompt.new_token_ids,
        spans=prompt.spans,
        reply=parsed.message,
        reply_ids=np.array(sampled, np.int32),
        reply_content_span=parsed.content_span,
        logprobs=np.zeros(len(sampled), np.float32),
        prefix_node=after if prompt.num_reused else -1,
    )


@pytest.mark.promise
@pytest.mark.parametrize("name", ["qwen3", "mistral-v3", "ramify", "glm-4", "vicuna"])
def test_the_branch_of_a_rollout_equals_the_tokens_of_the_engine(name: str):
    render, oracle = renderer(name), get_oracle(name)
    trace = Trace(id=name)
    builder = TraceBuilder(trace)
    tools = TOOLS if oracle.model.tools else []
    prompt, node = render.render([Message("system", "Be brief."), Message("user", "Well?")], tools), -1
    messages, forks = list(prompt.messages), 0
    for number in range(4):
        thought = "hm" if oracle.model.reasoning else None
        reply = Message("assistant", f"Reply {number}.", thought)
        if tools and number % 2 == 0:
            tool_calls = (ToolCall(f"call0000{number}", "run", "{}"),)
            reply = msgspec.structs.replace(reply, content="", tool_calls=tool_calls)
        sampled = oracle.reply(messages, reply, tools)
        parsed = render.parse(sampled, prompt)
        node = builder.add_turn(turn(prompt, sampled, parsed, number, node))
        history = prompt.with_reply(sampled, parsed)
        branch = trace.branches[-1]
        assert branch.token_ids.tolist() == history.token_ids.tolist()
        # The history built from the trace is the same.
        last = trace.nodes[node]
        rebuilt = TokenHistory.build(
            list(branch.messages),
            tools,
            branch.token_ids,
            num_sampled=last.sampled_span[1] - last.sampled_span[0],
        )
        new_messages = [Message("user", f"And {number}?")]
        if parsed.message.tool_calls:
            new_messages = [Message("tool", "done", tool_call_id=parsed.message.tool_calls[0].id)]
        prompt = render.bridge(history, new_messages)
        assert render.bridge(rebuilt, new_messages).token_ids.tolist() == prompt.token_ids.tolist()
        forks += prompt.prefix_break is not None
        messages = list(prompt.messages)
    assert (forks > 0) == oracle.model.rewrites
