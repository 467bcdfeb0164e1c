"""A conversation to learn from, and the tools that it may offer."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ramify.trace import Message, ToolCall

PARAMETER_NAMES = {
    "string": ["name", "title", "query", "city", "date", "status", "path", "order_id", "user_id", "text"],
    "integer": ["count", "limit", "size", "number", "year", "day", "amount", "id", "page"],
}


@dataclass(slots=True)
class DrillConversation:
    """Messages and the tools that are offered with them; every reply in it is trained."""

    messages: list[Message] = field(default_factory=list[Message])
    tools: Sequence[dict[str, Any]] = ()

    def add_message(self, role: str, text: str) -> None:
        """Append a message."""
        self.messages.append(Message(role, text))

    def add_tool_call(self, name: str, arguments: dict[str, Any], result: str) -> None:
        """A reply that calls a tool, and what the tool answers."""
        id = f"call{len(self.messages)}"
        self.messages.append(Message("assistant", tool_calls=(ToolCall(id, name, json.dumps(arguments)),)))
        self.messages.append(Message("tool", result, tool_call_id=id))


def make_tool(rng: random.Random, name: str, description: str = "") -> dict[str, Any]:
    """A tool with up to two parameters."""
    kinds = rng.choices(["string", "string", "integer"], k=rng.choice([0, 0, 1, 1, 1, 1, 2]))
    names = {rng.choice(PARAMETER_NAMES[kind]): {"type": kind} for kind in kinds}
    schema = {"type": "object", "properties": names, "required": list(names)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def draw_tool_call(rng: random.Random, words: Sequence[str], tool: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A call of the tool: its name, and values of the right types."""
    draw: dict[str, Callable[[], Any]] = {
        "string": lambda: rng.choice([rng.choice(words), f"{rng.choice('ABCDRX')}{rng.randint(1, 99)}"]),
        "integer": lambda: rng.randint(0, 99),
    }
    properties = tool["function"]["parameters"]["properties"]
    return tool["function"]["name"], {name: draw[schema["type"]]() for name, schema in properties.items()}
