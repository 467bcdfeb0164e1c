"""Who may read the page: it shows what models wrote and how a run is configured.

The page is bound to the loopback address unless the user says otherwise. If other machines can reach it, directly or
through a proxy, every request needs a token, which the printed address contains. The browser gets it as a cookie, so
that it is in no link that is copied. `BrowserGuard` refuses other web pages. The headers let the page load nothing but
its own files, and let no other page embed it.
"""

import hmac
import ipaddress
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE_PREFIX = "ramify_token_"  # with the port: browsers send the cookies of a host to all of its ports
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def is_loopback(host: str) -> bool:
    """Return whether a host is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(24)


class AccessControl:
    """ASGI middleware that adds the headers, and refuses requests without the `token`, if there is one."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if self._token is None:
            await self._app(scope, receive, send_with_headers)
            return
        request, cookie = Request(scope), f"{COOKIE_PREFIX}{_get_port(scope)}"
        if self._matches(request.query_params.get("token")):
            response = RedirectResponse("/", 303)
            response.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            await response(scope, receive, send_with_headers)
        elif self._matches(request.cookies.get(cookie)):
            await self._app(scope, receive, send_with_headers)
        else:
            text = "This page needs its token: open the address that 'ramify view' printed.\n"
            await PlainTextResponse(text, 401)(scope, receive, send_with_headers)

    def _matches(self, value: str | None) -> bool:
        return value is not None and hmac.compare_digest(value.encode(), (self._token or "").encode())


def _get_port(scope: Scope) -> int:
    """Return the port that the server listens on."""
    server = scope.get("server")
    return server[1] if server else 0
