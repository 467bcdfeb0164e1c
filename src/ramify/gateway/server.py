"""The gateway: one HTTP server for all rollouts of a process. Which rollout asks, its secret says.

A reply is in the trace before its first byte is sent. A client that hangs up takes nothing back: what was recorded
stays, the answer counts as undelivered, and an equal request gets it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ramify.errors import RamifyError, SecretUnknown
from ramify.gateway.dialects.chat import Chat
from ramify.gateway.dialects.form import status_of
from ramify.gateway.dialects.messages import Messages
from ramify.gateway.dialects.responses import Responses
from ramify.gateway.front import Asks, Counts
from ramify.gateway.session import Session
from ramify.wire.http_server import HttpServer

if TYPE_CHECKING:
    from ramify.env import Endpoint

NOT_FOUND = "not_found_error"


class Gateway:
    """Serves sessions between `open` and `end`; `start` and `close` (or `async with`) are its own life.

    A stream that waits says so every `patience` seconds. Requests in flight get `shutdown` seconds when it closes.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, patience: float = 5.0, shutdown: float = 2.0) -> None:
        self._patience = patience
        self._sessions: dict[str, Session] = {}
        self._server = HttpServer(self._app(), host, port, name="gateway", shutdown_timeout=shutdown)

    @property
    def address(self) -> str:
        return self._server.address

    async def start(self) -> Self:
        """Listen. A port that is taken is a PortTaken."""
        await self._server.start()
        return self

    async def close(self) -> None:
        """End all sessions and the server."""
        for session in list(self._sessions.values()):
            self.end(session)
        await self._server.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def open(self, session: Session) -> Endpoint:
        """Let clients ask this session."""
        from ramify.env import Endpoint

        self._sessions[session.secret] = session
        return Endpoint(f"{self.address}/v1", session.secret, session.policy.name)

    def end(self, session: Session) -> None:
        """Answer this session's clients no longer, and give up what still runs for them."""
        self._sessions.pop(session.secret, None)
        session.close()

    def session_of(self, http: HttpRequest) -> Session:
        """The session whose secret the request bears."""
        scheme, _, bearer = http.headers.get("authorization", "").partition(" ")
        secret = http.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if secret not in self._sessions:
            raise SecretUnknown("the api key is that of no running rollout" if secret else "an api key is needed")
        return self._sessions[secret]

    def _app(self) -> Starlette:
        chat, responses, messages = Chat(), Responses(), Messages()
        posts: dict[str, Any] = {
            "/chat/completions": Asks(self.session_of, chat, self._patience),
            "/chat/completions/input_tokens": Counts(self.session_of, chat),
            "/responses": Asks(self.session_of, responses, self._patience),
            "/responses/input_tokens": Counts(self.session_of, responses),
            "/messages": Asks(self.session_of, messages, self._patience),
            "/messages/count_tokens": Counts(self.session_of, messages),
        }
        # Anthropic's client puts /v1 behind the address it is given, OpenAI's does not.
        roots = ("/v1", "/v1/v1")
        routes = [Route(root + path, answer, methods=["POST"]) for root in roots for path, answer in posts.items()]
        for root in roots:
            routes.append(Route(f"{root}/models", self._models))
            routes.append(Route(f"{root}/models/{{name:path}}", self._model))
        routes.append(Route("/health", _health))
        return Starlette(routes=routes, exception_handlers={RamifyError: _refused, HTTPException: self._unknown})

    async def _models(self, http: HttpRequest) -> Response:
        session = self.session_of(http)
        names = list(dict.fromkeys([session.policy.name, *session.models]))
        cards = [_card(name, session) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return JSONResponse({"object": "list", "data": cards, **ends})

    async def _model(self, http: HttpRequest) -> Response:
        return JSONResponse(_card(http.path_params["name"], self.session_of(http)))

    async def _unknown(self, http: HttpRequest, error: Exception) -> Response:
        """A path or method nobody serves, in a shape that is both dialects'."""
        assert isinstance(error, HTTPException)
        message = f"{http.method} {http.url.path}: {error.detail}"
        with contextlib.suppress(SecretUnknown):
            self.session_of(http).record_refusal(http.url.path, error.status_code, NOT_FOUND, message)
        said = {"type": NOT_FOUND, "message": message, "code": "not_found"}
        return JSONResponse({"type": "error", "error": said}, error.status_code)


def _card(name: str, session: Session) -> dict[str, Any]:
    """A model as both kinds of clients want it described; every name is served."""
    ours: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "ramify"}
    theirs = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    longest = session.models.get(name, session.policy).max_model_len
    return ours | theirs | ({} if longest is None else {"max_model_len": longest})


async def _health(_: HttpRequest) -> Response:
    return JSONResponse({"status": "ok"})


async def _refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RamifyError)
    return JSONResponse(Chat().refusal(error), status_of(error))
