"""Forward connections from the listening socket of a sandbox: to the gateway, or to the hosts of a list.

A sandbox has a network of its own, with a listening socket that the host holds. What a program sends there reaches the
gateway of its rollout, and nothing else is reachable. The connections of a sandbox are counted here, because the
gateway does not know whose they are until they have sent a complete head with a secret. So are the bytes that it sends:
an agent that sends as fast as it can would use all the time of the process that forwards them.

With `runtime.allow_hosts`, another socket leads to an HTTP proxy, which programs find in the usual environment
variables. It resolves names itself, so a sandbox cannot send anything to a name server either. A name must not lead to
the services of this machine or its network, so an address that is not global is refused unless the list has the address
itself. A connection serves one request: a tunnel (CONNECT), or a request for an `http` URL.
"""

import asyncio
import contextlib
import fnmatch
import ipaddress
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

CHUNK = 1 << 16
CONNECT_TIMEOUT = 10.0  # seconds
MAX_CONNECTIONS = 128  # at once; each is two open files and up to half a MiB of buffers, here and in the gateway
BYTES_PER_SECOND = 4 << 20  # from a sandbox, in the long run
BURST_BYTES = 16 << 20  # after a pause: a long conversation with images
DEFAULT_PORTS = (80, 443)
REMOVED_HEADERS = (b"host", b"connection", b"keep-alive", b"upgrade")  # and those that begin with `proxy-`


class PortForward:
    """Forwards the connections of a listening socket to `host`:`port`, until `close`.

    Connections beyond `MAX_CONNECTIONS` at once are closed. What they send together beyond `bytes_per_second` waits.
    """

    def __init__(
        self, host: str, port: int, *, bytes_per_second: float = BYTES_PER_SECOND, burst_bytes: int = BURST_BYTES
    ) -> None:
        self._host, self._port = host, port
        self._rate_limit = _RateLimit(bytes_per_second, burst_bytes)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, listener: socket.socket) -> None:
        """Accept connections. The socket is closed by `close`."""
        self._server = await asyncio.start_server(self._handle, sock=listener)

    async def close(self) -> None:
        """Close the listening socket and all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        with contextlib.closing(writer):
            if len(self._tasks) >= MAX_CONNECTIONS:
                return
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):  # only `close` cancels it
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    target_reader, target_writer = await self._open_target(reader, writer)
                with contextlib.closing(target_writer):
                    async with asyncio.TaskGroup() as group:
                        group.create_task(_copy(reader, target_writer, self._rate_limit))
                        group.create_task(_copy(target_reader, writer))

    async def _open_target(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection to the target of an accepted connection. Raises OSError if there is none."""
        return await asyncio.open_connection(self._host, self._port)


class _RateLimit:
    """The bytes that all connections of a sandbox together may send."""

    def __init__(self, bytes_per_second: float, burst_bytes: int) -> None:
        self._bytes_per_second, self._burst_bytes = bytes_per_second, burst_bytes
        self._available, self._updated_at = float(burst_bytes), time.monotonic()

    async def spend(self, num_bytes: int) -> None:
        """Count bytes that were sent, and wait while there are too many."""
        now = time.monotonic()
        earned = self._bytes_per_second * (now - self._updated_at)
        self._available, self._updated_at = min(self._burst_bytes, self._available + earned) - num_bytes, now
        if self._available < 0:
            await asyncio.sleep(-self._available / self._bytes_per_second)


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate_limit: _RateLimit | None = None
) -> None:
    """Copy until the end of the stream, and pass the end on. It waits as long as the rollout lives."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
            if rate_limit is not None:
                await rate_limit.spend(len(data))
        writer.write_eof()


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
