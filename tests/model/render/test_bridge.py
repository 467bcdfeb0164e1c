"""Bridging reuses all earlier tokens, closes truncated replies, and gives the reason if it must render again."""

import time

import pytest

from ramify.core.errors import TemplateRefused
from ramify.model.render import BreakReason, RenderedPrompt, TemplateRendererConfig, TokenHistory, load_renderer
from ramify.trace import Message, ToolCall
from tests.support.reference_renderer import get_oracle
from tests.support.renderers import MODELS, TOOLS, directory, renderer, token_id

USER, FOLLOW_UP = Message("user", "What is 2+2?"), Message("user", "Sure?")
CALL = Message("assistant", "", None, (ToolCall("call00001", "run", '{"code": "2+2"}'),))
RESULT = Message("tool", "4", tool_call_id="call00001")


def answer(name: str, text: str, messages=(USER,), tools=()) -> tuple[RenderedPrompt, TokenHistory, list[int]]:
    """Return a prompt, the history after the reply `text`, and the reply's ids."""
    render, oracle = renderer(name), get_oracle(name)
    prompt = render.render(messages, tools)
    sampled = oracle.ids(text)
    return prompt, prompt.with_reply(sampled, render.parse(sampled, prompt)), sampled


def decode(name: str, ids) -> str:
    return get_oracle(name).tokenizer.decode(list(ids), skip_special_tokens=False)


# -- verbatim tokens --------------------------------------------------------------------------------------------------


@pytest.mark.promise
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_sampled_ids_are_kept_even_if_their_text_would_be_tokenized_differently(model):
    oracle = get_oracle(model.name)
    stop = token_id(model, model.stops[0])
    unusual_ids = [token for letter in "</think>four" for token in oracle.ids(letter)] + [stop]
    assert unusual_ids != [*oracle.ids("</think>four"), stop]
    render = renderer(model.name, "verbatim")
    prompt = render.render([USER])
    following = render.bridge(prompt.with_reply(unusual_ids, render.parse(unusual_ids, prompt)), [FOLLOW_UP])
    assert following.prefix_break is None
    assert following.num_reused == len(prompt.token_ids) + len(unusual_ids)
    assert following.token_ids[: following.num_reused].tolist() == [*prompt.token_ids.tolist(), *unusual_ids]


def test_a_bridge_adds_only_the_new_messages():
    prompt, history, _ = answer("chatml", "4<|im_end|>")
    following = renderer("chatml").bridge(history, [FOLLOW_UP])
    assert decode("chatml", following.new_token_ids) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    assert following.messages == (USER, Message("assistant", "4"), FOLLOW_UP)
    assert decode("chatml", following.generation_prompt_ids) == "<|im_start|>assistant\n"
    assert prompt.num_reused == 0


# -- replies that end badly -------------------------------------------------------------------------------------------


ENDINGS = {
    "a truncated reply is closed": ("chatml", "I think it is", "<|im_end|>\n<|im_start|>user\nSure?"),
    "truncated reasoning is closed with the turn": (
        "ramify",
        "<think>It may be",
        "</think><|im_end|>\n<|im_start|>user",
    ),
    "a truncated call is text": ("ramify", '<tool_call>{"name": "run", "argu', "<|im_end|>\n<|im_start|>user\n"),
    "another stop token is kept": ("qwen2.5", "4<|endoftext|>", "<|im_end|>\n<|im_start|>user\nSure?"),
    "a stop token opens the next message": ("glm-4", "\n4<|user|>", "\nSure?<|assistant|>"),
    "an empty reply is a turn": ("chatml", "<|im_end|>", "\n<|im_start|>user\nSure?<|im_end|>"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_however_a_reply_ends_it_is_kept_and_its_turn_is_closed_once(ending):
    name, reply, expected = ENDINGS[ending]
    prompt, history, sampled = answer(name, reply, tools=TOOLS if "tool_call" in reply else ())
    following = renderer(name).bridge(history, [FOLLOW_UP])
    assert following.prefix_break is None
    assert following.token_ids[: following.num_reused].tolist() == [*prompt.token_ids.tolist(), *sampled]
    assert decode(name, following.new_token_ids).startswith(expected)


# -- breaks -----------------------------------------------------------------------------------------------------------


def find_break_reason(name: str, text: str, new: list[Message], messages=(USER,), tools=()) -> BreakReason | None:
    _, history, _ = answer(name, text, messages, tools)
    following = renderer(name).bridge(history, new)
    if following.prefix_break is None:
        assert following.num_reused == len(history.token_ids)
        return None
    assert following.num_reused == 0
    assert following.token_ids.tolist() == renderer(name).render(following.messages, tools).token_ids.tolist()
    assert following.prefix_break.metrics == {
        "render/breaks": 1.0,
        f"render/breaks/{following.prefix_break.reason}": 1.0,
    }
    return following.prefix_break.reason


THOUGHT = "<think>\nhm\n</think>\n\n"
QWEN_CALL = '<tool_call>\n{"name": "run", "arguments": {"code": "2+2"}}\n</tool_call>'
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "run", "arguments": {"code": "2+2"}, "id": "call00001"}]</s>'
SYSTEM = Message("system", "Be brief.")


