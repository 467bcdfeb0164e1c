"""Gold replies of tasks that are solved with tools."""

import json
from collections.abc import Iterable
from typing import Any

from ramify.trace import Message, ToolCall


def build_tool_call_replies(calls: Iterable[tuple[str, dict[str, Any]]]) -> list[Message]:
    """Return one reply for each call, given as (tool, arguments)."""
    return [
        Message("assistant", tool_calls=(ToolCall(f"gold{number}", name, json.dumps(arguments)),))
        for number, (name, arguments) in enumerate(calls)
    ]
