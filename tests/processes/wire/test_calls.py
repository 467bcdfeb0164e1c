"""Requests, streamed replies, deadlines and cancels, over real sockets."""

import asyncio
from contextvars import ContextVar

import msgspec
import pytest

from ramify.core.errors import (
    ConfigInvalid,
    DeadlineExceeded,
    JudgeError,
    PeerLost,
    PeerRefused,
    QueueFull,
    RequestInvalid,
)
from ramify.processes.wire import IncomingRequest, WireClient, WireMessage, WireServer, WireSettings
from ramify.processes.wire.message import MAX_BODY_FRAMES

FAST = WireSettings(heartbeat_interval=0.1, server_timeout=5.0, session_timeout=5.0)


class EchoRequest(msgspec.Struct):
    text: str


async def echo(request: IncomingRequest) -> WireMessage:
    return WireMessage.encode(request.decode(EchoRequest).text[::-1], *request.message.blobs)


async def count(request: IncomingRequest) -> WireMessage:
    for number in range(request.decode(int)):
        request.send_part(WireMessage.encode(number))
    return WireMessage.encode("end")


async def fail(request: IncomingRequest) -> WireMessage:
    raise JudgeError("asleep")


class WaitingHandler:
    """A handler that waits until it is released or cancelled."""

    def __init__(self) -> None:
        self.started, self.ended = asyncio.Event(), asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, request: IncomingRequest) -> WireMessage:
        self.started.set()
        try:
            await self.release.wait()
        finally:
            self.ended.set()
        return WireMessage.encode("waited")


@pytest.fixture
async def handler():
    return WaitingHandler()


@pytest.fixture
async def server(handler):
    async with WireServer({"echo": echo, "count": count, "fail": fail, "wait": handler}, settings=FAST) as server:
        yield server


@pytest.fixture
async def client(server):
    async with WireClient(server.address, settings=FAST) as client:
        yield client


async def test_reply_carries_its_blobs(client):
    large = bytes(range(256)) * (1 << 15)
    reply = await client.call("echo", WireMessage.encode(EchoRequest("abc"), b"small", large), timeout=20)
    assert reply.decode(str) == "cba"
    assert [bytes(blob) for blob in reply.blobs] == [b"small", large]


async def test_streamed_parts_arrive_in_order_before_the_reply(client):
    seen: list[int] = []
    reply = await client.call(
        "count", WireMessage.encode(100), timeout=5, on_part=lambda part: seen.append(part.decode(int))
    )
    assert seen == list(range(100))
    assert reply.decode(str) == "end"


async def test_error_in_part_callback_fails_only_its_own_call(client):
    def broken(part: WireMessage) -> None:
        raise KeyError("owner")

    calls = [
        client.call("count", WireMessage.encode(5), timeout=20, on_part=on_part) for on_part in (None, broken, None)
    ]
    first, second, third = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(second, KeyError)
    assert first.decode(str) == third.decode(str) == "end"


async def test_requests_do_not_share_context_variables():
    owner: ContextVar[str] = ContextVar("owner", default="unset")

    async def claim(request: IncomingRequest) -> WireMessage:
        before = owner.get()
        owner.set(request.decode(str))
        for _ in range(20):
            request.send_part(WireMessage.encode())
            await asyncio.sleep(0)
        return WireMessage.encode(before)

    async with (
        WireServer({"claim": claim}, settings=FAST) as server,
        WireClient(server.address, settings=FAST) as client,
    ):

        async def call_repeatedly(name: str) -> set[str]:
            return {(await client.call("claim", WireMessage.encode(name), timeout=20)).decode(str) for _ in range(20)}

        assert set().union(*await asyncio.gather(*map(call_repeatedly, "abcdefgh"))) == {"unset"}


async def test_failure_is_raised_as_its_own_class(client):
    with pytest.raises(JudgeError, match="asleep") as caught:
        await client.call("fail", timeout=20)
    assert "raise JudgeError" in (caught.value.remote_traceback or "")


async def test_invalid_request_is_rejected_and_connection_stays_usable(client):
    with pytest.raises(RequestInvalid, match="unknown method 'ecco'"):
        await client.call("ecco", timeout=20)
    with pytest.raises(RequestInvalid, match="EchoRequest"):
        await client.call("echo", WireMessage.encode(7), timeout=20)
    assert (await client.call("echo", WireMessage.encode(EchoRequest("ab")), timeout=20)).decode(str) == "ba"


async def test_timeout_is_sent_and_cancels_the_handler(server, client, handler):
    with pytest.raises(DeadlineExceeded, match="wait"):
        await client.call("wait", timeout=0.2)
    await handler.ended.wait()
    assert server.num_open_requests == 0


async def test_timeout_that_has_already_expired_fails_the_call(server, client):
    with pytest.raises(DeadlineExceeded, match="wait took longer than 0 s"):
        await client.call("wait", timeout=-1.0)
    assert server.num_open_requests == 0


