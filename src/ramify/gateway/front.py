"""One HTTP exchange with a client: read, ask the session, answer, and know whether the answer arrived.

A stream that has to wait says so from time to time, so that nobody between takes the connection for dead. Until the
first such word nothing is sent, so a call that fails quickly still fails with a status of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ramify.errors import RamifyError, RequestInvalid, SecretUnknown
from ramify.gateway.dialects.form import Asked, Dialect, status_of
from ramify.gateway.exchange import Reply
from ramify.gateway.session import Session

FINAL = {"x-should-retry": "false"}  # the session has made the call again already, where that could help
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

SessionOf = Callable[[HttpRequest], Session]


class Asks:
    """An endpoint that answers with a reply of the session."""

    def __init__(self, session_of: SessionOf, dialect: Dialect, patience: float) -> None:
        self._session_of, self._dialect, self._patience = session_of, dialect, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive)
        session: Session | None = None
        try:
            session = self._session_of(http)
            asked = await _read(http, self._dialect, session)
            asking = session.begin(asked.request)
        except RamifyError as error:
            _record_refusal(session, http, error)
            return await _refuse(self._dialect, error, scope, receive, send)
        except ClientDisconnect:
            return None
        delivered = False
        gone = asyncio.create_task(_hung_up(receive))
        answer = asyncio.ensure_future(asking.answer())
        try:
            delivered = await self._answer(asked, answer, gone, scope, receive, send)
            if delivered and (error := _failure(answer)) is not None:
                _record_refusal(session, http, error)
        finally:
            answer.cancel()
            gone.cancel()
            asking.leave(delivered=delivered)

    async def _answer(
        self,
        asked: Asked,
        answer: asyncio.Future[Reply],
        gone: asyncio.Task[None],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> bool:
        """Answer, and tell whether all of it went to a client that was still there."""
        await asyncio.wait(
            {answer, gone}, timeout=self._patience if asked.stream else None, return_when="FIRST_COMPLETED"
        )
        if gone.done():
            return False
        if not asked.stream or (answer.done() and _failure(answer) is not None):
            error = _failure(answer)
            if error is not None:
                await _refuse(self._dialect, error, scope, receive, send)
            else:
                await JSONResponse(self._dialect.write(asked, answer.result()))(scope, receive, send)
            return not gone.done()
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        while not answer.done():
            await send({"type": "http.response.body", "body": self._dialect.ping, "more_body": True})
            await asyncio.wait({answer, gone}, timeout=self._patience, return_when="FIRST_COMPLETED")
            if gone.done():
                return False
        error = _failure(answer)
        pieces = [self._dialect.broken(error)] if error else self._dialect.stream(asked, answer.result())
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if gone.done():
                return False
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


class Counts:
    """An endpoint that says how many tokens a request's prompt has."""

    def __init__(self, session_of: SessionOf, dialect: Dialect) -> None:
        self._session_of, self._dialect = session_of, dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HttpRequest(scope, receive)
        session: Session | None = None
        try:
            session = self._session_of(http)
            asked = await _read(http, self._dialect, session)
            counted = self._dialect.count(session.count(asked.request))
        except RamifyError as error:
            _record_refusal(session, http, error)
            return await _refuse(self._dialect, error, scope, receive, send)
        except ClientDisconnect:
            return None
        return await JSONResponse(counted)(scope, receive, send)


async def _read(http: HttpRequest, dialect: Dialect, session: Session) -> Asked:
    """The request, with what its headers say about retries."""
    try:
        asked = dialect.read(_object(await http.body()))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RequestInvalid(f"the request cannot be read: {error!r}") from error
    sent = http.headers.get("x-stainless-retry-count", "0")
    request = replace(
        asked.request,
        model=asked.request.model or session.policy.name,
        after=None if asked.continues is None else session.node_of(asked.continues),
        retry=http.headers.get("idempotency-key"),
        retries=int(sent) if sent.isdecimal() else 0,
        remote=True,
    )
    return replace(asked, request=request)


def _object(data: bytes) -> Mapping[str, Any]:
    """The body. Half of a surrogate pair, which JavaScript may send and no text can hold, becomes a question mark."""
    try:
        try:
            body = msgspec.json.decode(data)
        except msgspec.DecodeError:
            body = msgspec.json.decode(json.dumps(json.loads(data), ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError, msgspec.DecodeError) as error:
        raise RequestInvalid(f"the body of the request is not JSON: {error}") from error
    if not isinstance(body, Mapping):
        raise RequestInvalid("the body of a request must be a JSON object")
    return body


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _record_refusal(session: Session | None, http: HttpRequest, error: RamifyError) -> None:
    """Record a refusal in the trace of the rollout, if the session is known."""
    if session is not None:
        session.record_refusal(http.url.path, status_of(error), error.name, error.message)


async def _refuse(dialect: Dialect, error: RamifyError, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(dialect.refusal(error), status_of(error), headers=FINAL)(scope, receive, send)


def _failure(answer: asyncio.Future[Reply]) -> RamifyError | None:
    """How the call failed, if it did; one that was given up was ended with its session."""
    if answer.cancelled():
        return SecretUnknown("the rollout has ended")
    error = answer.exception()
    if error is None or isinstance(error, RamifyError):
        return error
    raise error
