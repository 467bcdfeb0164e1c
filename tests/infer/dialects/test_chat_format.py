"""OpenAI's chat format: what is formatted can be parsed, and clients may be sloppy."""

import msgspec
import pytest

from ramify.core.errors import ProviderError, RequestInvalid
from ramify.infer.dialects.chat_format import (
    format_message,
    format_usage,
    parse_chat_completion,
    parse_messages,
    parse_tool,
)
from ramify.trace import Media, MediaPart, Message, TextPart, ToolCall, Usage

IMAGE = Media.from_bytes(b"hi", "image/png")
LINK = Media.from_bytes(b"http://host/image.png", "text/uri-list")
MESSAGES = [
    Message("system", "Be kind."),
    Message("user", (TextPart("Look:"), MediaPart(IMAGE.hash), MediaPart(LINK.hash))),
    Message("assistant", "", "I look.", (ToolCall("c1", "look", '{"at": "é"}'),)),
    Message("tool", "a cat", tool_call_id="c1"),
    Message("assistant", "A cat."),
]


def test_results_of_the_older_function_calls_follow_their_call():
    call = {"name": "look", "arguments": '{"at": "x"}'}
    history = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "look", "content": "a cat"},
    ]
    reply, result = parse_messages(history).messages
    assert (reply.tool_calls[0].name, reply.tool_calls[0].arguments) == ("look", '{"at": "x"}')
    assert result == Message("tool", "a cat", tool_call_id=reply.tool_calls[0].id)


def test_formatted_messages_are_parsed_to_the_same_messages():
    media = {entry.hash: entry for entry in (IMAGE, LINK)}
    parser = parse_messages([format_message(message, media) for message in MESSAGES])
    assert parser.messages == MESSAGES
    assert parser.media == media


def test_content_is_null_beside_tool_calls_only():
    assert format_message(MESSAGES[2])["content"] is None
    assert format_message(Message("assistant", ""))["content"] == ""
    assert format_message(MESSAGES[2])["reasoning_content"] == "I look."
    assert "reasoning_content" not in format_message(MESSAGES[2], with_reasoning=False)


def test_roles_have_aliases_and_leading_system_messages_are_one():
    messages = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "x"},
        {"role": "function", "content": "y"},
        {"role": "system", "content": "late"},
    ]
    parsed = parse_messages(messages).messages
    assert [(message.role, message.text) for message in parsed] == [
        ("system", "a\n\nb"),
        ("user", "x"),
        ("tool", "y"),
        ("system", "late"),
    ]
    with pytest.raises(RequestInvalid, match=r"messages\.0\.role: expected one of .*, got 'wizard'"):
        parse_messages([{"role": "wizard"}])


def test_arguments_may_be_an_object_and_reasoning_may_have_another_name():
    function = {"name": "f", "arguments": {"x": 1}}
    raw = {"role": "assistant", "reasoning": "hm", "tool_calls": [{"id": None, "function": function}]}
    assert parse_messages([raw]).messages == [Message("assistant", "", "hm", (ToolCall("", "f", '{"x":1}'),))]


def test_a_tool_is_its_name_description_and_parameters():
    schema = {"type": "object", "properties": {"x": {"type": "string"}}}
    tool = {"type": "function", "function": {"strict": True, "parameters": schema, "description": "d", "name": "f"}}
    assert parse_tool(tool) == {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    assert parse_tool({"function": {"name": "f"}}) == {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
    assert parse_tool({"type": "web_search"}) is None


def test_a_completion_is_parsed_to_message_finish_reason_and_usage():
    usage = Usage(7, 5, 3)
    choice = {"message": format_message(MESSAGES[2]), "finish_reason": "length"}
    body = msgspec.json.encode({"choices": [choice], "usage": format_usage(usage)})
    assert parse_chat_completion(body, "http://host") == (MESSAGES[2], "length", usage)
    with pytest.raises(ProviderError, match=r"http://host sent an unexpected response .*: \{\}"):
        parse_chat_completion(b"{}", "http://host")