async def test_cancelled_call_cancels_the_handler(client, handler):
    call = asyncio.create_task(client.call("wait", timeout=60))
    await handler.started.wait()
    call.cancel()
    await handler.ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert client.num_pending == 0


async def test_requests_cancelled_before_they_start_are_finished(server, client):
    calls = [asyncio.create_task(client.call("wait", timeout=60)) for _ in range(50)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (await client.call("echo", WireMessage.encode(EchoRequest("ab")), timeout=20)).decode(str) == "ba"
    assert server.num_open_requests == 0


async def test_closing_server_fails_pending_calls(server, client, handler):
    call = asyncio.create_task(client.call("wait", timeout=60))
    await handler.started.wait()
    await server.close()
    with pytest.raises(PeerLost, match=r"closing|closed"):
        await call


async def test_request_over_the_limit_fails_with_queue_full():
    handler = WaitingHandler()
    few = WireSettings(heartbeat_interval=0.1, max_open_requests=2)
    async with (
        WireServer({"wait": handler}, settings=few) as server,
        WireClient(server.address, settings=FAST) as client,
    ):
        calls = [asyncio.create_task(client.call("wait", timeout=10)) for _ in range(3)]
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(QueueFull, match="2 requests"):
            await done.pop()
        handler.release.set()
        replies = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(reply, WireMessage) for reply in replies) == 2
    async with WireServer({"wait": handler}) as server, WireClient(server.address, settings=few) as client:
        handler.release.clear()
        calls = [asyncio.create_task(client.call("wait", timeout=10)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await client.call("wait", timeout=10)
        handler.release.set()
        await asyncio.gather(*calls)


async def test_failure_too_long_for_a_header_is_truncated():
    async def talk(request: IncomingRequest) -> WireMessage:
        try:
            raise ValueError("\U0001f333" * (1 << 20))
        except ValueError as error:
            raise JudgeError("begin" + "x" * (3 << 20) + "end") from error

    async with (
        WireServer({"talk": talk, "echo": echo}) as server,
        WireClient(server.address, settings=FAST) as client,
    ):
        with pytest.raises(JudgeError, match=r"(?s)^begin.*end$") as raised:
            await client.call("talk", timeout=10)
        assert "ValueError" in str(raised.value.remote_traceback) or raised.value.__cause__ is not None
        assert (await client.call("echo", WireMessage.encode(EchoRequest("ab")), timeout=10)).decode(str) == "ba"


async def test_message_with_too_many_frames_is_rejected_and_connection_stays_usable():
    async def many(request: IncomingRequest) -> WireMessage:
        return WireMessage.encode(None, *([b""] * request.decode(int)))

    async with (
        WireServer({"echo": echo, "many": many}) as server,
        WireClient(server.address, settings=FAST) as client,
    ):
        with pytest.raises(RequestInvalid, match="echo: the message has 2001 frames"):
            await client.call("echo", WireMessage.encode(EchoRequest("ab"), *([b""] * 2000)), timeout=10)
        with pytest.raises(RequestInvalid, match="the reply has 2001 frames"):
            await client.call("many", WireMessage.encode(2000), timeout=10)
        most = [b""] * (MAX_BODY_FRAMES - 1)
        reply = await client.call("echo", WireMessage.encode(EchoRequest("ab"), *most), timeout=10)
        assert reply.decode(str) == "ba" and len(reply.blobs) == len(most)


def test_public_address_requires_a_secret():
    for address in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.1.2.3:5000", "tcp://[::]:0"):
        with pytest.raises(ConfigInvalid, match="secret"):
            WireServer({}, address)
    for address in ("somewhere", "tcp://127.0.0.1", "http://127.0.0.1:1"):
        with pytest.raises(ConfigInvalid, match="tcp://HOST:PORT"):
            WireServer({}, address)


async def test_client_without_the_secret_is_not_answered():
    quick = WireSettings(heartbeat_interval=0.1, server_timeout=0.5)
    async with WireServer({"echo": echo}, "tcp://0.0.0.0:0", secret="sesame", settings=quick) as server:
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        async with WireClient(address, secret="sesame", settings=FAST) as client:
            assert (await client.call("echo", WireMessage.encode(EchoRequest("ab")), timeout=20)).decode(str) == "ba"
        with pytest.raises(PeerLost, match="check the secret"):
            await WireClient(address, secret="simsim", settings=quick).start()
        with pytest.raises(PeerLost):
            await WireClient(address, settings=quick).start()
    async with (
        WireServer({"echo": echo}, secret="sesame", encrypted=False, settings=quick) as server,
    ):
        with pytest.raises(PeerRefused, match="does not know the secret"):
            await WireClient(server.address, secret="simsim", encrypted=False, settings=FAST).start()
