"""The proxy of a sandbox: which hosts it connects to, and what it sends them."""

import asyncio
import contextlib
import socket

import pytest

from ramify.rollout.runtime.host_proxy import HostProxy, is_allowed, parse_head


@pytest.mark.parametrize(
    ("host", "port", "entry", "allowed"),
    [
        ("pypi.org", 443, "pypi.org", True),
        ("PyPI.org", 80, "pypi.org", True),
        ("pypi.org", 8443, "pypi.org", False),
        ("pypi.org", 8443, "pypi.org:8443", True),
        ("pypi.org", 443, "pypi.org:8443", False),
        ("files.pythonhosted.org", 443, "*.pythonhosted.org", True),
        ("pythonhosted.org", 443, "*.pythonhosted.org", False),
        ("evilpypi.org", 443, "pypi.org", False),
        ("pypi.org.evil.com", 443, "pypi.org", False),
        ("10.0.0.1", 443, "*.org", False),
        ("pypi.org", 22, "pypi.*", False),
    ],
)
def test_entry_names_hosts_and_ports(host, port, entry, allowed):
    assert is_allowed(host, port, [entry]) is allowed
    assert not is_allowed(host, port, [])


def test_request_for_a_url_is_sent_to_its_host():
    head = b"GET http://user:pw@a.org/x?y#z HTTP/1.1\r\nHost: b.org\r\nProxy-Authorization: p\r\nAccept: */*\r\n\r\n"
    sent = b"GET /x?y HTTP/1.1\r\nHost: a.org\r\nConnection: close\r\nAccept: */*\r\n\r\n"
    assert parse_head(head) == ("GET", "a.org", 80, sent)
    assert parse_head(b"CONNECT a.org:443 HTTP/1.1\r\n\r\n")[:3] == ("CONNECT", "a.org", 443)


@pytest.mark.parametrize(
    "head", [b"", b"GET / HTTP/1.1", b"GET https://a.org/ HTTP/1.1", b"CONNECT http://a.org HTTP/1.1", b"GET a.org x y"]
)
def test_what_is_not_a_request_to_a_proxy_is_refused(head):
    with pytest.raises(ValueError):
        parse_head(head + b"\r\n\r\n")


@contextlib.asynccontextmanager
async def open_proxy(*allow_hosts: str):
    """Yield a function that sends a text to a proxy and returns all that comes back."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    proxy = HostProxy(allow_hosts)
    await proxy.start(listener)

    async def ask(text: str) -> str:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(text.encode())
        with contextlib.closing(writer):
            return (await asyncio.wait_for(reader.read(), 60)).decode()

    try:
        yield ask
    finally:
        await proxy.close()


async def test_only_allowed_hosts_are_reached():
    received = []

    async def echo(reader, writer):
        received.append(await reader.read(1000))
        writer.write(b"from the host")
        writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with open_proxy(f"localhost:{port}", f"127.0.0.1:{port}") as ask:
            tunnel = await ask(f"CONNECT localhost:{port} HTTP/1.1\r\n\r\nhello")
            plain = await ask(f"GET http://localhost:{port}/x HTTP/1.1\r\n\r\n")
            refused = await ask(f"CONNECT 127.0.0.2:{port} HTTP/1.1\r\n\r\n")
    assert tunnel.startswith("HTTP/1.1 200 ") and tunnel.endswith("from the host") and plain == "from the host"
    assert received[0] == b"hello" and received[1].startswith(b"GET /x HTTP/1.1\r\n") and len(received) == 2
    assert refused.startswith("HTTP/1.1 403 ") and f"127.0.0.2:{port} is not in runtime.allow_hosts" in refused


async def test_host_that_does_not_answer_and_a_wrong_request_are_named():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with open_proxy(f"localhost:{port}", f"127.0.0.1:{port}") as ask:
        assert (await ask(f"CONNECT localhost:{port} HTTP/1.1\r\n\r\n")).startswith("HTTP/1.1 502 ")
        assert (await ask("hello\r\n\r\n")).startswith("HTTP/1.1 400 ")


@pytest.mark.parametrize(("host", "entry"), [("localhost", "localhost"), ("127.0.0.1", "*"), ("10.0.0.1", "10.*")])
async def test_an_address_that_is_not_global_is_refused_unless_it_is_listed(host, entry):
    async with open_proxy(entry) as ask:
        response = await ask(f"CONNECT {host}:80 HTTP/1.1\r\n\r\n")
    assert response.startswith("HTTP/1.1 403 ")
    assert "which is not global and not in runtime.allow_hosts" in response
