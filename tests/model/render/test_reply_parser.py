"""Replies that a template wrote are parsed back, and malformed replies are reported."""

import json
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.model.render import ParsedReply, ParseProblemKind, TemplateRendererConfig, load_renderer
from ramify.model.render.reply_grammar import CallIdGenerator
from ramify.model.render.tool_parsers import TOOL_PARSERS
from ramify.model.render.tool_parsers.base import MAX_PROBLEMS
from ramify.trace import Message
from tests.support.conversations import replies
from tests.support.reference_renderer import get_oracle
from tests.support.renderers import MODELS, TOOLS, Model, directory, renderer, token_id

EXAMPLES = min(400, max(6, settings.default.max_examples // 5)) if settings.default else 6
QUESTION = [Message("user", "Well?")]


def message_content(message: Message):
    """Return the fields of a message to compare; call ids are left out."""
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return message.role, message.content, message.reasoning or None, calls


def parse(name: str, text: str, *, tools=TOOLS, stop: bool = True) -> ParsedReply:
    """Parse the reply `text` of a model, with or without its stop token."""
    render, oracle = renderer(name), get_oracle(name)
    ids = oracle.ids(text + (oracle.model.stops[0] if stop else ""))
    return render.parse(ids, render.render(QUESTION, tools if oracle.model.tools else []))


# -- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS, ids=str)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_replies_round_trip_through_the_template(model: Model, data: st.DataObject):
    reply = data.draw(replies(model, with_calls=model.tools and data.draw(st.booleans())))
    tools = TOOLS if model.tools else []
    prompt = renderer(model.name).render(QUESTION, tools)
    parsed = renderer(model.name).parse(get_oracle(model.name).reply(QUESTION, reply, tools), prompt)
    assert message_content(parsed.message) == message_content(reply)
    assert parsed.problems == ()


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_tool_format_and_stop_ids_are_those_of_the_model(model: Model):
    assert renderer(model.name).tool_format == model.format
    assert set(renderer(model.name).stop_ids) == {token_id(model, stop) for stop in model.stops}


def test_the_stop_token_is_not_part_of_the_content_span():
    for text in ("hello", ""):
        closed, cut = parse("ramify", text), parse("ramify", text, stop=False)
        assert closed.content_span == cut.content_span
        assert closed.message == cut.message == Message("assistant", text)


def test_call_ids_are_nine_letters_and_differ():
    call = '<tool_call>{"name": "run", "arguments": {}}</tool_call>'
    ids = [call.id for text in (call + call, call) for call in parse("ramify", text).message.tool_calls]
    assert len(set(ids)) == 3
    assert all(len(id) == 9 and id.isalnum() for id in ids)


def test_arguments_keep_their_source_text():
    source_text = '{"query":"caf\\u00e9",  "limit" : 1.0}'
    parsed = parse("ramify", f'<tool_call>{{"arguments": {source_text}, "name": "search"}}</tool_call>')
    assert parsed.message.tool_calls[0].arguments == source_text


# -- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reply", "reasoning"),
    [
        ("qwen3", "<think>\nLet me see.\n</think>\n\nFour.", "Let me see."),
        ("deepseek-r1", "Let me see.\n</think>\n\nFour.", "Let me see."),  # the prompt has opened it
        ("qwen3-no-thinking", "Four.", None),  # the prompt has closed it
    ],
)
def test_reasoning_is_split_from_content(name, reply, reasoning):
    assert parse(name, reply).message == Message("assistant", "Four.", reasoning)


def test_a_call_inside_reasoning_is_not_parsed():
    call = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
    parsed = parse("qwen3", f"<think>\nI could {call}\n</think>\n\n{call}")
    assert len(parsed.message.tool_calls) == 1
    assert call in (parsed.message.reasoning or "")


def test_unclosed_reasoning_is_reported():
    parsed = parse("qwen3", "<think>\nLet me see", stop=False)
    assert parsed.message == Message("assistant", "", "Let me see")
    assert [problem.kind for problem in parsed.problems] == [ParseProblemKind.UNCLOSED_REASONING]


# -- malformed calls --------------------------------------------------------------------------------------------------

MALFORMED = [
    ("hermes", '<tool_call>{"name": "run", "arguments": {</tool_call>', ParseProblemKind.INVALID_JSON),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ParseProblemKind.NO_NAME),
    ("hermes", '<tool_call>{"name": 7}</tool_call>', ParseProblemKind.NO_NAME),
    ("hermes", '<tool_call>{"name": "run", "arguments": [1]}</tool_call>', ParseProblemKind.BAD_ARGUMENTS),
    ("hermes", '<tool_call>{"name": "run", "arguments": "no"}</tool_call>', ParseProblemKind.BAD_ARGUMENTS),
    ("hermes", "<tool_call>[1]</tool_call>", ParseProblemKind.BAD_FORM),
    ("hermes", '<tool_call>{"name": "run", "argu', ParseProblemKind.UNCLOSED),
    ("hermes", '<tool_call>{"name": "run", "arguments": {}}', ParseProblemKind.UNCLOSED),
    ("hermes", "<tool_call>", ParseProblemKind.UNCLOSED),
    ("hermes", '<tool_call>{"name": "run"}}</tool_call>', ParseProblemKind.BAD_FORM),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", ParseProblemKind.INVALID_JSON),
    ("hermes", '<tool_call>{"name": "r\\ud800", "arguments": {}}</tool_call>', ParseProblemKind.INVALID_JSON),
    (
        "hermes",
        '<tool_call>{"name": "run", "arguments": "{\\"x\\": \\"\\ud800\\"}"}</tool_call>',
        ParseProblemKind.INVALID_JSON,
    ),
    ("qwen-coder", "<tool_call><function=></function></tool_call>", ParseProblemKind.NO_NAME),
    (
        "qwen-coder",
        '<tool_call><function=run><parameter=x>["\\ud800"]</parameter></function></tool_call>',
        ParseProblemKind.INVALID_JSON,
    ),
    ("qwen-coder", "<tool_call>run()</tool_call>", ParseProblemKind.BAD_FORM),
    ("qwen-coder", "<tool_call><function=run>x</function></tool_call>", ParseProblemKind.BAD_ARGUMENTS),
    ("qwen-coder", "<tool_call><function=run><parameter=code>x</function></tool_call>", ParseProblemKind.BAD_ARGUMENTS),
    ("qwen-coder", "<tool_call><function=run><parameter=code>x", ParseProblemKind.UNCLOSED),
    ("llama-3", '{"name": "run", "parameters": {', ParseProblemKind.INVALID_JSON),
    ("llama-3", '{"name": "run", "parameters": 3}', ParseProblemKind.BAD_ARGUMENTS),
    ("llama-3", '{"name": "run", "parameters": {}} and more', ParseProblemKind.BAD_FORM),
    ("llama-3", '<|python_tag|>run.call(code="x")', ParseProblemKind.BAD_FORM),
    ("llama-3", "<|python_tag|>", ParseProblemKind.UNCLOSED),
    ("mistral", '[TOOL_CALLS] [{"name": "run", "arguments": {}}', ParseProblemKind.UNCLOSED),
    ("mistral", '[TOOL_CALLS] [{"name": "run"', ParseProblemKind.INVALID_JSON),
    ("mistral", '[TOOL_CALLS] [{"arguments": {}}]', ParseProblemKind.NO_NAME),
    ("mistral", "[TOOL_CALLS] [7]", ParseProblemKind.BAD_FORM),
    ("mistral", "[TOOL_CALLS] []", ParseProblemKind.BAD_FORM),
    ("mistral", "[TOOL_CALLS]run[ARGS]{", ParseProblemKind.INVALID_JSON),
    ("mistral", "[TOOL_CALLS][ARGS]{}", ParseProblemKind.NO_NAME),
    ("mistral", "[TOOL_CALLS]run", ParseProblemKind.BAD_FORM),
]


