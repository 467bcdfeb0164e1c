"""Chat for the server: messages of the OpenAI form through `ramify.render`, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramify.errors import RequestInvalid, TemplateRefused
from ramify.infer.rendering import Prompt
from ramify.render import RenderedPrompt, Renderer
from ramify.trace import Message, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")


class TemplateChat:
    """The server's `ChatRenderer` over any `ramify.render.Renderer`."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.stop_ids = frozenset(renderer.stop_ids)
        self.longest_token = renderer.tokenizer.max_token_chars

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Prompt:
        found = [_message(number, message) for number, message in enumerate(messages)]
        try:
            rendered = self._renderer.render(found, tools or ())
        except TemplateRefused as error:
            raise RequestInvalid(f"messages: {error.message}") from error
        except RecursionError as error:
            raise RequestInvalid("messages or tools: nested too deeply for the chat template") from error
        return Prompt(rendered.token_ids.tolist(), rendered)

    def parse(self, ids: Sequence[int], prompt: Prompt) -> dict[str, Any]:
        assert isinstance(prompt.source, RenderedPrompt)
        message = self._renderer.parse(list(ids), prompt.source).message
        said: dict[str, Any] = {"content": message.text}
        if message.reasoning is not None:
            said["reasoning_content"] = message.reasoning
        if message.tool_calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        return said

    def encode(self, text: str) -> list[int]:
        return self._renderer.tokenizer.encode(text).ids.tolist()

    def spell(self, token: int) -> str:
        return self._renderer.tokenizer.decode([token])

    def decode(self, ids: Sequence[int]) -> str:
        return self._renderer.tokenizer.decode(list(ids), keep_special_tokens=False)


def _message(number: int, said: Mapping[str, Any]) -> Message:
    key = f"messages.{number}"
    role = said.get("role")
    if role not in ROLES:
        raise RequestInvalid(f"{key}.role: expected one of {', '.join(ROLES)}, got {role!r}")
    calls = said.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RequestInvalid(f"{key}.tool_calls: expected a list, got {calls!r}")
    return Message(
        role=role,
        content=_text(f"{key}.content", said.get("content")),
        reasoning=_string(f"{key}.reasoning_content", said.get("reasoning_content")),
        tool_calls=tuple(_call(f"{key}.tool_calls", call) for call in calls),
        tool_call_id=_string(f"{key}.tool_call_id", said.get("tool_call_id")),
    )


def _string(key: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestInvalid(f"{key}: expected a string, got {value!r}")
    return value


def _text(key: str, content: Any) -> str:
    """Content as text; parts that are not text are refused, since this server shows the model no images."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(_string(f"{key}.text", part.get("text")) or "" for part in content)
    raise RequestInvalid(f"{key}: expected text or text parts")


def _call(key: str, call: Any) -> ToolCall:
    try:
        found: list[Any] = [call.get("id") or "", call["function"]["name"], call["function"].get("arguments", "{}")]
    except (TypeError, KeyError, AttributeError):
        found = [None]
    if not all(isinstance(each, str) for each in found):
        raise RequestInvalid(
            f"{key}: expected {{id, function: {{name, arguments}}}}, all of them strings, got {call!r}"
        )
    return ToolCall(*found)
