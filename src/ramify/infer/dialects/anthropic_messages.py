"""Anthropic's Messages: `POST /v1/messages`.

A user message may contain tool results, which become separate messages. The thinking, text and tool uses of an
assistant message become one message.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ramify.core.config.schema import is_dict, is_list
from ramify.core.errors import RamifyError, RequestInvalid
from ramify.infer.dialects.base import Dialect
from ramify.infer.dialects.chat_format import parse_arguments
from ramify.infer.dialects.http_format import format_sse, get_http_status
from ramify.infer.dialects.media import media_from_base64, parse_client_url
from ramify.infer.dialects.message_parser import ContentPart, MessageParser, build_function_tool
from ramify.infer.dialects.model_call import ModelReply, ParsedRequest
from ramify.infer.dialects.response_store import ResponseStore
from ramify.model.render import ToolSchema
from ramify.trace import Message, TextPart, ToolCall, Usage

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
TEXT_SOURCES = ("text", "content")
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesDialect(Dialect):
    """The dialect of Anthropic's Messages API."""

    keepalive = format_sse({"type": "ping"}, "ping")
    own_fields = frozenset({"messages", "system", "stop_sequences", "output_format", "output_config"})

    def parse_request(self, body: Mapping[str, Any], store: ResponseStore) -> ParsedRequest:
        """Parse the body of a request to the Messages API."""
        parser = _BlockParser()
        if body.get("system"):
            system = body["system"]
            texts = [system] if isinstance(system, str) else [block.get("text", "") for block in system]
            parser.add_message("system", "\n\n".join(text for text in texts if text))
        for index, message in enumerate(body["messages"]):
            role = message.get("role")
            if role == "assistant":
                parser.add_assistant_blocks(message.get("content"))
            elif role in ("user", "system"):
                parser.add_user_blocks(role, message.get("content"))
            else:
                raise RequestInvalid(f"messages.{index}.role: expected user, assistant or system, found {role!r}")
        if parser.ends_with_assistant_text:
            parser.split_off_prefill()
        field_names = {"stop": "stop_sequences", "max_tokens": "max_tokens"}
        output_config: Mapping[str, Any] = body.get("output_config") or {}
        response_format = ("output_format", body.get("output_format") or output_config.get("format"))
        request = parser.build_request(
            body, body.get("tools"), _parse_tool, response_format=response_format, **field_names
        )
        return ParsedRequest(request, bool(body.get("stream")))

    def format_reply(self, parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
        """Return the reply as a `message` object."""
        usage = _format_usage(reply.usage, reply.usage.completion_tokens)
        content = _to_blocks(reply.message)
        return {**_envelope(parsed, reply), "content": content, **_format_stop(reply), "usage": usage}

    def stream_reply(self, parsed: ParsedRequest, reply: ModelReply) -> Iterator[bytes]:
        """Yield the reply as the events of the Messages API, from `message_start` to `message_stop`."""

        def event(event_type: str, **fields: Any) -> bytes:
            return format_sse({"type": event_type, **fields}, event_type)

        start = {"content": list[Any](), "stop_reason": None, "stop_sequence": None}
        usage = _format_usage(reply.usage, 0)
        yield event("message_start", message={**_envelope(parsed, reply), **start, "usage": usage})
        for index, block in enumerate(_to_blocks(reply.message)):
            empty, deltas = _split_block(block)
            yield event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        yield event("message_delta", delta=_format_stop(reply), usage={"output_tokens": reply.usage.completion_tokens})
        yield event("message_stop")

    def format_token_count(self, num_tokens: int) -> dict[str, Any]:
        """Return the number of prompt tokens as an object."""
        return {"input_tokens": num_tokens}

    def format_error(self, error: RamifyError) -> dict[str, Any]:
        """Return the failure as Anthropic's error object."""
        error_type = ERROR_TYPES.get(get_http_status(error), "api_error")
        message = f"{error.name}: {error.message}"
        return {"type": "error", "error": {"type": error_type, "message": message, "name": error.name}}

    def format_stream_error(self, error: RamifyError) -> bytes:
        """Return the failure as an `error` event."""
        return format_sse(self.format_error(error), "error")


class _BlockParser(MessageParser):
    """Parses messages that consist of blocks."""

    def add_user_blocks(self, role: str, content: Any) -> None:
        """Add the user content and the tool results of a message, in their order."""
        pending: list[Any] = []
        for block in _list_blocks(content):
            if block.get("type") != "tool_result":
                pending.append(block)
                continue
            if pending:
                self.add_message(role, pending)
            pending = []
            self.add_message("tool", block.get("content"), tool_call_id=block["tool_use_id"])
        if pending:
            self.add_message(role, pending)

    def add_assistant_blocks(self, content: Any) -> None:
        """Add an earlier reply of the model."""
        blocks = _list_blocks(content)
        thinking = [block["thinking"] for block in blocks if block.get("type") == "thinking"]
        calls = [
            ToolCall(block["id"], block["name"], msgspec.json.encode(block.get("input") or {}).decode())
            for block in blocks
            if block.get("type") == "tool_use"
        ]
        texts = [block for block in blocks if block.get("type") == "text"]
        self.add_message("assistant", texts, reasoning="".join(thinking) or None, tool_calls=tuple(calls))

    def parse_part(self, entry: Any) -> ContentPart:
        if not isinstance(entry, str) and entry.get("type") == "document":
            return TextPart(self._parse_document(entry))
        if not isinstance(entry, str) and entry.get("type") == "image":
            source = entry["source"]
            if source["type"] == "base64":
                return self.add_media(media_from_base64(source["data"], source["media_type"]))
            return self.add_media(parse_client_url(source["url"]))
        return super().parse_part(entry)

    def _parse_document(self, entry: Mapping[str, Any]) -> str:
        """Return a document as a text between tags. Raises RequestInvalid for one that is not a text."""
        source = entry["source"]
        if source["type"] not in TEXT_SOURCES:
            expected = "expected a source of type text, or of type content with texts"
            raise RequestInvalid(f"document: {expected}, found {source['type']!r}; send the text of the document")
        text = self.parse_content(source["data"] if source["type"] == "text" else source["content"])
        if not isinstance(text, str):
            raise RequestInvalid("document: expected texts, found images; send them outside the document")
        title = f" title={msgspec.json.encode(entry['title']).decode()}" if entry.get("title") else ""
        context = f"{entry['context']}\n" if entry.get("context") else ""
        return f"<document{title}>\n{context}{text}\n</document>\n"


def _list_blocks(content: Any) -> list[dict[str, Any]]:
    """Return the blocks of a message; content that is a text is one block."""
    return content if is_list(content) else [{"type": "text", "text": content or ""}]


def _parse_tool(tool: Mapping[str, Any]) -> ToolSchema | None:
    """Parse a tool with a schema; tools that run only on Anthropic's servers are ignored."""
    if "input_schema" not in tool:
        return None
    return build_function_tool(tool["name"], tool.get("description"), tool["input_schema"])


def _format_stop(reply: ModelReply) -> dict[str, str | None]:
    reason = STOP_REASONS[reply.finish_reason] if reply.stop_string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": reply.stop_string}


def _envelope(parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
    return {"id": f"msg_{reply.call_id}", "type": "message", "role": "assistant", "model": parsed.request.model}


def _format_usage(usage: Usage, output_tokens: int) -> dict[str, int]:
    """Return the token counts as Anthropic counts them, with cached tokens separate."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": output_tokens,
    }


def _to_blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.text or not message.tool_calls:
        blocks.append({"type": "text", "text": message.text})
    for call in message.tool_calls:
        arguments = parse_arguments(call.arguments)
        tool_input = arguments if is_dict(arguments) else dict[str, Any]()
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": tool_input})
    return blocks


def _split_block(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Split a block into the empty block that starts its stream and the deltas that follow."""
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
        return {**block, "thinking": ""}, [*deltas, {"type": "signature_delta", "signature": ""}]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    text = msgspec.json.encode(block["input"]).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
