"""OpenAI's Responses: `POST /v1/responses`.

A conversation is a list of items: the reasoning, text and tool calls of a reply are separate items, which become one
message. A request may refer to what the session stores: to a response (`previous_response_id`), to an item of one, or
to a conversation. A tool may be in a namespace; the model sees it as `NAMESPACE__NAME`, and its calls are returned with
namespace and name.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from ramify.core.config.schema import is_dict
from ramify.core.errors import RamifyError, RequestInvalid
from ramify.infer.dialects.base import Dialect
from ramify.infer.dialects.chat_format import parse_arguments
from ramify.infer.dialects.http_format import format_sse, get_error_code
from ramify.infer.dialects.message_parser import MessageParser, build_function_tool
from ramify.infer.dialects.model_call import SUMMARY_REQUEST, ModelReply, ParsedRequest
from ramify.infer.dialects.response_store import ResponseStore, StoredConversation
from ramify.model.render import ToolSchema
from ramify.trace import ToolCall, Usage

RESPONSE_PREFIX = "resp_"
CALL_TYPES = ("function_call", "custom_tool_call")
RESULT_TYPES = ("function_call_output", "custom_tool_call_output")
ENCRYPTED_REASONING = "reasoning.encrypted_content"
CUSTOM_TOOL_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ResponsesDialect(Dialect):
    """The dialect of OpenAI's Responses API."""

    own_fields = frozenset(
        {
            "input",
            "instructions",
            "previous_response_id",
            "conversation",
            "stop",
            "max_output_tokens",
            "include",
            "store",
            "text",
            "parallel_tool_calls",
        }
    )

    def parse_request(self, body: Mapping[str, Any], store: ResponseStore) -> ParsedRequest:
        """Parse the body of a request to the Responses API."""
        parser, conversation = _ItemParser(store), _find_conversation(body, store)
        previous_call_id = conversation.last_call_id if conversation else None
        if previous_response_id := body.get("previous_response_id"):
            if conversation is not None:
                raise RequestInvalid("previous_response_id: not possible together with conversation; leave one out")
            previous_call_id = str(previous_response_id).removeprefix(RESPONSE_PREFIX)
        if body.get("instructions") and not previous_call_id:
            parser.add_message("system", body["instructions"])
        if conversation is not None and not previous_call_id:
            parser.messages += conversation.messages
        items = body.get("input")
        parser.add_items([{"role": "user", "content": items}] if isinstance(items, str) else items or [])
        tools, namespaced_tools = _flatten_namespaces(body.get("tools") or ())
        text_options: Mapping[str, Any] = body.get("text") or {}
        text_format = text_options.get("format")
        response_format = ("text.format", text_format)
        field_names = {"stop": "stop", "max_tokens": "max_output_tokens"}
        request = parser.build_request(body, tools, _parse_tool, response_format=response_format, **field_names)
        custom_tools = frozenset(tool["name"] for tool in tools if tool.get("type") == "custom")
        return ParsedRequest(
            request,
            bool(body.get("stream")),
            custom_tools=custom_tools,
            namespaced_tools=namespaced_tools,
            previous_call_id=previous_call_id,
            conversation_id=conversation.id if conversation else None,
            is_stored=body.get("store") is not False or conversation is not None,
            text_format={"type": text_format} if isinstance(text_format, str) else text_format,
            encrypts_reasoning=ENCRYPTED_REASONING in (body.get("include") or ()),
        )

    def format_reply(self, parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
        """Return the reply as a `response` object."""
        return _build_response(parsed, reply, _to_items(parsed, reply))

    def stream_reply(self, parsed: ParsedRequest, reply: ModelReply) -> Iterator[bytes]:
        """Yield the reply as the events of the Responses API, numbered from 0."""
        sequence_number = 0

        def event(event_type: str, **fields: Any) -> bytes:
            nonlocal sequence_number
            sequence_number += 1
            return format_sse({"type": event_type, "sequence_number": sequence_number - 1, **fields}, event_type)

        in_progress = {"status": "in_progress", "incomplete_details": None, "usage": None}
        initial_response = _build_response(parsed, reply, []) | in_progress
        yield event("response.created", response=initial_response)
        yield event("response.in_progress", response=initial_response)
        items = _to_items(parsed, reply)
        for index, item in enumerate(items):
            position_fields = {"output_index": index, "item_id": item["id"]}
            yield event("response.output_item.added", output_index=index, item=_empty_item(item))
            for event_type, fields in _item_events(item):
                yield event(event_type, **position_fields, **fields)
            yield event("response.output_item.done", output_index=index, item=item)
        final_response = _build_response(parsed, reply, items)
        yield event(f"response.{final_response['status']}", response=final_response)

    def format_token_count(self, num_tokens: int) -> dict[str, Any]:
        """Return the number of prompt tokens as an object."""
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    def format_stream_error(self, error: RamifyError) -> bytes:
        """Return the failure as an `error` event."""
        fields = {"code": get_error_code(error), "message": error.message, "param": None, "sequence_number": 0}
        return format_sse({"type": "error", **fields}, "error")


class CompactionDialect(ResponsesDialect):
    """The dialect of `/responses/compact`: the model summarizes the conversation, and the client continues with it."""

    def parse_request(self, body: Mapping[str, Any], store: ResponseStore) -> ParsedRequest:
        """Parse a conversation and add the request for a summary."""
        parsed = super().parse_request({**body, "tools": (), "tool_choice": "none", "stream": False}, store)
        messages = (*parsed.request.messages, SUMMARY_REQUEST)
        return replace(parsed, request=replace(parsed.request, messages=messages))

    def format_reply(self, parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
        """Return the user's messages and the summary as items."""
        questions = [message.text for message in parsed.request.messages[:-1] if message.role == "user"]
        items: list[dict[str, Any]] = [
            {
                "type": "message",
                "id": f"msg_{reply.call_id}_{index}",
                "role": "user",
                "status": "completed",
                "content": [{"type": "input_text", "text": text}],
            }
            for index, text in enumerate(questions)
        ]
        summary = {"id": f"cmp_{reply.call_id}", "encrypted_content": _encode_text(reply.message.text.strip())}
        items.append({"type": "compaction", **summary})
        fields = {"id": f"{RESPONSE_PREFIX}{reply.call_id}", "object": "response.compaction"}
        return {**fields, "created_at": reply.created_at, "output": items, "usage": _format_usage(reply.usage)}


class ConversationDialect(ResponsesDialect):
    """The dialect of `/conversations`, which creates a conversation of some items."""

    own_fields = frozenset({"items"})

    def parse_request(self, body: Mapping[str, Any], store: ResponseStore) -> ParsedRequest:
        """Parse the items with which a conversation begins."""
        return super().parse_request({"input": body.get("items")}, store)


class _ItemParser(MessageParser):
    """Parses items; the items of one reply are collected into one message. `store` has the items given by id."""

    def __init__(self, store: ResponseStore) -> None:
        super().__init__()
        self._store = store

    def add_items(self, items: Sequence[Mapping[str, Any]]) -> None:
        """Add the messages of a list of items."""
        reasoning, contents, calls = list[str](), list[Any](), list[ToolCall]()

        def flush() -> None:
            if reasoning or contents or calls:
                thinking = "\n".join(reasoning) or None
                self.add_message("assistant", list(contents), reasoning=thinking, tool_calls=tuple(calls))
                for collected in (reasoning, contents, calls):
                    collected.clear()

        for index, item in enumerate(items):
            if item.get("type") == "item_reference" or set(item) == {"id"}:
                item = self._find_item(str(item["id"]))
            item_type = item.get("type") or "message"
            if item_type == "reasoning":
                if contents or calls:
                    flush()
                reasoning += _parse_reasoning(item)
            elif item_type == "message" and item.get("role") == "assistant":
                content = item.get("content") or ""
                contents += [{"type": "text", "text": content}] if isinstance(content, str) else content
            elif item_type in CALL_TYPES:
                calls.append(ToolCall(item["call_id"], _flat_name(item), _item_arguments(item)))
            elif item_type in RESULT_TYPES:
                flush()
                self.add_message("tool", item.get("output"), tool_call_id=item["call_id"])
            elif item_type == "compaction":
                flush()
                self.add_message("assistant", _decode_text(item.get("encrypted_content")))
            elif item_type == "message":
                flush()
                role = "system" if item.get("role") in ("system", "developer") else "user"
                self.add_message(role, item.get("content"))
            else:
                raise RequestInvalid(f"input.{index}.type: found {item_type!r}, which is not supported")
        flush()

    def _find_item(self, item_id: str) -> dict[str, Any]:
        """Return an item of an earlier reply. Raises RequestInvalid if it is not stored."""
        call_id = item_id.partition("_")[2]
        for candidate in (call_id, call_id.rpartition("_")[0]):  # the id of a tool call ends in its index
            stored = self._store.find_reply(candidate)
            for item in [] if stored is None else _to_items(stored.parsed, stored.reply):
                if item["id"] == item_id:
                    return item
        raise RequestInvalid(f"input: the item {item_id!r} is not stored here; send the item itself")


def _find_conversation(body: Mapping[str, Any], store: ResponseStore) -> StoredConversation | None:
    """Return the conversation that a request names, or None."""
    conversation = body.get("conversation")
    if not conversation:
        return None
    return store.get_conversation(str(conversation["id"] if is_dict(conversation) else conversation))


def _parse_reasoning(item: Mapping[str, Any]) -> list[str]:
    """Return the texts of a reasoning item. Content that another server has encrypted is left out."""
    texts = [str(part.get("text", "")) for part in item.get("content") or item.get("summary") or ()]
    encrypted = item.get("encrypted_content")
    if texts or not isinstance(encrypted, str):
        return texts
    text = _decode_text(encrypted)
    return [text] if text else []


def _encode_text(text: str) -> str:
    """Encode a text that the client keeps for the server; it is the client's own, so it is not encrypted."""
    return base64.b64encode(text.encode()).decode()


def _decode_text(encoded: Any) -> str:
    """Decode a text that the client kept; content of another server becomes an empty text."""
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except (TypeError, ValueError):
        return ""


def _item_arguments(item: Mapping[str, Any]) -> str:
    if item["type"] == "custom_tool_call":
        return msgspec.json.encode({"input": item.get("input") or ""}).decode()
    return str(item.get("arguments") or "{}")


def _flatten_namespaces(
    tools: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], dict[str, tuple[str, str]]]:
    """Return all tools, with flat names, and the namespace and name of each namespaced tool by its flat name."""
    flat: list[Mapping[str, Any]] = []
    namespaced: dict[str, tuple[str, str]] = {}
    for tool in tools:
        if tool.get("type") != "namespace":
            flat.append(tool)
            continue
        for inner in tool.get("tools") or ():
            name = _flat_name({"namespace": tool["name"], "name": inner["name"]})
            namespaced[name] = (tool["name"], inner["name"])
            flat.append({**inner, "name": name})
    names = [tool["name"] for tool in flat if "name" in tool]
    for name in namespaced:
        if names.count(name) > 1:
            raise RequestInvalid(f"tools: two tools are named {name!r} with their namespace; rename one")
    return flat, namespaced


def _flat_name(tool: Mapping[str, Any]) -> str:
    """Return the flat name of a tool or call, by which the model sees it."""
    namespace = tool.get("namespace")
    return f"{namespace}__{tool['name']}" if namespace else tool["name"]


def _parse_tool(tool: Mapping[str, Any]) -> ToolSchema | None:
    """Parse a function, or a free-text tool as a function of one string; tools of OpenAI's servers are ignored."""
    if tool.get("type") not in ("function", "custom"):
        return None
    schema = CUSTOM_TOOL_SCHEMA if tool["type"] == "custom" else tool.get("parameters")
    return build_function_tool(tool["name"], tool.get("description"), schema)


def _build_response(parsed: ParsedRequest, reply: ModelReply, items: list[dict[str, Any]]) -> dict[str, Any]:
    is_truncated = reply.finish_reason == "length"
    return {
        "id": f"{RESPONSE_PREFIX}{reply.call_id}",
        "object": "response",
        "created_at": reply.created_at,
        "status": "incomplete" if is_truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": parsed.request.model,
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": f"{RESPONSE_PREFIX}{parsed.previous_call_id}" if parsed.previous_call_id else None,
        "conversation": {"id": parsed.conversation_id} if parsed.conversation_id else None,
        "text": {"format": parsed.text_format or {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "usage": _format_usage(reply.usage),
    }


def _format_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _to_items(parsed: ParsedRequest, reply: ModelReply) -> list[dict[str, Any]]:
    message, items = reply.message, list[dict[str, Any]]()
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        item: dict[str, Any] = {"type": "reasoning", "id": f"rs_{reply.call_id}", "summary": summary}
        if parsed.encrypts_reasoning:
            item["encrypted_content"] = _encode_text(message.reasoning)
        items.append(item)
    if message.text or not message.tool_calls:
        part: dict[str, Any] = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        fields = {"type": "message", "id": f"msg_{reply.call_id}", "role": "assistant", "status": "completed"}
        items.append({**fields, "content": [part]})
    for index, call in enumerate(message.tool_calls):
        namespace, name = parsed.namespaced_tools.get(call.name, (None, call.name))
        fields = {"id": f"fc_{reply.call_id}_{index}", "call_id": call.id, "name": name, "status": "completed"}
        if namespace is not None:
            fields["namespace"] = namespace
        if call.name in parsed.custom_tools:
            items.append({"type": "custom_tool_call", **fields, "input": _custom_tool_input(call)})
        else:
            items.append({"type": "function_call", **fields, "arguments": call.arguments})
    return items


def _custom_tool_input(call: ToolCall) -> str:
    arguments = parse_arguments(call.arguments)
    return str(arguments.get("input", "")) if is_dict(arguments) else call.arguments


def _empty_item(item: dict[str, Any]) -> dict[str, Any]:
    """Return the empty item with which a stream starts an item."""
    empty: dict[str, Any] = {"content": [], "summary": [], "arguments": "", "input": "", "status": "in_progress"}
    return {name: empty.get(name, value) for name, value in item.items()}


def _item_events(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events between the start and the end of an item."""
    if item["type"] == "message":
        (part,) = item["content"]
        position_fields = {"content_index": 0}
        yield "response.content_part.added", {**position_fields, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**position_fields, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**position_fields, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**position_fields, "part": part}
    elif item["type"] == "reasoning":
        (part,) = item["summary"]
        position_fields = {"summary_index": 0}
        yield "response.reasoning_summary_part.added", {**position_fields, "part": {**part, "text": ""}}
        yield "response.reasoning_summary_text.delta", {**position_fields, "delta": part["text"]}
        yield "response.reasoning_summary_text.done", {**position_fields, "text": part["text"]}
        yield "response.reasoning_summary_part.done", {**position_fields, "part": part}
    elif item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
        yield "response.function_call_arguments.done", {"arguments": item["arguments"], "name": item["name"]}
    else:
        yield "response.custom_tool_call_input.delta", {"delta": item["input"]}
        yield "response.custom_tool_call_input.done", {"input": item["input"]}
