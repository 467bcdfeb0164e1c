"""ASGI handlers of the gateway: parse a request, run the call, send the reply, and note whether it was delivered.

A waiting stream sends keepalives so that proxies do not drop the connection. Nothing is sent before the first
keepalive, so a call that fails quickly still gets its own HTTP status.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ramify.core.async_calls import fail_after
from ramify.core.errors import PeerRefused, QuotaExceeded, RamifyError, RequestInvalid
from ramify.infer.dialects.base import Dialect
from ramify.infer.dialects.http_format import decode_body, get_http_status
from ramify.infer.dialects.model_call import ModelReply, ParsedRequest
from ramify.infer.dialects.openai_responses import RESPONSE_PREFIX, ResponsesDialect
from ramify.infer.dialects.response_store import ResponseStore
from ramify.infer.gateway.canonical import check_num_chars, count_chars
from ramify.infer.gateway.config import REQUEST_TASK_PREFIX
from ramify.infer.gateway.request_dedup import SharedCall
from ramify.infer.gateway.session import RolloutSession
from ramify.model.render.tokenizer import OFFLOAD_MIN_CHARS

NO_RETRY_HEADERS = {"x-should-retry": "false"}  # the session has already retried the call if that could help
SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

SessionLookup = Callable[[HttpRequest], RolloutSession]


class DialectHandler(ABC):
    """Handles the requests of one path, in one dialect. A refused request is recorded in the trace of its rollout."""

    def __init__(self, get_session: SessionLookup, dialect: Dialect) -> None:
        self._get_session, self._dialect = get_session, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        http = HttpRequest(scope, receive)
        session: RolloutSession | None = None
        try:
            session = self._get_session(http)
            task = asyncio.current_task()
            assert task is not None
            task.set_name(f"{REQUEST_TASK_PREFIX}{session.trace.id}")  # so that a hang report names the rollout
            async with contextlib.AsyncExitStack() as held:
                held.enter_context(session.quota.open_request())
                parsed = await _parse_http_request(http, self._dialect, session, held)
                send_response = await self._start(http, session, parsed)
                await send_response(scope, receive, send)
        except RamifyError as error:
            if session is not None:
                _record_refusal(session, http, error)
            await _error_response(self._dialect, error)(scope, receive, send)
        except ClientDisconnect:
            return

    @abstractmethod
    async def _start(self, http: HttpRequest, session: RolloutSession, parsed: ParsedRequest) -> ASGIApp:
        """Start the work of a request; return what sends its response. Raises RamifyError."""


class TokenCountHandler(DialectHandler):
    """Handles requests for the number of prompt tokens."""

    async def _start(self, http: HttpRequest, session: RolloutSession, parsed: ParsedRequest) -> ASGIApp:
        return JSONResponse(self._dialect.format_token_count(await session.count_prompt_tokens(parsed.request)))


class ConversationHandler(DialectHandler):
    """Handles requests that create a conversation of the Responses API."""

    async def _start(self, http: HttpRequest, session: RolloutSession, parsed: ParsedRequest) -> ASGIApp:
        check_num_chars(count_chars(parsed.request), [session.max_path_tokens])
        if parsed.request.media:
            raise RequestInvalid("items: a conversation cannot begin with images; send them with the first request")
        conversation = session.response_store.create_conversation(parsed.request.messages)
        return JSONResponse(conversation.to_dict())


class ReplyHandler(DialectHandler):
    """Handles requests for a reply, whole or as a stream."""

    def __init__(self, get_session: SessionLookup, dialect: Dialect, keepalive_interval: float) -> None:
        super().__init__(get_session, dialect)
        self._keepalive_interval = keepalive_interval

    async def _start(self, http: HttpRequest, session: RolloutSession, parsed: ParsedRequest) -> ASGIApp:
        await session.check_and_process_images(parsed.request)
        return partial(self._send_when_ready, http, session, parsed, session.start_call(parsed.request))

    async def _send_when_ready(
        self,
        http: HttpRequest,
        session: RolloutSession,
        parsed: ParsedRequest,
        call: SharedCall[ModelReply],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        delivered = False
        disconnected = asyncio.create_task(_wait_for_disconnect(receive))
        reply_future = asyncio.ensure_future(_wait_and_store(call, session, parsed))
        try:
            delivered = await self._send_reply(parsed, reply_future, disconnected, scope, receive, send)
            if delivered and (error := _get_error(reply_future)) is not None:
                _record_refusal(session, http, error)
        finally:
            reply_future.cancel()
            disconnected.cancel()
            call.leave(delivered=delivered)

    async def _send_reply(
        self,
        parsed: ParsedRequest,
        reply_future: asyncio.Future[ModelReply],
        disconnected: asyncio.Task[None],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> bool:
        """Send the reply or error; return whether the client stayed connected until all of it was sent."""
        await asyncio.wait(
            {reply_future, disconnected},
            timeout=self._keepalive_interval if parsed.stream else None,
            return_when="FIRST_COMPLETED",
        )
        if disconnected.done():
            return False
        error = _get_error(reply_future) if reply_future.done() else None
        if error is not None or not parsed.stream:
            if error is not None:
                response = _error_response(self._dialect, error)
            else:
                response = JSONResponse(self._dialect.format_reply(parsed, reply_future.result()))
            await response(scope, receive, send)
            return not disconnected.done()
        await send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})
        while not reply_future.done():
            await send({"type": "http.response.body", "body": self._dialect.keepalive, "more_body": True})
            await asyncio.wait(
                {reply_future, disconnected}, timeout=self._keepalive_interval, return_when="FIRST_COMPLETED"
            )
            if disconnected.done():
                return False
        error = _get_error(reply_future)
        if error is not None:
            events = iter([self._dialect.format_stream_error(error)])
        else:
            events = self._dialect.stream_reply(parsed, reply_future.result())
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if disconnected.done():
                return False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


async def retrieve_response(get_session: SessionLookup, http: HttpRequest) -> Response:
    """Handle a request for a response by its id."""
    response_id = str(http.path_params["id"])
    stored = get_session(http).response_store.find_reply(response_id.removeprefix(RESPONSE_PREFIX))
    if stored is None:
        raise HTTPException(404, f"there is no response {response_id!r}")
    return JSONResponse(ResponsesDialect().format_reply(stored.parsed, stored.reply))


async def retrieve_conversation(get_session: SessionLookup, http: HttpRequest) -> Response:
    """Handle a request for a conversation by its id."""
    return JSONResponse(get_session(http).response_store.get_conversation(http.path_params["id"]).to_dict())


async def read_body(http: HttpRequest, session: RolloutSession, held: contextlib.AsyncExitStack) -> bytearray:
    """Read a body within the quota of its rollout; it counts until `held` is closed. Raises RamifyError."""
    is_compressed = http.headers.get("content-encoding", "identity") != "identity"
    length = None if is_compressed else http.headers.get("content-length")
    body = await session.quota.read_body(http.stream(), None if length is None else int(length), held)
    session.check_num_values(body.count(b","))
    return body


async def _parse_http_request(
    http: HttpRequest, dialect: Dialect, session: RolloutSession, held: contextlib.AsyncExitStack
) -> ParsedRequest:
    """Read and parse a request, including the retry headers. Its body counts until `held` is closed."""
    async with fail_after(session.call_timeout, "reading and parsing a request"):
        body = await read_body(http, session, held)
        parsed, ignored_fields = await session.quota.run(
            len(body) >= OFFLOAD_MIN_CHARS, 0, _parse_body, body, dialect, session.response_store
        )
    session.record_ignored_fields(ignored_fields)
    retry_header = http.headers.get("x-stainless-retry-count", "0")
    request = replace(
        parsed.request,
        model=parsed.request.model or session.policy.name,
        idempotency_key=http.headers.get("idempotency-key"),
        retry_count=int(retry_header) if retry_header.isdecimal() else 0,
        is_remote=True,
    )
    if parsed.previous_call_id is not None:
        request = session.continue_reply(request, parsed.previous_call_id)
    return replace(parsed, request=request)


def _parse_body(body: bytearray, dialect: Dialect, store: ResponseStore) -> tuple[ParsedRequest, Sequence[str]]:
    """Return the request of a body, and the fields of it that have no effect. Raises RequestInvalid."""
    try:
        fields = decode_body(body, dict[str, Any])
        return dialect.parse_request(fields, store), dialect.find_ignored_fields(fields)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RequestInvalid(f"the request cannot be parsed: {error!r}") from error
    except RecursionError as error:
        raise RequestInvalid("the body cannot be used: it is nested too deeply") from error


async def _wait_and_store(call: SharedCall[ModelReply], session: RolloutSession, parsed: ParsedRequest) -> ModelReply:
    """Wait for the reply of a call, and store it if later requests may refer to it."""
    reply = await call.wait()
    if parsed.is_stored:
        session.response_store.add(parsed, reply)
    return reply


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _record_refusal(session: RolloutSession, http: HttpRequest, error: RamifyError) -> None:
    session.record_refusal(http.url.path, get_http_status(error), error.name, error.message)


def _error_response(dialect: Dialect, error: RamifyError) -> JSONResponse:
    headers = None if isinstance(error, QuotaExceeded) else NO_RETRY_HEADERS
    return JSONResponse(dialect.format_error(error), get_http_status(error), headers=headers)


def _get_error(reply_future: asyncio.Future[ModelReply]) -> RamifyError | None:
    """Return the error of a finished call, or None. A call is cancelled only when its session ends."""
    if reply_future.cancelled():
        return PeerRefused("the rollout has ended")
    error = reply_future.exception()
    if error is None or isinstance(error, RamifyError):
        return error
    raise error
