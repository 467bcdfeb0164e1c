"""HTTP requests over real sockets, with every kind of valid and broken response."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator

import aiohttp
import pytest

from ramify.core.errors import RequestInvalid
from ramify.infer.client import http_client
from ramify.infer.client.http_client import ConnectFailed, HttpClient, ResponseLost, send_request


class Server:
    """Sends the given bytes as the response to each request, and counts its connections."""

    def __init__(self, *parts: bytes, close: bool = False) -> None:
        self.parts, self.close = parts, close
        self.connections, self.requests = 0, []
        self.writers: list[asyncio.StreamWriter] = []
        self.client_gone = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writer = writer
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
                self.requests.append(head + await reader.readexactly(size))
                for part in self.parts:
                    writer.write(part)
                    await writer.drain()
                if self.close:
                    break
        self.client_gone.set()
        writer.close()

    async def close_connections(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):  # what the connection ended with
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def serving(
    server: Server, *, connections: int = 8, secure: ssl.SSLContext | None = None
) -> AsyncIterator[HttpClient]:
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=secure)
    scheme = "https" if secure else "http"
    address = f"{scheme}://localhost:{listener.sockets[0].getsockname()[1]}/v1"
    client = HttpClient(address, connect_timeout=30.0, max_connections=connections)
    try:
        yield client
    finally:
        await client.aclose()
        listener.close()
        await server.close_connections()


async def start_request(server: Server, client: HttpClient) -> "asyncio.Task[bytes]":
    """Start a request and wait until the server, which never responds, has received it."""
    call = asyncio.create_task(send_request(client, "POST", "/sample", {}))
    while not server.requests:
        await asyncio.sleep(0.001)
    return call


COMPLETE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"


@pytest.mark.parametrize(
    "parts",
    [
        (COMPLETE,),
        (COMPLETE[:9], COMPLETE[9:30], COMPLETE[30:]),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nbo\r\n", b"2\r\ndy\r\n0\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", COMPLETE),
    ],
    ids=["complete", "in parts", "chunked", "continue first"],
)
async def test_a_response_is_parsed_and_its_connection_reused(parts):
    server = Server(*parts)
    async with serving(server) as client:
        for _ in range(3):
            assert await send_request(client, "POST", "/sample", {"a": 1}) == b"body"
    assert server.connections == 1


async def test_a_get_on_a_connection_closed_just_now_is_sent_again():
    """The kernel has seen the close, the event loop has not."""

    server = Server(COMPLETE)
    async with serving(server) as client:
        await send_request(client, "GET", "/health")
        server.writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)  # without a loop iteration
        assert await send_request(client, "GET", "/health") == b"body"
    assert server.connections == 2


async def test_a_connection_that_closes_before_the_request_is_written_is_a_failed_one():
    """The server cannot have sampled, so the request may be sent to another one."""

    async def close_connection(session, *_):
        (protocol,) = session.connector._acquired
        protocol.transport.close()

    server, tracing = Server(COMPLETE), aiohttp.TraceConfig()
    tracing.on_connection_reuseconn.append(close_connection)
    tracing.freeze()
    async with serving(server) as client:
        await send_request(client, "POST", "/sample", {})
        client._open_session()._trace_configs.append(tracing)
        with pytest.raises(ConnectFailed, match=f"{client.base_url} closed the connection"):
            await send_request(client, "POST", "/sample", {"a": 1})
        assert await send_request(client, "POST", "/sample", {"a": 2}) == b"body"
    assert len(server.requests) == 2


@pytest.mark.parametrize("response", [b"", COMPLETE[:-1], b"what?\r\n\r\n"], ids=["empty", "incomplete", "not HTTP"])
async def test_an_incomplete_response_is_lost(response):
    async with serving(Server(response, close=True)) as client:
        with pytest.raises(ResponseLost, match=client.base_url):
            await send_request(client, "POST", "/sample", {})


async def test_requests_have_host_path_and_content_length():
    server = Server(COMPLETE)
    async with serving(server) as client:
        client.headers["Authorization"] = "Bearer x"
        await send_request(client, "POST", "/pause", mode="keep it")
        await send_request(client, "POST", "/sample", {"a": 1})
    paused, sampled = server.requests
    assert paused.startswith(b"POST /v1/pause?mode=keep+it HTTP/1.1\r\nHost: localhost:")
    assert b"Content-Length: 0\r\n" in paused
    assert b"Authorization: Bearer x\r\n" in sampled
    assert sampled.endswith(b'\r\n\r\n{"a":1}')


async def test_cancelling_a_request_closes_its_connection():
    server = Server()
    async with serving(server) as client:
        call = await start_request(server, client)
        call.cancel()
        await server.client_gone.wait()


async def test_the_number_of_connections_is_limited():
    server = Server(COMPLETE)
    async with serving(server, connections=2) as client:
        bodies = await asyncio.gather(*(send_request(client, "POST", "/sample", {}) for _ in range(20)))
    assert bodies == [b"body"] * 20
    assert server.connections <= 2


async def test_closing_fails_requests_in_flight():
    server = Server()
    async with serving(server) as client:
        call = await start_request(server, client)
        await client.aclose()
        with pytest.raises(ResponseLost):
            await call
        with pytest.raises(ConnectFailed, match="closed"):
            await send_request(client, "GET", "/health")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "http://"])
async def test_an_unreachable_server_raises_connect_failed(url):
    async with HttpClient(url, connect_timeout=30.0, max_connections=1) as client:
        with pytest.raises(ConnectFailed, match=r"cannot be reached|not an address"):
            await send_request(client, "GET", "/health")


async def test_a_header_with_a_line_break_is_refused():
    async with serving(Server(COMPLETE)) as client:
        client.headers["Authorization"] = "Bearer x\n"
        with pytest.raises(RequestInvalid, match="line break"):
            await send_request(client, "GET", "/health")


@pytest.fixture
def tls_certificate(tmp_path):
    """Return an SSL context for a server at localhost, and the file of its self-signed certificate."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(command, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context, certificate
    pytest.skip("openssl is not installed")


@pytest.mark.process
async def test_tls_requires_a_trusted_certificate(tls_certificate, monkeypatch):
    context, certificate = tls_certificate

    try:
        async with serving(Server(COMPLETE), secure=context) as client:
            with pytest.raises(ConnectFailed, match="certificate"):
                await send_request(client, "GET", "/health")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        http_client.default_ssl_context.cache_clear()
        async with serving(Server(COMPLETE), secure=context) as client:
            for _ in range(2):
                assert await send_request(client, "GET", "/health") == b"body"
    finally:
        http_client.default_ssl_context.cache_clear()
