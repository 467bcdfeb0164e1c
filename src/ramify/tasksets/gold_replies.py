"""Gold replies of tasks that are solved with tools."""

import json
from collections.abc import Iterable
from typing import Any

import ramify as rf


def build_tool_call_replies(calls: Iterable[tuple[str, dict[str, Any]]]) -> list[rf.Message]:
    """Return one reply for each call, given as (tool, arguments)."""
    return [
        rf.Message("assistant", tool_calls=(rf.ToolCall(f"gold{number}", name, json.dumps(arguments)),))
        for number, (name, arguments) in enumerate(calls)
    ]
