"""From a row of a dataset to a conversation, in the forms in which they are shared.

A row has messages (and perhaps tools), or a prompt and a completion. Files disagree about details: arguments of calls
are text or tables, tools are a list or its JSON, and what is not there may be there as null.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ramify.errors import ConfigInvalid
from ramify.trace import Message, ToolCall
from ramify.train.sft.config import DataConfig

REASONING = ("reasoning", "reasoning_content", "thinking")
Row = Mapping[str, Any]
_checked = msgspec.msgpack.Decoder(Message).decode


@dataclass(frozen=True, slots=True)
class Chat:
    """One example: a conversation, and the tools that were offered."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    row: str = field(default="", compare=False)  # where it was found


def read_chats(rows: Iterable[Row], config: DataConfig) -> list[Chat]:
    """Every row as a conversation. Raises ConfigInvalid for the first row that is none."""
    found: list[Chat] = []
    for number, row in enumerate(rows, 1):
        place = f"row {number} of {config.path}"
        try:
            found.append(replace(read_chat(row, config), row=place))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigInvalid(f"data: {place} is no conversation: {error}") from error
    if not found:
        raise ConfigInvalid(f"data: {config.path} has no rows")
    return found


def read_chat(row: Row, config: DataConfig) -> Chat:
    if row.get(config.messages) not in (None, ""):  # a csv file writes nothing where a row has no value
        said = row[config.messages]
    elif config.prompt in row and config.completion in row:
        said = [*_as_messages(row[config.prompt], "user"), *_as_messages(row[config.completion], "assistant")]
    else:
        wanted = f"{config.messages!r}, nor {config.prompt!r} and {config.completion!r}"
        raise ValueError(f"it has no column {wanted}; it has {', '.join(row)}")
    messages = tuple(read_message(each) for each in _parsed(said))
    if not any(message.role in config.roles for message in messages):
        raise ValueError(f"nothing in it is said by {' or '.join(config.roles)}")
    tools = _parsed(row.get(config.tools) or [])
    return Chat(messages, tuple(_parsed(tool) for tool in tools))


def read_message(said: Mapping[str, Any]) -> Message:
    """A message in OpenAI's form."""
    if not isinstance(said.get("role"), str):
        raise ValueError(f"a message has no role: {str(said)[:80]}")
    message = Message(
        role=said["role"],
        content=_text(said.get("content")),
        reasoning=next((said[name] for name in REASONING if said.get(name) is not None), None),
        tool_calls=tuple(_call(number, call) for number, call in enumerate(_parsed(said.get("tool_calls") or []))),
        tool_call_id=said.get("tool_call_id"),
    )
    return _checked(msgspec.msgpack.encode(message))  # here, where the row is known


def _call(number: int, said: Mapping[str, Any]) -> ToolCall:
    function = said.get("function") or said
    arguments = function.get("arguments") or {}
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(said.get("id") or f"call{number}", function["name"], written)


def _as_messages(said: Any, role: str) -> list[Any]:
    return [{"role": role, "content": said}] if isinstance(said, str) else list(said)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    raise ValueError("a message has parts that are not text, which are not trained yet")


def _parsed(said: Any) -> Any:
    """JSON in a column of text."""
    return json.loads(said) if isinstance(said, str) else said
