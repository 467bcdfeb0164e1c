"""The server's `ChatRenderer` on top of `ramify.render`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramify.errors import RequestInvalid, TemplateRefused
from ramify.infer.chat_renderer import ChatPrompt
from ramify.render import RenderedPrompt, Renderer
from ramify.trace import Message, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")


class TemplateChatRenderer:
    """A `ChatRenderer` that uses any `ramify.render.Renderer`."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.stop_ids = frozenset(renderer.stop_ids)
        self.max_token_chars = renderer.tokenizer.max_token_chars

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> ChatPrompt:
        """Render a conversation with the model's chat template. Raises if the messages are invalid."""
        parsed = [_parse_message(index, message) for index, message in enumerate(messages)]
        try:
            rendered = self._renderer.render(parsed, tools or ())
        except TemplateRefused as error:
            raise RequestInvalid(f"messages: {error.message}") from error
        except RecursionError as error:
            raise RequestInvalid("messages or tools: nested too deeply for the chat template") from error
        return ChatPrompt(rendered.token_ids.tolist(), rendered)

    def parse(self, token_ids: Sequence[int], prompt: ChatPrompt) -> dict[str, Any]:
        """Parse sampled tokens to the fields of an assistant message."""
        assert isinstance(prompt.rendered, RenderedPrompt)
        message = self._renderer.parse(list(token_ids), prompt.rendered).message
        fields: dict[str, Any] = {"content": message.text}
        if message.reasoning is not None:
            fields["reasoning_content"] = message.reasoning
        if message.tool_calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        return fields

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self._renderer.tokenizer.encode(text).ids.tolist()

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token, special tokens included."""
        return self._renderer.tokenizer.decode([token_id])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens without special tokens."""
        return self._renderer.tokenizer.decode(list(token_ids), keep_special_tokens=False)


def _parse_message(index: int, raw: Mapping[str, Any]) -> Message:
    key = f"messages.{index}"
    role = raw.get("role")
    if role not in ROLES:
        raise RequestInvalid(f"{key}.role: expected one of {', '.join(ROLES)}, got {role!r}")
    calls = raw.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestInvalid(f"{key}.tool_calls: expected a list, got {calls!r}")
    return Message(
        role=role,
        content=_parse_text(f"{key}.content", raw.get("content")),
        reasoning=_check_string(f"{key}.reasoning_content", raw.get("reasoning_content")),
        tool_calls=tuple(_parse_tool_call(f"{key}.tool_calls", call) for call in calls),
        tool_call_id=_check_string(f"{key}.tool_call_id", raw.get("tool_call_id")),
    )


def _check_string(key: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestInvalid(f"{key}: expected a string, got {value!r}")
    return value


def _parse_text(key: str, content: Any) -> str:
    """Return the text of a content field; parts that are not text are rejected, since this server has no images."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(_check_string(f"{key}.text", part.get("text")) or "" for part in content)
    raise RequestInvalid(f"{key}: expected text or text parts")


def _parse_tool_call(key: str, raw: Any) -> ToolCall:
    try:
        fields: list[Any] = [raw.get("id") or "", raw["function"]["name"], raw["function"].get("arguments", "{}")]
    except (TypeError, KeyError, AttributeError):
        fields = [None]
    if not all(isinstance(value, str) for value in fields):
        raise RequestInvalid(f"{key}: expected {{id, function: {{name, arguments}}}}, all of them strings, got {raw!r}")
    return ToolCall(*fields)
