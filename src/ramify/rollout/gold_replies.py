"""The replies of a perfect agent, parsed from the result of a taskset's `gold` hook.

A reply is a text, a dict in the form of a chat message, or a Message. `gold` returns one reply, or a list with one
reply for each model call, including those with tool calls.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

from ramify.core.errors import EnvironmentFault
from ramify.core.names import suggest
from ramify.trace import Message, ToolCall

REPLY_KEYS = ("role", "content", "reasoning_content", "tool_calls")


def parse_gold_replies(gold: Any) -> list[str | Message]:
    """Return the replies in order. Raises EnvironmentFault, which names the invalid reply."""
    replies: list[Any] = [gold] if isinstance(gold, str | Message | Mapping) else list(gold)
    return [_parse_reply(reply, f"gold[{index}]") for index, reply in enumerate(replies)]


def _parse_reply(reply: Any, location: str) -> str | Message:
    if isinstance(reply, str | Message):
        return reply
    if not isinstance(reply, Mapping):
        raise EnvironmentFault(f"{location}: expected a text, a dict or a Message, found a {type(reply).__qualname__}")
    fields = cast(Mapping[str, Any], reply)
    for key in fields:
        if key not in REPLY_KEYS:
            hint = suggest(str(key), REPLY_KEYS, f"a reply has {', '.join(REPLY_KEYS)}")
            raise EnvironmentFault(f"{location}: unknown key {key!r}; {hint}")
    role, content = fields.get("role", "assistant"), fields.get("content")
    if role != "assistant":
        raise EnvironmentFault(f"{location}: role {role!r}, expected 'assistant': only the agent's replies are given")
    if not (content is None or isinstance(content, str)):
        raise EnvironmentFault(f"{location}.content: expected a text, found a {type(content).__qualname__}")
    calls = enumerate(fields.get("tool_calls") or ())
    tool_calls = tuple(_parse_tool_call(call, f"{location}.tool_calls[{index}]") for index, call in calls)
    return Message("assistant", content or "", fields.get("reasoning_content"), tool_calls)


def _parse_tool_call(call: Any, location: str) -> ToolCall:
    """Return a tool call. Its arguments are a dict or JSON text; in OpenAI's format, name and arguments are in a dict
    `function`."""
    fields: Mapping[str, Any] = cast(Mapping[str, Any], call) if isinstance(call, Mapping) else {}
    function: Any = fields.get("function", fields)
    called: Mapping[str, Any] = cast(Mapping[str, Any], function) if isinstance(function, Mapping) else {}
    if not isinstance(called.get("name"), str):
        raise EnvironmentFault(f"{location} needs a name: {{'name': TOOL, 'arguments': {{...}}}}")
    arguments: Any = called.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(str(fields.get("id") or location), called["name"], text)