@pytest.mark.parametrize(("format", "text", "kind"), MALFORMED, ids=lambda value: str(value)[:40])
def test_a_malformed_call_is_reported_and_stays_in_the_content(format: str, text: str, kind: ParseProblemKind):
    result = TOOL_PARSERS[format](text, TOOLS)
    assert result.calls == []
    assert result.content == text
    assert [(problem.kind, problem.text) for problem in result.problems] == [(kind, text)]


def test_text_after_the_json_of_a_call_is_named():
    (problem,) = TOOL_PARSERS["hermes"]('<tool_call>{"name": "clowh"}}</tool_call>', TOOLS).problems
    assert problem.detail == "text between the end of the JSON and </tool_call>: '}'"


@pytest.mark.parametrize("format", ["hermes", "qwen-coder", "llama-3", "mistral"])
def test_deeply_nested_calls_are_parsed_or_reported(format: str):
    forms = {
        "hermes": '<tool_call>{{"name": "run", "arguments": {{"x": {}}}}}</tool_call>',
        "qwen-coder": "<tool_call><function=run><parameter=x>{}</parameter></function></tool_call>",
        "llama-3": '{{"name": "run", "parameters": {{"x": {}}}}}',
        "mistral": '[TOOL_CALLS] [{{"name": "run", "arguments": {{"x": {}}}}}]',
    }
    limit = sys.getrecursionlimit()
    for depth in range(limit - 300, limit + 1, 7):  # the limit depends on the depth of the current stack
        result = TOOL_PARSERS[format](forms[format].format("[" * depth + "]" * depth), TOOLS)
        assert len(result.calls) + len(result.problems) == 1


