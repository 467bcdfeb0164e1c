"""One exchange over real sockets, with servers that answer in all the ways servers do."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable

import httptools
import pytest

from ramify.client import h11_parser, http_client, http_connection
from ramify.client.http_client import ConnectFailed, HttpConnectionPool, ResponseLost, open_client, send_request
from ramify.errors import RequestInvalid

Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=[httptools, h11_parser], ids=["httptools", "h11"], autouse=True)
def parser(request, monkeypatch):
    """Both ways to read an answer."""
    for name in ("HttpParserError", "HttpResponseParser"):
        monkeypatch.setattr(http_connection, name, getattr(request.param, name))


class Server:
    """Answers with the bytes it was given, and counts its connections."""

    def __init__(self, *answers: bytes, hang_up: bool = False) -> None:
        self.answers, self.hang_up = answers, hang_up
        self.connections, self.requests = 0, []
        self.gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writer = writer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
                self.requests.append(head + await reader.readexactly(size))
                for part in self.answers:
                    writer.write(part)
                    await writer.drain()
                if self.hang_up:
                    break
        self.gone.set()
        writer.close()


@contextlib.asynccontextmanager
async def serving(
    server: Server, *, connections: int = 8, secure: ssl.SSLContext | None = None
) -> AsyncIterator[HttpConnectionPool]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=secure)
    scheme = "https" if secure else "http"
    address = f"{scheme}://localhost:{listening.sockets[0].getsockname()[1]}/v1"
    opened = open_client(address, connect_timeout=5.0, max_connections=connections)
    try:
        yield opened
    finally:
        await opened.aclose()
        listening.close()


async def unanswered(server: Server, client: HttpConnectionPool) -> "asyncio.Task[bytes]":
    """A call that has come to a server which says nothing."""
    call = asyncio.create_task(send_request(client, "POST", "/sample", {}))
    while not server.requests:
        await asyncio.sleep(0.001)
    return call


def run(test: Awaitable[None]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(within())


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"


@pytest.mark.parametrize(
    "parts",
    [
        (WHOLE,),
        (WHOLE[:9], WHOLE[9:30], WHOLE[30:]),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nbo\r\n", b"2\r\ndy\r\n0\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", WHOLE),
    ],
    ids=["whole", "in pieces", "chunked", "continue first"],
)
def test_an_answer_is_read_and_its_connection_used_again(parts):
    async def test():
        server = Server(*parts)
        async with serving(server) as client:
            for _ in range(3):
                assert await send_request(client, "POST", "/sample", {"a": 1}) == b"body"
        assert server.connections == 1

    run(test())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\nbody",
        b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nbody",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbody",
    ],
    ids=["ends with the connection", "old", "closed"],
)
def test_a_server_that_hangs_up_after_its_answer_is_dialled_again(answer):
    async def test():
        server = Server(answer, hang_up=True)
        async with serving(server) as client:
            for _ in range(2):
                assert await send_request(client, "GET", "/health") == b"body"
        assert server.connections == 2

    run(test())


def test_a_server_that_hung_up_a_moment_ago_is_dialled_again():
    """The kernel knows, the loop has not heard of it: a request sent there would count as lost."""

    async def test():
        server = Server(WHOLE)
        async with serving(server) as client:
            await send_request(client, "GET", "/health")
            server.writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # at once, without a turn of the loop
            assert await send_request(client, "GET", "/health") == b"body"
        assert server.connections == 2

    run(test())


@pytest.mark.parametrize("answer", [b"", WHOLE[:-1], b"what?\r\n\r\n"], ids=["nothing", "half", "not HTTP"])
def test_an_answer_that_does_not_come_is_lost(answer):
    async def test():
        async with serving(Server(answer, hang_up=True)) as client:
            with pytest.raises(ResponseLost, match=client.base_url):
                await send_request(client, "POST", "/sample", {})

    run(test())


def test_what_is_sent_names_the_host_the_path_and_the_size():
    async def test():
        server = Server(WHOLE)
        async with serving(server) as client:
            client.headers["Authorization"] = "Bearer x"
            await send_request(client, "POST", "/pause", mode="keep it")
            await send_request(client, "POST", "/sample", {"a": 1})
        paused, sampled = server.requests
        assert paused.startswith(b"POST /v1/pause?mode=keep+it HTTP/1.1\r\nHost: localhost:")
        assert b"Content-Length: 0\r\n" in paused
        assert b"Authorization: Bearer x\r\n" in sampled
        assert sampled.endswith(b'\r\n\r\n{"a":1}')

    run(test())


def test_a_call_that_is_cancelled_hangs_up():
    async def test():
        server = Server()
        async with serving(server) as client:
            call = await unanswered(server, client)
            call.cancel()
            await server.gone.wait()

    run(test())


def test_no_more_connections_than_allowed():
    async def test():
        server = Server(WHOLE)
        async with serving(server, connections=2) as client:
            found = await asyncio.gather(*(send_request(client, "POST", "/sample", {}) for _ in range(20)))
        assert found == [b"body"] * 20
        assert server.connections <= 2

    run(test())


def test_closing_ends_the_calls_that_wait():
    async def test():
        server = Server()
        async with serving(server) as client:
            call = await unanswered(server, client)
            await client.aclose()
            with pytest.raises(ResponseLost):
                await call
            with pytest.raises(ConnectFailed, match="closed"):
                await send_request(client, "GET", "/health")

    run(test())


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "http://"])
def test_a_request_that_reaches_nobody_was_not_sent(url):
    async def test():
        client = open_client(url, connect_timeout=5.0, max_connections=1)
        with pytest.raises(ConnectFailed, match=r"cannot be reached|no address"):
            await send_request(client, "GET", "/health")

    run(test())


def test_a_header_with_a_line_break_is_refused():
    async def test():
        async with serving(Server(WHOLE)) as client:
            client.headers["Authorization"] = "Bearer x\n"
            with pytest.raises(RequestInvalid, match="line break"):
                await send_request(client, "GET", "/health")

    run(test())


@pytest.fixture
def certified(tmp_path):
    """What a server needs to show that it is localhost, and the file that vouches for it."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(make, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context, certificate
    pytest.skip("openssl is not there")


def test_a_server_is_asked_over_tls_if_somebody_vouches_for_it(certified, monkeypatch):
    context, certificate = certified

    async def test():
        async with serving(Server(WHOLE), secure=context) as client:
            with pytest.raises(ConnectFailed, match="certificate"):
                await send_request(client, "GET", "/health")
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            http_client.default_ssl_context.cache_clear()
            for _ in range(2):
                assert await send_request(client, "GET", "/health") == b"body"

    try:
        run(test())
    finally:
        http_client.default_ssl_context.cache_clear()