@pytest.mark.parametrize(
    ("name", "reply", "following", "reason", "options"),
    [
        ("qwen3", f"{THOUGHT}4<|im_end|>", FOLLOW_UP, BreakReason.REASONING_DROPPED, {}),
        ("qwen3", f"{THOUGHT}{QWEN_CALL}<|im_end|>", Message("tool", "4"), None, {"tools": TOOLS}),
        ("qwen3", "4<|im_end|>", FOLLOW_UP, None, {}),
        ("qwen3-no-thinking", "4<|im_end|>", FOLLOW_UP, BreakReason.GENERATION_PROMPT_DROPPED, {}),
        ("deepseek-r1", "hm\n</think>\n\n4<｜end▁of▁sentence｜>", FOLLOW_UP, BreakReason.REASONING_DROPPED, {}),
        ("mistral-v3", " 4</s>", FOLLOW_UP, BreakReason.HISTORY_REWRITTEN, {"tools": TOOLS}),
        ("mistral-v3", " 4</s>", FOLLOW_UP, BreakReason.HISTORY_REWRITTEN, {"messages": (SYSTEM, USER)}),
        ("mistral-v3", " 4</s>", FOLLOW_UP, None, {}),
        ("mistral-v3", MISTRAL_CALL, RESULT, None, {"tools": TOOLS}),
    ],
)
def test_a_break_has_the_reason_why_the_template_rewrites_the_history(name, reply, following, reason, options):
    assert find_break_reason(name, reply, [following], **options) is reason


def test_changed_tools_are_a_break():
    _, history, _ = answer("ramify", "4<|im_end|>", tools=TOOLS)
    following = renderer("ramify").bridge(history, [FOLLOW_UP], TOOLS[:1])
    assert following.prefix_break is not None
    assert following.prefix_break.reason is BreakReason.TOOLS_CHANGED
    assert following.tools == tuple(TOOLS[:1])


def test_a_tool_result_after_a_closed_group_of_results_is_a_break():
    calls = tuple(ToolCall(f"call0000{number}", "run", "{}") for number in range(2))
    results = [Message("tool", str(number), tool_call_id=f"call0000{number}") for number in range(2)]
    render = renderer("qwen2.5")
    closed = render.render([USER, Message("assistant", "", None, calls), results[0]], TOOLS)
    last = closed.spans[-1]
    history = TokenHistory.build(closed.messages, TOOLS, closed.token_ids[: last.stop])
    following = render.bridge(history, results[1:])
    assert following.prefix_break is not None
    assert following.prefix_break.reason is BreakReason.HISTORY_REWRITTEN


def test_a_template_that_depends_on_texts_renders_the_whole_conversation_again():
    _, history, _ = answer("qwen3", "<think>\nhm\n</think>\n\n4<|im_end|>")
    following = renderer("qwen3").bridge(history, [Message("user", "<tool_response>5</tool_response>")])
    assert following.prefix_break is not None
    assert get_oracle("qwen3").text(following.messages, generate=True) == decode("qwen3", following.token_ids)


