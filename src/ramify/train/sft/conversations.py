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
from ramify.train.sft.config import SftDataConfig

REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")
DatasetRow = Mapping[str, Any]
_decode_message = msgspec.msgpack.Decoder(Message).decode


@dataclass(frozen=True, slots=True)
class SftConversation:
    """One example: a conversation, and the tools that were offered."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    location: str = field(default="", compare=False)  # where it was found


def parse_conversations(rows: Iterable[DatasetRow], config: SftDataConfig) -> list[SftConversation]:
    """Every row as a conversation. Raises ConfigInvalid for the first row that is none."""
    found: list[SftConversation] = []
    for number, row in enumerate(rows, 1):
        place = f"row {number} of {config.path}"
        try:
            found.append(replace(parse_conversation(row, config), location=place))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigInvalid(f"data: {place} is no conversation: {error}") from error
    if not found:
        raise ConfigInvalid(f"data: {config.path} has no rows")
    return found


def parse_conversation(row: DatasetRow, config: SftDataConfig) -> SftConversation:
    if row.get(config.messages) not in (None, ""):  # a csv file writes nothing where a row has no value
        said = row[config.messages]
    elif config.prompt in row and config.completion in row:
        said = [*_to_messages(row[config.prompt], "user"), *_to_messages(row[config.completion], "assistant")]
    else:
        wanted = f"{config.messages!r}, nor {config.prompt!r} and {config.completion!r}"
        raise ValueError(f"it has no column {wanted}; it has {', '.join(row)}")
    messages = tuple(parse_message(each) for each in _parse_json(said))
    if not any(message.role in config.roles for message in messages):
        raise ValueError(f"nothing in it is said by {' or '.join(config.roles)}")
    tools = _parse_json(row.get(config.tools) or [])
    return SftConversation(messages, tuple(_parse_json(tool) for tool in tools))


def parse_message(raw: Mapping[str, Any]) -> Message:
    """A message in OpenAI's form."""
    if not isinstance(raw.get("role"), str):
        raise ValueError(f"a message has no role: {str(raw)[:80]}")
    message = Message(
        role=raw["role"],
        content=_join_text_parts(raw.get("content")),
        reasoning=next((raw[name] for name in REASONING_KEYS if raw.get(name) is not None), None),
        tool_calls=tuple(
            _parse_tool_call(number, call) for number, call in enumerate(_parse_json(raw.get("tool_calls") or []))
        ),
        tool_call_id=raw.get("tool_call_id"),
    )
    return _decode_message(msgspec.msgpack.encode(message))  # here, where the row is known


def _parse_tool_call(index: int, raw: Mapping[str, Any]) -> ToolCall:
    function = raw.get("function") or raw
    arguments = function.get("arguments") or {}
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(raw.get("id") or f"call{index}", function["name"], written)


def _to_messages(value: Any, role: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _join_text_parts(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if all(part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    raise ValueError("a message has parts that are not text, which are not trained yet")


def _parse_json(value: Any) -> Any:
    """JSON in a column of text."""
    return json.loads(value) if isinstance(value, str) else value
