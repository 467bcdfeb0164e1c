"""Families of the `renderers` library, on tokenizers built for the tests."""

import json
import sys

import numpy as np
import pytest
from msgspec.structs import replace

from ramify.core.errors import ConfigInvalid, TemplateRefused
from ramify.model.render import BreakReason, FamilyRendererConfig, ParseProblemKind, TokenHistory, load_renderer
from ramify.trace import Message, ToolCall
from tests.support.renderers import LLAMA, QWEN, TOOLS, directory, family, tokenizer

GLM = [
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>"),
    *("</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<tool_response>", "</tool_response>", "/nothink"),
]
MINIMAX = ["]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"]
FAMILIES = {
    "qwen3": QWEN,
    "qwen3.5": [*QWEN, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "prime-qwen3": QWEN,
    "llama-3": LLAMA,
    "glm-4.5": GLM,
    "glm-5": GLM,
    "minimax-m2": MINIMAX,
    "nemotron-3": QWEN,
}
SHOWS_NO_THINKING = KEEPS_THINKING = {"prime-qwen3", "llama-3"}
USER, FOLLOW_UP = Message("user", "What is 2+2?"), Message("user", "Sure?")


def renderer(name: str):
    return family(name, tuple(FAMILIES[name]))


def sampled(name: str, before: list[Message], reply: Message) -> np.ndarray:
    """Return the ids that the family renders for a reply, up to its stop token."""
    render = renderer(name)
    prompt, full_ids = (
        render.render(before, TOOLS).token_ids,
        render.render([*before, reply], TOOLS, add_generation_prompt=False).token_ids,
    )
    start = next((i for i, (a, b) in enumerate(zip(prompt, full_ids)) if a != b), len(prompt))
    ids = full_ids[start:]
    stops = [number for number, id in enumerate(ids) if int(id) in render.stop_ids]
    if stops:
        return ids[: stops[0] + 1]
    # A reply of GLM ends with the token that opens the next message.
    following = tokenizer(tuple(FAMILIES[name])).token_to_id("<|observation|>" if reply.tool_calls else "<|user|>")
    return np.array([*ids, following], np.int32)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_turn_is_bridged_and_equals_the_full_render(name: str):
    render = renderer(name)
    thought = None if name in SHOWS_NO_THINKING else "hm"
    reply = Message("assistant", "", thought, (ToolCall("call00000", "search", '{"query": "x"}'),))
    prompt = render.render([USER], TOOLS)
    ids = sampled(name, [USER], reply)
    parsed = render.parse(ids, prompt)
    assert [(call.name, json.loads(call.arguments)) for call in parsed.message.tool_calls] == [
        ("search", {"query": "x"})
    ]
    history = prompt.with_reply(ids, parsed)
    result = Message("tool", "four", tool_call_id=parsed.message.tool_calls[0].id)
    following = render.bridge(history, [result])
    assert following.prefix_break is None
    assert following.num_reused == len(history.token_ids)
    assert following.token_ids[: following.num_reused].tolist() == history.token_ids.tolist()
    (span,) = following.spans
    assert 0 < span.content_span[0] < span.content_span[1] <= span.stop < len(following.new_token_ids)
    full = render.render(following.messages, TOOLS)
    assert following.token_ids.tolist() == full.token_ids.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_new_question_is_a_break_if_the_family_drops_reasoning(name: str):
    render = renderer(name)
    prompt = render.render([USER], TOOLS)
    ids = sampled(name, [USER], Message("assistant", "Four."))
    following = render.bridge(prompt.with_reply(ids, render.parse(ids, prompt)), [FOLLOW_UP])
    assert (following.prefix_break is None) == (name in KEEPS_THINKING)
    if following.prefix_break is not None:
        assert following.prefix_break.reason is BreakReason.REASONING_DROPPED
        assert following.token_ids.tolist() == render.render(following.messages, TOOLS).token_ids.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_spans_partition_the_prompt_of_a_family(name: str):
    messages = [Message("system", "Be brief."), USER, Message("assistant", "Four."), FOLLOW_UP]
    prompt = renderer(name).render(messages, TOOLS)
    before = 0
    for span in prompt.spans:
        assert before <= span.content_span[0] <= span.content_span[1] <= span.stop
        before = span.stop
    assert 0 < before < len(prompt.token_ids) or len(prompt.generation_prompt_ids) == 0
    assert [span.message for span in prompt.spans] == messages


def test_changed_tools_and_prompt_histories_are_rendered_again():
    render = renderer("qwen3")
    prompt = render.render([USER], TOOLS)
    ids = sampled("qwen3", [USER], Message("assistant", "Four."))
    history = prompt.with_reply(ids, render.parse(ids, prompt))
    following = render.bridge(history, [FOLLOW_UP], TOOLS[:1])
    assert following.prefix_break is not None
    assert following.prefix_break.reason is BreakReason.TOOLS_CHANGED
    (span,) = prompt.spans
    history_of_prompt = TokenHistory.build([USER], TOOLS, prompt.token_ids[: span.stop])
    again = render.bridge(history_of_prompt, [])
    assert again.prefix_break is None
    assert (again.num_reused, again.token_ids.tolist()) == (span.stop, prompt.token_ids.tolist())


def test_a_malformed_call_is_reported():
    render = renderer("qwen3")
    prompt = render.render([USER], TOOLS)
    bad = '<tool_call>\n{"name": "run", "arguments": {\n</tool_call>'
    ids = tokenizer(tuple(QWEN)).encode(f"{bad}<|im_end|>").ids
    parsed = render.parse(ids, prompt)
    assert parsed.message.tool_calls == ()
    assert [problem.kind for problem in parsed.problems] == [ParseProblemKind.INVALID_JSON]
    assert parsed.problems[0].text in parsed.message.content


def test_text_of_a_call_is_content_if_calls_are_not_allowed():
    render = renderer("qwen3")
    call = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
    parsed = render.parse(
        tokenizer(tuple(QWEN)).encode(f"{call}<|im_end|>").ids, replace(render.render([USER]), allows_calls=False)
    )
    assert not parsed.message.tool_calls and not parsed.problems
    assert '{"name": "run", "arguments": {}}' in parsed.message.text


def test_a_missing_library_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ConfigInvalid, match="extra 'renderers'"):
        load_renderer(directory("qwen3"), FamilyRendererConfig(name="qwen3"))


def test_an_unknown_family_or_vocabulary_is_named_in_the_error():
    with pytest.raises(ConfigInvalid, match="no-such"):
        load_renderer(directory("qwen3"), FamilyRendererConfig(name="no-such"))
    with pytest.raises(ConfigInvalid, match="glm-5"):
        load_renderer(directory("qwen3"), FamilyRendererConfig(name="glm-5"))
    with pytest.raises(ConfigInvalid, match="enable_thnking"):
        load_renderer(directory("qwen3"), FamilyRendererConfig(name="qwen3", template_args={"enable_thnking": True}))


def test_errors_of_a_family_are_raised():
    with pytest.raises(TemplateRefused, match="qwen3"):
        renderer("qwen3").render([])
