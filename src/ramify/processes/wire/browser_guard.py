"""Control endpoints refuse requests from web pages (CSRF and DNS rebinding).

Any web page can make the browser of a person who trains a model send requests to that person's machines. Pausing an
engine needs no answer, so the same-origin policy does not prevent it. Browsers put the page's origin into the `Origin`
header of every POST, so an `Origin` other than the server's own is refused. With DNS rebinding, the page's own domain
resolves to this server, and `Origin` and `Host` agree. So `Host` has to be a name that no page can have: an IP address,
a name without a dot, this machine's own name, or a name from the configuration. Programs send no `Origin`, and the
`Host` from their configuration.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ramify.core.errors import PeerRefused


class BrowserGuard:
    """ASGI middleware that answers requests to `paths` with 403 if another web page may have sent them.

    `paths` is None to guard every path. `hosts` are the server's names in the configuration; `config_key` names the key
    that holds them, for error messages.
    """

    def __init__(self, app: ASGIApp, *, paths: Collection[str] | None, hosts: Collection[str], config_key: str) -> None:
        self._app = app
        self._paths = None if paths is None else frozenset(paths)
        self._hosts = {host.lower().rstrip(".") for host in hosts}
        self._config_key = config_key
        self._knows_own_names = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request to a guarded path with another host or origin; pass all others on."""
        if scope["type"] == "http" and (self._paths is None or scope["path"].rstrip("/") in self._paths):
            try:
                await self._check(HTTPConnection(scope))
            except PeerRefused as error:
                body = {"error": {"message": error.message, "type": error.name, "code": 403}}
                await JSONResponse(body, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _check(self, request: HTTPConnection) -> None:
        host = ", ".join(request.headers.getlist("host"))
        name = _parse_host_name(host)
        if name is None or not await self._is_trusted(name):
            expected = f"expected an IP address, a name without a dot, or a name in {self._config_key}"
            raise PeerRefused(f"{request.url.path} was requested with the host {host!r}; {expected}")
        for origin in request.headers.getlist("origin"):
            if origin.lower().partition("://")[2] != host.lower():
                raise PeerRefused(f"{request.url.path} was requested by a web page of {origin!r}; use curl instead")

    async def _is_trusted(self, name: str) -> bool:
        if _is_ip_address(name) or "." not in name or name.endswith(".localhost") or name in self._hosts:
            return True
        if not self._knows_own_names:  # looked up only if needed: a name server may take seconds to answer
            own_names = (socket.gethostname(), await asyncio.to_thread(socket.getfqdn))
            self._hosts |= {own_name.lower().rstrip(".") for own_name in own_names}
            self._knows_own_names = True
        return name in self._hosts


def _parse_host_name(host: str) -> str | None:
    """Return the name in `NAME:PORT`, or None if there is none."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return name.rstrip(".") if name else None


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
