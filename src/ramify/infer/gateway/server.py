"""The gateway: one HTTP server for all rollouts of a process. The API key of a request selects the rollout.

A reply is in the trace before its first byte is sent. If the client disconnects, the recorded reply stays in the trace
but counts as undelivered, and an equal request gets it.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ramify.core.async_calls import AsyncService
from ramify.core.errors import PeerRefused, RamifyError
from ramify.infer.dialects.anthropic_messages import MessagesDialect
from ramify.infer.dialects.http_format import get_http_status
from ramify.infer.dialects.openai_chat import ChatCompletionsDialect
from ramify.infer.dialects.openai_responses import CompactionDialect, ConversationDialect, ResponsesDialect
from ramify.infer.gateway.config import MCP_PATH, Endpoint
from ramify.infer.gateway.http_handlers import (
    ConversationHandler,
    ReplyHandler,
    SessionLookup,
    TokenCountHandler,
    retrieve_conversation,
    retrieve_response,
)
from ramify.infer.gateway.mcp_server import McpServer
from ramify.infer.gateway.request_quota import MAX_RENDERED_CHARS, SharedCapacity
from ramify.infer.gateway.session import RolloutSession
from ramify.processes.wire.http_server import HttpServer

NOT_FOUND = "not_found_error"
PREFIXES = ("/v1", "/v1/v1")  # Anthropic's client appends /v1 to its base URL, OpenAI's does not


class Gateway(AsyncService):
    """Serves sessions over HTTP, from `register` to `unregister`. Use it with `async with`, or `start` and `close`.

    It listens on a free port of the loopback address. A waiting stream sends a keepalive every `keepalive_interval`
    seconds.
    """

    def __init__(self, *, keepalive_interval: float = 5.0) -> None:
        self._keepalive_interval = keepalive_interval
        self._sessions: dict[str, RolloutSession] = {}
        self._rendered_chars = SharedCapacity(MAX_RENDERED_CHARS)
        self._mcp_server = McpServer(self.get_session)
        self._server = HttpServer(self._build_app(), "127.0.0.1", name="gateway")

    @property
    def address(self) -> str:
        """The URL of the server, without a path."""
        return self._server.address

    async def start(self) -> Self:
        """Start listening."""
        await self._server.start()
        return self

    async def close(self) -> None:
        """Unregister all sessions and stop the server."""
        for session in list(self._sessions.values()):
            self.unregister(session)
        await self._mcp_server.close()
        await self._server.close()

    def register(self, session: RolloutSession) -> Endpoint:
        """Serve this session and return its endpoint."""
        session.quota.rendered_chars = self._rendered_chars
        self._sessions[session.secret] = session
        return Endpoint(f"{self.address}/v1", session.secret, session.policy.name)

    def unregister(self, session: RolloutSession) -> None:
        """Stop serving this session and cancel its running calls."""
        self._sessions.pop(session.secret, None)
        session.close()

    def get_session(self, http: HttpRequest) -> RolloutSession:
        """Return the session of a request's API key. Raises PeerRefused if there is none."""
        scheme, _, bearer = http.headers.get("authorization", "").partition(" ")
        secret = http.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if secret not in self._sessions:
            raise PeerRefused("the api key belongs to no running rollout" if secret else "the request has no api key")
        return self._sessions[secret]

    def _build_app(self) -> Starlette:
        routes = build_dialect_routes(self.get_session, self._keepalive_interval)
        for prefix in PREFIXES:
            routes.append(Route(prefix + MCP_PATH, self._mcp_server))
            routes.append(Route(f"{prefix}/models", self._handle_list_models))
            routes.append(Route(f"{prefix}/models/{{name:path}}", self._handle_get_model))
        routes.append(Route("/health", _handle_health))
        return Starlette(
            routes=routes, exception_handlers={RamifyError: _handle_error, HTTPException: self._handle_http_exception}
        )

    async def _handle_list_models(self, http: HttpRequest) -> Response:
        session = self.get_session(http)
        names = list(dict.fromkeys([session.policy.name, *session.models]))
        cards = [_model_card(name, session) for name in names]
        page = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return JSONResponse({"object": "list", "data": cards, **page})

    async def _handle_get_model(self, http: HttpRequest) -> Response:
        return JSONResponse(_model_card(http.path_params["name"], self.get_session(http)))

    async def _handle_http_exception(self, http: HttpRequest, error: Exception) -> Response:
        """Respond to an unknown path or method, in a form that is valid in all dialects."""
        assert isinstance(error, HTTPException)
        message = f"{http.method} {http.url.path}: {error.detail}"
        with contextlib.suppress(PeerRefused):
            self.get_session(http).record_refusal(http.url.path, error.status_code, NOT_FOUND, message)
        error_body = {"type": NOT_FOUND, "message": message, "code": "not_found"}
        return JSONResponse({"type": "error", "error": error_body}, error.status_code)


def build_dialect_routes(get_session: SessionLookup, keepalive_interval: float) -> list[Route]:
    """Return the routes of all dialects; `get_session` returns the session that a request is for."""
    chat, responses, messages = ChatCompletionsDialect(), ResponsesDialect(), MessagesDialect()
    post_handlers: dict[str, Any] = {
        "/chat/completions": ReplyHandler(get_session, chat, keepalive_interval),
        "/chat/completions/input_tokens": TokenCountHandler(get_session, chat),
        "/responses": ReplyHandler(get_session, responses, keepalive_interval),
        "/responses/compact": ReplyHandler(get_session, CompactionDialect(), keepalive_interval),
        "/responses/input_tokens": TokenCountHandler(get_session, responses),
        "/conversations": ConversationHandler(get_session, ConversationDialect()),
        "/messages": ReplyHandler(get_session, messages, keepalive_interval),
        "/messages/count_tokens": TokenCountHandler(get_session, messages),
    }
    get_handlers: dict[str, Any] = {
        "/responses/{id}": partial(retrieve_response, get_session),
        "/conversations/{id}": partial(retrieve_conversation, get_session),
    }
    routes: list[Route] = []
    for prefix in PREFIXES:
        routes += [Route(prefix + path, handler, methods=["POST"]) for path, handler in post_handlers.items()]
        routes += [Route(prefix + path, handler, methods=["GET"]) for path, handler in get_handlers.items()]
    return routes


def _model_card(name: str, session: RolloutSession) -> dict[str, Any]:
    """Return the model card of any name, in a form that OpenAI and Anthropic clients accept."""
    openai_fields: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "ramify"}
    anthropic_fields = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    max_model_len = session.models.get(name, session.policy).max_model_len
    return openai_fields | anthropic_fields | ({} if max_model_len is None else {"max_model_len": max_model_len})


async def _handle_health(_: HttpRequest) -> Response:
    return JSONResponse({"status": "ok"})


async def _handle_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RamifyError)
    return JSONResponse(ChatCompletionsDialect().format_error(error), get_http_status(error))