def test_verbatim_history_is_never_rewritten():
    render, oracle = renderer("qwen3-no-thinking", "verbatim"), get_oracle("qwen3-no-thinking")
    prompt = render.render([USER])
    sampled = oracle.ids("4<|im_end|>")
    following = render.bridge(prompt.with_reply(sampled, render.parse(sampled, prompt)), [FOLLOW_UP])
    assert following.prefix_break is None
    assert decode("qwen3", following.token_ids).count("<think>\n\n</think>\n\n") == 2


# -- histories that do not end in a reply -----------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_prompt_can_be_continued_from_any_of_its_messages(model):
    tools = TOOLS if model.tools and model.name != "mistral-v3" else []
    reply = Message("assistant", "Four.")
    messages = [USER, CALL, RESULT, reply, FOLLOW_UP] if tools else [USER, reply, FOLLOW_UP]
    render, oracle = renderer(model.name), get_oracle(model.name)
    full = render.render(messages, tools)
    for number, span in enumerate(full.spans, 1):
        history = TokenHistory.build(messages[:number], tools, full.token_ids[: span.stop])
        following = render.bridge(history, messages[number:])
        assert following.token_ids.tolist() == oracle.ids(oracle.text(messages, tools, generate=True))
        assert following.prefix_break is None, (number, following.prefix_break)
        assert following.num_reused == span.stop
        assert [span.message for span in following.spans] == messages[number:]


def test_a_lone_surrogate_is_rendered_as_a_question_mark():
    prompt = renderer("chatml").render([Message("user", "a\ud83db é")])
    assert decode("chatml", prompt.token_ids) == "<|im_start|>user\na?b é<|im_end|>\n<|im_start|>assistant\n"


# -- long conversations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2.5", "ramify", "llama-3.1"])
def test_a_long_agent_loop_bridges_every_turn(name: str):
    render, oracle = renderer(name), get_oracle(name)
    messages = [Message("system", "Use tools."), USER]
    prompt = render.render(messages, TOOLS)
    for turn in range(20):
        reply = Message("assistant", "", None, (ToolCall(f"call{turn:05d}", "run", f'{{"code": "{turn}"}}'),))
        sampled = oracle.reply(messages, reply, TOOLS)
        history = prompt.with_reply(sampled, render.parse(sampled, prompt))
        result = Message("tool", f"result {turn}", tool_call_id=history.messages[-1].tool_calls[0].id)
        prompt = render.bridge(history, [result])
        messages += [reply, result]
        assert prompt.prefix_break is None
        assert len(history.outline.example_messages()) <= 8
    assert prompt.token_ids.tolist() == oracle.ids(oracle.text(messages, TOOLS, generate=True))


# -- what cannot be rendered ------------------------------------------------------------------------------------------


def test_tools_are_refused_by_a_template_without_tool_support():
    with pytest.raises(TemplateRefused, match="does not support tools"):
        renderer("chatml").render([USER], TOOLS)


def test_errors_of_a_template_are_raised():
    with pytest.raises(TemplateRefused, match="must alternate"):
        renderer("gemma").render([USER, FOLLOW_UP])
    with pytest.raises(TemplateRefused, match="single tool-calls"):
        two = tuple(ToolCall(f"call0000{number}", "run", "{}") for number in range(2))
        renderer("llama-3.1").render([USER, Message("assistant", "", None, two)], TOOLS)


def test_call_ids_are_shortened_for_a_template_that_requires_nine_letters():
    call = Message("assistant", "", None, (ToolCall("toolu_01A09q90qw90lq917835lq9", "run", "{}"),))
    result = Message("tool", "4", tool_call_id="toolu_01A09q90qw90lq917835lq9")
    ids = renderer("mistral-v3").render([USER, call, result], TOOLS).token_ids
    assert decode("mistral-v3", ids).count('id": "') == 2


def test_the_date_in_a_prompt_does_not_change_at_midnight(monkeypatch):
    render = load_renderer(directory("llama-3.1"), TemplateRendererConfig())
    before = render.render([USER])
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert render.render([USER]).token_ids.tolist() == before.token_ids.tolist()
    fixed = TemplateRendererConfig(template_args={"date_string": "26 Jul 2024"})
    text = decode("llama-3.1", load_renderer(directory("llama-3.1"), fixed).render([USER]).token_ids)
    assert "Today Date: 26 Jul 2024" in text
