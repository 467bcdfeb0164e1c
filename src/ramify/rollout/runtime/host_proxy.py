"""An HTTP proxy for a sandbox without a network, which lets its programs reach the hosts of a list and no others.

The sandbox has one listening socket for it, which the host holds. Programs find the proxy in the usual environment
variables. It resolves names itself, so a sandbox cannot send anything to a name server either. A name must not lead to
the services of this machine or its network, so an address that is not global is refused unless the list has the address
itself. A connection serves one request: a tunnel (CONNECT), or a request for an `http` URL.
"""

import asyncio
import fnmatch
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

from ramify.rollout.runtime.port_forward import PortForward

DEFAULT_PORTS = (80, 443)
REMOVED_HEADERS = (b"host", b"connection", b"keep-alive", b"upgrade")  # and those that begin with `proxy-`


class HostProxy(PortForward):
    """Forwards connections to the hosts that `allow_hosts` names."""

    def __init__(self, allow_hosts: Sequence[str]) -> None:
        super().__init__("", 0)
        self._allow_hosts = allow_hosts

    async def _open_target(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Read the head of a request and connect to its host; answer the request if that is refused or fails."""
        try:
            method, host, port, head = parse_head(await reader.readuntil(b"\r\n\r\n"))
        except (asyncio.LimitOverrunError, asyncio.IncompleteReadError, ValueError) as error:
            raise await _refuse(writer, "400 Bad Request", "this is not a request to a proxy") from error
        if not is_allowed(host, port, self._allow_hosts):
            raise await _refuse(writer, "403 Forbidden", f"{host}:{port} is not in runtime.allow_hosts")
        try:
            target = await self._connect(host, port)
        except PermissionError as error:
            raise await _refuse(writer, "403 Forbidden", str(error)) from error
        except OSError as error:
            raise await _refuse(writer, "502 Bad Gateway", f"{host}:{port} cannot be reached: {error}") from error
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            target[1].write(head)
        return target

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address of a host that answers. Raises PermissionError if none is allowed."""
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(info[4][0]) for info in infos]
        literal_entries = [entry for entry in self._allow_hosts if "*" not in entry and "?" not in entry]
        problem: OSError = PermissionError(
            f"{host} has the address {addresses[0]}, which is not global and not in runtime.allow_hosts"
        )
        for address in addresses:
            if ipaddress.ip_address(address).is_global or is_allowed(address, port, literal_entries):
                try:
                    return await asyncio.open_connection(address, port)
                except OSError as error:
                    problem = error
        raise problem


def parse_head(head: bytes) -> tuple[str, str, int, bytes]:
    """Return the method, host and port of a request to a proxy, and the head to send to that host.

    Raises ValueError if it is not such a request.
    """
    first, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    method, target, _ = first.decode("ascii").split(" ")
    is_tunnel = method == "CONNECT"
    url = urlsplit(f"//{target}" if is_tunnel else target)
    if not url.hostname or url.scheme != ("" if is_tunnel else "http") or (is_tunnel and url.path):
        raise ValueError(f"{target!r} is not a host to connect to or a URL")
    path = urlunsplit(("", "", url.path or "/", url.query, ""))
    kept = [line for line in headers if not _is_removed(line.partition(b":")[0].strip().lower())]
    address = url.netloc.rpartition("@")[2]
    lines = [f"{method} {path} HTTP/1.1".encode(), f"Host: {address}".encode(), b"Connection: close", *kept]
    return method, url.hostname.rstrip("."), url.port or DEFAULT_PORTS[0], b"\r\n".join(lines) + b"\r\n\r\n"


def is_allowed(host: str, port: int, allow_hosts: Sequence[str]) -> bool:
    """Return whether an entry names the host, or the host and the port; without a port it means 80 and 443."""
    for entry in allow_hosts:
        pattern, _, entry_port = entry.lower().partition(":")
        ports = (int(entry_port),) if entry_port else DEFAULT_PORTS
        if port in ports and fnmatch.fnmatchcase(host.lower(), pattern):
            return True
    return False


def build_proxy_variables(port: int) -> dict[str, str]:
    """Return the variables by which programs find a proxy at this port of their own machine."""
    variables = {"http_proxy": f"http://127.0.0.1:{port}", "no_proxy": "localhost,127.0.0.1"}
    variables["https_proxy"] = variables["http_proxy"]
    return variables | {name.upper(): value for name, value in variables.items()}


def _is_removed(name: bytes) -> bool:
    return name in REMOVED_HEADERS or name.startswith(b"proxy-")


async def _refuse(writer: asyncio.StreamWriter, status: str, reason: str) -> ConnectionError:
    """Answer a request; return the error that ends its connection."""
    body = f"{reason}\n".encode("utf-8", "replace")
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return ConnectionError(reason)
