"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from collections.abc import Iterator, Mapping
from typing import Any

from ramify.core.errors import RequestInvalid
from ramify.infer.dialects.base import Dialect
from ramify.infer.dialects.chat_format import (
    CONTINUE_FIELDS,
    UNSUPPORTED_FIELDS,
    check_supported,
    continues_final_message,
    format_envelope,
    format_message,
    format_tool_calls,
    format_usage,
    parse_messages,
    parse_tool,
)
from ramify.infer.dialects.http_format import SSE_DONE, format_sse
from ramify.infer.dialects.model_call import ModelReply, ParsedRequest
from ramify.infer.dialects.response_store import ResponseStore


class ChatCompletionsDialect(Dialect):
    """The dialect of OpenAI's Chat Completions API."""

    own_fields = frozenset(
        {
            "messages",
            "n",
            "stop",
            "max_completion_tokens",
            "stream_options",
            "response_format",
            "parallel_tool_calls",
            *CONTINUE_FIELDS,
            *UNSUPPORTED_FIELDS,
        }
    )

    def parse_request(self, body: Mapping[str, Any], store: ResponseStore) -> ParsedRequest:
        """Parse the body of a chat completion request."""
        check_supported(body)
        parser = parse_messages(body["messages"])
        if continues_final_message(body):
            parser.split_off_prefill()
        if body.get("n") not in (None, 1):
            raise RequestInvalid("n: expected 1; send the request again for another choice")
        has_new_limit = body.get("max_completion_tokens") is not None
        max_tokens = "max_completion_tokens" if has_new_limit else "max_tokens"
        response_format = ("response_format", body.get("response_format"))
        request = parser.build_request(
            body, body.get("tools"), parse_tool, response_format=response_format, stop="stop", max_tokens=max_tokens
        )
        options: Mapping[str, Any] = body.get("stream_options") or {}
        return ParsedRequest(request, bool(body.get("stream")), bool(options.get("include_usage")))

    def format_reply(self, parsed: ParsedRequest, reply: ModelReply) -> dict[str, Any]:
        """Return the reply as a `chat.completion` object."""
        message = format_message(reply.message)
        choice = {"index": 0, "message": message, "finish_reason": reply.finish_reason, "logprobs": None}
        envelope = format_envelope(f"chatcmpl-{reply.call_id}", "chat.completion", parsed.request.model)
        return {**envelope, "choices": [choice], "usage": format_usage(reply.usage)}

    def stream_reply(self, parsed: ParsedRequest, reply: ModelReply) -> Iterator[bytes]:
        """Yield the reply as `chat.completion.chunk` events."""
        envelope = format_envelope(f"chatcmpl-{reply.call_id}", "chat.completion.chunk", parsed.request.model)
        message = reply.message

        def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
            return format_sse({**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})

        yield chunk({"role": "assistant", "content": ""})
        if message.reasoning:
            yield chunk({"reasoning_content": message.reasoning})
        if message.text:
            yield chunk({"content": message.text})
        for index, call in enumerate(format_tool_calls(message.tool_calls)):
            arguments = call["function"]["arguments"]
            yield chunk({"tool_calls": [{"index": index, **call, "function": {**call["function"], "arguments": ""}}]})
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
        yield chunk({}, reply.finish_reason)
        if parsed.include_usage:
            yield format_sse({**envelope, "choices": [], "usage": format_usage(reply.usage)})
        yield SSE_DONE

    def format_token_count(self, num_tokens: int) -> dict[str, Any]:
        """Return the number of prompt tokens as an object."""
        return {"object": "chat.completion.input_tokens", "input_tokens": num_tokens}
