"""Anthropic's Messages: `POST /v1/messages`.

A user message may hold results of tools, which are messages of their own here; an assistant message may hold thinking,
text and tool uses, which are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import RamifyError, RequestInvalid
from ramify.gateway.canonical import parse_arguments
from ramify.gateway.dialects.base import (
    MessageParser,
    ParsedRequest,
    build_function_tool,
    format_sse,
    get_http_status,
    parse_sampling_overrides,
    parse_tools,
)
from ramify.gateway.media import media_from_base64, media_from_url
from ramify.gateway.model_call import ModelReply, ModelRequest
from ramify.render import ToolSchema
from ramify.trace import Message, ToolCall, Usage

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesDialect:
    """Blocks in, blocks out."""

    keepalive = format_sse({"type": "ping"}, "ping")

    def parse_request(self, body: Mapping[str, Any]) -> ParsedRequest:
        reader = _BlockParser()
        if body.get("system"):
            system = body["system"]
            texts = [system] if isinstance(system, str) else [block.get("text", "") for block in system]
            reader.add_message("system", "\n\n".join(text for text in texts if text))
        for number, said in enumerate(body["messages"]):
            role = said.get("role")
            if role == "assistant":
                reader.add_assistant_blocks(said.get("content"))
            elif role in ("user", "system"):
                reader.add_user_blocks(role, said.get("content"))
            else:
                raise RequestInvalid(f"messages.{number}.role: found {role!r}")
        request = ModelRequest(
            messages=tuple(reader.messages),
            tools=parse_tools(body.get("tools"), body.get("tool_choice"), _parse_tool),
            model=str(body.get("model") or ""),
            sampling_overrides=parse_sampling_overrides(body, stop="stop_sequences", max_tokens="max_tokens"),
            media=reader.media,
        )
        return ParsedRequest(request, bool(body.get("stream")))

    def format_reply(self, parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
        usage = {**_format_input_usage(reply.usage), "output_tokens": reply.usage.completion_tokens}
        stop = {"stop_reason": STOP_REASONS[reply.finish_reason], "stop_sequence": None}
        return {**_envelope(parsed, reply), "content": _to_blocks(reply.message), **stop, "usage": usage}

    def stream_reply(self, parsed: ParsedRequest, reply: ModelReply) -> Iterator[bytes]:
        def say(kind: str, **fields: Any) -> bytes:
            return format_sse({"type": kind, **fields}, kind)

        usage = {**_format_input_usage(reply.usage), "output_tokens": 0}
        head = {**_envelope(parsed, reply), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield say("message_start", message=head)
        for index, block in enumerate(_to_blocks(reply.message)):
            empty, deltas = _split_block(block)
            yield say("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield say("content_block_delta", index=index, delta=delta)
            yield say("content_block_stop", index=index)
        stop = {"stop_reason": STOP_REASONS[reply.finish_reason], "stop_sequence": None}
        yield say("message_delta", delta=stop, usage={"output_tokens": reply.usage.completion_tokens})
        yield say("message_stop")

    def format_token_count(self, num_tokens: int) -> dict[str, Any]:
        return {"input_tokens": num_tokens}

    def format_error(self, error: RamifyError) -> dict[str, Any]:
        kind = ERROR_TYPES.get(get_http_status(error), "api_error")
        said = f"{error.name}: {error.message}"
        return {"type": "error", "error": {"type": kind, "message": said, "name": error.name}}

    def format_stream_error(self, error: RamifyError) -> bytes:
        return format_sse(self.format_error(error), "error")


class _BlockParser(MessageParser):
    """Reads messages of blocks."""

    def add_user_blocks(self, role: str, content: Any) -> None:
        """What a user says, and the results of tools in between, in their order."""
        said: list[Any] = []
        for block in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            if block.get("type") != "tool_result":
                said.append(block)
                continue
            if said:
                self.add_message(role, said)
            said = []
            self.add_message("tool", block.get("content"), tool_call_id=block["tool_use_id"])
        if said:
            self.add_message(role, said)

    def add_assistant_blocks(self, content: Any) -> None:
        """What the model said earlier."""
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        thoughts = [block["thinking"] for block in blocks if block.get("type") == "thinking"]
        calls = [
            ToolCall(block["id"], block["name"], msgspec.json.encode(block.get("input") or {}).decode())
            for block in blocks
            if block.get("type") == "tool_use"
        ]
        texts = [block for block in blocks if block.get("type") == "text"]
        self.add_message("assistant", texts, reasoning="".join(thoughts) or None, tool_calls=tuple(calls))

    def parse_part(self, entry: Any) -> Any:
        if not isinstance(entry, str) and entry.get("type") == "image":
            source = entry["source"]
            if source["type"] == "base64":
                return self.add_media(media_from_base64(source["data"], source["media_type"]))
            return self.add_media(media_from_url(source["url"]))
        return super().parse_part(entry)


def _parse_tool(tool: Mapping[str, Any]) -> Sequence[ToolSchema]:
    """A tool with a schema; those that only Anthropic's own servers run are left aside."""
    if "input_schema" not in tool:
        return ()
    return (build_function_tool(tool["name"], tool.get("description"), tool["input_schema"]),)


def _envelope(parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
    return {"id": f"msg_{reply.call_id}", "type": "message", "role": "assistant", "model": parsed.request.model}


def _format_input_usage(usage: Usage) -> dict[str, int]:
    """Input tokens as Anthropic counts them: those from the cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _to_blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.text or not message.tool_calls:
        blocks.append({"type": "text", "text": message.text})
    for call in message.tool_calls:
        table = parse_arguments(call.arguments)
        blocks.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": table if isinstance(table, dict) else {}}
        )
    return blocks


def _split_block(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as a stream begins it, and what it then adds."""
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
        return {**block, "thinking": ""}, [*deltas, {"type": "signature_delta", "signature": ""}]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    text = msgspec.json.encode(block["input"]).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
