"""The replies of a perfect agent, as a taskset's `gold` returns them.

A reply is a text, a dict in the form of a chat message, or a Message. `gold` returns one of them, or a list: one for
each time the agent speaks, those that call tools included.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from ramify.errors import EnvironmentFault
from ramify.trace import Message, ToolCall

KEYS = ("role", "content", "reasoning_content", "tool_calls")


def read_gold(gold: Any) -> list[str | Message]:
    """Return the replies in order. Raises EnvironmentFault that names the entry which is no reply."""
    replies = [gold] if isinstance(gold, str | Message | Mapping) else list(gold)
    return [_read_reply(reply, f"gold[{number}]") for number, reply in enumerate(replies)]


def _read_reply(reply: Any, place: str) -> str | Message:
    if isinstance(reply, str | Message):
        return reply
    if not isinstance(reply, Mapping):
        raise EnvironmentFault(f"{place}: expected a text, a dict or a Message, found a {type(reply).__qualname__}")
    for key in reply:
        if key not in KEYS:
            nearest = difflib.get_close_matches(str(key), KEYS, n=1)
            advice = f"did you mean {nearest[0]!r}?" if nearest else f"a reply has {', '.join(KEYS)}"
            raise EnvironmentFault(f"{place}: unknown key {key!r}; {advice}")
    role, content = reply.get("role", "assistant"), reply.get("content")
    if role != "assistant":
        raise EnvironmentFault(f"{place}: role {role!r}, expected 'assistant': tools and users answer by themselves")
    if not (content is None or isinstance(content, str)):
        raise EnvironmentFault(f"{place}.content: expected a text, found a {type(content).__qualname__}")
    calls = enumerate(reply.get("tool_calls") or ())
    return Message(
        "assistant",
        content or "",
        reply.get("reasoning_content"),
        tuple(_read_call(call, f"{place}.tool_calls[{number}]") for number, call in calls),
    )


def _read_call(call: Any, place: str) -> ToolCall:
    """Return a tool call. Its arguments are a dict or JSON text; OpenAI's form has both in a dict `function`."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise EnvironmentFault(f"{place} needs a name: {{'name': TOOL, 'arguments': {{...}}}}")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(str(call.get("id") or place), function["name"], text)
