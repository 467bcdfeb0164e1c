"""Control endpoints refuse web pages: what a page asks for carries the page's own name in `Origin` or in `Host`.

A page from anywhere can make the browser of a person who trains a model send requests to that person's machines. It
needs no answer to pause an engine. Browsers put the page's address into `Origin` of every POST, so an `Origin` that is
not the server itself is refused. With DNS rebinding the page's own name leads to this server, and `Origin` and `Host`
agree; so `Host` has to be a name that no page can have: an address, a name without a dot, this machine's own name, or
one that the configuration names. Programs send no `Origin`, and the `Host` that their configuration holds.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ramify.errors import OriginRefused


class BrowserGuard:
    """An application whose `paths` answer only requests that no web page can have sent; others get 403.

    `hosts` are names of the server that the configuration knows; `key` is where a person adds one.
    """

    def __init__(self, app: ASGIApp, *, paths: Collection[str], hosts: Collection[str], key: str) -> None:
        self._app = app
        self._paths = frozenset(paths)
        self._hosts = {host.lower().rstrip(".") for host in hosts}
        self._key = key
        self._knows_own_names = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/") in self._paths:
            try:
                await self._check(HTTPConnection(scope))
            except OriginRefused as error:
                body = {"error": {"message": error.message, "type": error.name, "code": 403}}
                await JSONResponse(body, 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _check(self, request: HTTPConnection) -> None:
        host = ", ".join(request.headers.getlist("host"))
        name = _host_name(host)
        if name is None or not await self._is_trusted(name):
            known = f"expected an address, a name without a dot, or one that {self._key} lists"
            raise OriginRefused(f"{request.url.path} was asked under the host {host!r}; {known}")
        for origin in request.headers.getlist("origin"):
            if origin.lower().partition("://")[2] != host.lower():
                raise OriginRefused(f"{request.url.path} was asked by a web page of {origin!r}; use a program, or curl")

    async def _is_trusted(self, name: str) -> bool:
        if _is_address(name) or "." not in name or name.endswith(".localhost") or name in self._hosts:
            return True
        if not self._knows_own_names:  # asked for when it is needed: a name server may take seconds to answer
            self._hosts |= await asyncio.to_thread(_own_names)
            self._knows_own_names = True
        return name in self._hosts


def _host_name(host: str) -> str | None:
    """The name in `NAME:PORT`, or None if there is none."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return name.rstrip(".") if name else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _own_names() -> set[str]:
    return {name.lower().rstrip(".") for name in (socket.gethostname(), socket.getfqdn())}