def test_a_malformed_call_does_not_affect_valid_calls():
    good = '<tool_call>{"name": "run", "arguments": {}}</tool_call>'
    bad = '<tool_call>{"name": "run"</tool_call>'
    parsed = parse("ramify", f"Look:\n{good}{bad}{good}")
    assert [call.name for call in parsed.message.tool_calls] == ["run", "run"]
    assert parsed.message.content == f"Look:\n{bad}"
    assert [problem.text for problem in parsed.problems] == [bad]


PIECES = [
    *('{}[]":,;a \n', *'{}[]":,;', "<tool_call>", "</tool_call>", "<function=a>", "</function>", "<parameter=a>"),
    *("</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "a"}', '{"name": "a", "arguments": {}}'),
]


@pytest.mark.parametrize("format", sorted(TOOL_PARSERS))
@given(text=st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_parsers_neither_fail_nor_lose_text(format: str, text: str):
    result = TOOL_PARSERS[format](text, TOOLS)
    if not result.calls:
        assert result.content == text
    assert all(problem.text in text for problem in result.problems)


ENDLESS = {
    "blanks": (
        "qwen-coder",
        "<tool_call><function=run><parameter=x>1</parameter>{}x</function></tool_call>",
        " ",
        200_000,
    ),
    "opened functions": ("qwen-coder", "{}", "<tool_call><function=run>", 20_000),
    "closed functions": ("qwen-coder", "{}", "<tool_call><function=run>x</function>", 20_000),
    "parameters": (
        "qwen-coder",
        "{}</function></tool_call>",
        "<tool_call><function=run><parameter=x></parameter>x",
        5_000,
    ),
    "opened calls": ("hermes", "{}", "<tool_call>", 100_000),
    "opened objects": ("hermes", "{}", "<tool_call>{{", 100_000),
    "closed calls": ("hermes", "{}", "<tool_call>{{</tool_call>", 100_000),
    "opened lists": ("mistral", "{}", "[TOOL_CALLS][{{", 100_000),
    "names": ("mistral", "{}", "[TOOL_CALLS] run [CALL_ID] x", 100_000),
    "tagged": ("llama-3", "<|python_tag|>{}x", " ", 200_000),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_repetitive_replies_are_parsed_in_linear_time(case: str):
    format, frame, piece, count = ENDLESS[case]
    text = frame.format(piece.replace("{{", "{") * count)
    start = time.thread_time()
    result = TOOL_PARSERS[format](text, TOOLS)
    assert time.thread_time() - start < 5  # takes tenths of a second; quadratic time took over 20 s
    assert result.content == text
    assert 1 <= len(result.problems) <= MAX_PROBLEMS
    assert "".join(problem.text for problem in result.problems) == text


def test_calls_before_the_problem_limit_are_parsed():
    good, bad = '<tool_call>{"name": "run", "arguments": {}}</tool_call>', "<tool_call>{</tool_call>"
    result = TOOL_PARSERS["hermes"](good + bad * (MAX_PROBLEMS - 1) + good + bad + good + bad, TOOLS)
    assert len(result.calls) == 2
    assert len(result.problems) == MAX_PROBLEMS
    assert result.problems[-1].text == bad + good + bad
    assert "what follows is not read" in result.problems[-1].detail


def test_call_ids_are_made_in_linear_time():
    sampled = np.arange(1_000_000, dtype=np.int32)
    start = time.thread_time()
    ids = CallIdGenerator(sampled, 3)
    assert len({ids.make_id(number) for number in range(10_000)}) == 10_000
    assert time.thread_time() - start < 10  # digesting the reply for every call would process 40 GB
    assert ids.make_id(0) != CallIdGenerator(sampled, 4).make_id(0)


# -- the formats, as models write them --------------------------------------------------------------------------------


def xml(**arguments: str) -> str:
    source_text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=run>\n{source_text}</function>\n</tool_call>"


WRITTEN = [
    ("hermes", '<tool_call>{"name": "run"}</tool_call>', {}),
    ("hermes", '<tool_call>\n{"name": "run", "arguments": "{\\"code\\": \\"x\\"}"}\n</tool_call>', {"code": "x"}),
    (
        "hermes",
        '<tool_call>{"name": "run", "arguments": {"code": "</tool_call>"}}</tool_call>',
        {"code": "</tool_call>"},
    ),
    ("qwen-coder", xml(code="1", fast="True"), {"code": "1", "fast": True}),
    ("qwen-coder", xml(code="a </parameter> b"), {"code": "a </parameter> b"}),
    ("qwen-coder", xml(code="a\n\nb"), {"code": "a\n\nb"}),
    ("qwen-coder", xml(other="[1, 2]"), {"other": [1, 2]}),
    ("qwen-coder", xml(other=" two"), {"other": " two"}),
    ("qwen-coder", xml(), {}),
    ("llama-3", '{"name": "run", "parameters": {"code": "x"}}', {"code": "x"}),
    ("llama-3", '<|python_tag|>{"name": "run", "arguments": {"code": "x"}}', {"code": "x"}),
    ("llama-3", ' {"type": "function", "function": {"name": "run", "parameters": {}}} ', {}),
    ("mistral", '[TOOL_CALLS] [{"name": "run", "arguments": {"code": "x"}, "id": "abcdefghi"}]', {"code": "x"}),
    ("mistral", '[TOOL_CALLS]run[ARGS]{"code": "x"}', {"code": "x"}),
    ("mistral", '[TOOL_CALLS]run[CALL_ID]abcdefghi[ARGS]{"code": "x"}', {"code": "x"}),
]


@pytest.mark.parametrize(("format", "text", "arguments"), WRITTEN, ids=lambda value: str(value)[:40])
def test_calls_are_parsed_in_all_known_forms(format: str, text: str, arguments: dict):
    result = TOOL_PARSERS[format](text, TOOLS)
    assert result.problems == []
    assert [(call.name, json.loads(call.arguments)) for call in result.calls] == [("run", arguments)]
    assert result.content.strip() == ""
    assert all(call.id in (None, "abcdefghi") for call in result.calls)


def test_several_calls_in_one_reply_are_parsed():
    two = '{"name": "run", "parameters": {}}; {"name": "search", "parameters": {}}'
    assert [call.name for call in TOOL_PARSERS["llama-3"](two, TOOLS).calls] == ["run", "search"]
    two = "[TOOL_CALLS]run[ARGS]{}[TOOL_CALLS]search[ARGS]{}"
    assert [call.name for call in TOOL_PARSERS["mistral"](two, TOOLS).calls] == ["run", "search"]


@pytest.mark.parametrize(("text", "tools"), [('{"name": "Ada", "parameters": {}}', []), ('{"answer": 4}', TOOLS)])
def test_json_that_calls_no_offered_tool_is_text(text, tools):
    result = TOOL_PARSERS["llama-3"](text, tools)
    assert (result.content, result.calls, result.problems) == (text, [], [])


def test_the_tool_format_can_be_configured():
    render = load_renderer(directory("chatml"), TemplateRendererConfig(tool_format="hermes"))
    ids = get_oracle("chatml").ids('<tool_call>{"name": "run", "arguments": {}}</tool_call><|im_end|>')
    assert render.parse(np.array(ids), render.render(QUESTION)).message.tool_calls[0].name == "run"
