"""Addresses a server may listen on, and the encryption and authentication of connections.

A local address needs no secret. Any other address requires a shared secret: both sides derive their CURVE keys from it,
so a peer without the secret can neither connect nor decrypt; the handshake checks the secret once more.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from ramify.core.errors import ConfigInvalid

BLAKE2_PERSON = b"ramify.wire"
CONNECT_TIMEOUT = 2.0  # seconds
DEFAULT_PORTS = {"http": 80, "https": 443}


def is_local(address: str) -> bool:
    """Whether only this machine can reach the address."""
    scheme, _, rest = address.partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind_address(address: str, secret: str | None) -> None:
    """Raise ConfigInvalid if the address is malformed, or if it is not local and there is no secret."""
    scheme, _, rest = address.partition("://")
    if scheme not in ("tcp", "ipc") or not rest or (scheme == "tcp" and not rest.rpartition(":")[2].isdigit()):
        raise ConfigInvalid(f"expected tcp://HOST:PORT (port 0 takes a free one), got {address!r}", key="address")
    if not is_local(address) and not secret:
        problem = f"{address} can be reached from other machines; set a secret in the environment variable that"
        raise ConfigInvalid(f"{problem} secret_env names, or listen on 127.0.0.1", key="address")


def make_proof(secret: str | None, client_id: str) -> bytes:
    """Return the proof in a client's hello that the client knows the secret."""
    key = hashlib.blake2b((secret or "").encode(), digest_size=32, person=BLAKE2_PERSON).digest()
    return hashlib.blake2b(client_id.encode(), key=key, digest_size=32).digest()


def enable_curve(socket: "zmq.Socket[bytes]", secret: str, *, server: bool) -> None:
    """Encrypt the socket with CURVE, so that only peers with the secret can connect."""
    if not zmq.has("curve"):
        raise ConfigInvalid("address: this libzmq lacks CURVE, which a public address needs; install pyzmq from PyPI")
    public, private = _derive_curve_keypair(secret, b"server")
    if server:
        socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, public, private
    else:
        socket.curve_serverkey = public
        socket.curve_publickey, socket.curve_secretkey = _derive_curve_keypair(secret, b"client")


def _derive_curve_keypair(secret: str, role: bytes) -> tuple[bytes, bytes]:
    raw = hashlib.blake2b(
        role, key=hashlib.sha256(secret.encode()).digest(), digest_size=32, person=BLAKE2_PERSON
    ).digest()
    private = z85.encode(raw)
    return zmq.curve_public(private), private


async def is_listening(address: str, *, timeout: float = CONNECT_TIMEOUT) -> bool:
    """Whether a TCP connection to the address succeeds within `timeout` seconds."""
    url = urlsplit(address)
    try:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(url.hostname, url.port or DEFAULT_PORTS.get(url.scheme))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
