"""Requests, streamed replies, deadlines and cancels, over real sockets."""

import asyncio
from contextvars import ContextVar

import msgspec
import pytest

from ramify.errors import (
    ConfigInvalid,
    DeadlineExceeded,
    JudgeError,
    PeerLost,
    PeerRefused,
    QueueFull,
    RequestInvalid,
)
from ramify.wire import IncomingRequest, WireClient, WireMessage, WireServer, WireSettings
from ramify.wire.headers import MAX_BODY_FRAMES

FAST = WireSettings(heartbeat_interval=0.1, server_timeout=5.0, session_timeout=5.0)


class Ask(msgspec.Struct):
    text: str


async def echo(request: IncomingRequest) -> WireMessage:
    return WireMessage.encode(request.decode(Ask).text[::-1], *request.message.blobs)


async def count(request: IncomingRequest) -> WireMessage:
    for number in range(request.decode(int)):
        request.send_part(WireMessage.encode(number))
    return WireMessage.encode("end")


async def fail(request: IncomingRequest) -> WireMessage:
    raise JudgeError("asleep")


class Waiting:
    """A handler that waits, and says how it ended."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, request: IncomingRequest) -> WireMessage:
        self.begun.set()
        try:
            await self.open.wait()
        finally:
            self.ended.set()
        return WireMessage.encode("waited")


def run(test):
    """Run an async test with a server and a client."""

    def wrapped():
        async def main():
            waiting = Waiting()
            handlers = {"echo": echo, "count": count, "fail": fail, "wait": waiting}
            async with (
                WireServer(handlers, settings=FAST) as server,
                WireClient(server.address, settings=FAST) as client,
            ):
                await asyncio.wait_for(test(server, client, waiting), 20)

        asyncio.run(main())

    wrapped.__name__ = test.__name__
    return wrapped


@run
async def test_an_answer_comes_back_with_its_blobs(server, client, waiting):
    large = bytes(range(256)) * (1 << 15)
    answer = await client.call("echo", WireMessage.encode(Ask("abc"), b"small", large), timeout=20)
    assert answer.decode(str) == "cba"
    assert [bytes(blob) for blob in answer.blobs] == [b"small", large]


@run
async def test_the_parts_of_a_stream_come_in_order_and_before_the_end(server, client, waiting):
    seen: list[int] = []
    answer = await client.call(
        "count", WireMessage.encode(100), timeout=5, on_part=lambda part: seen.append(part.decode(int))
    )
    assert seen == list(range(100))
    assert answer.decode(str) == "end"


@run
async def test_what_a_callback_raises_ends_its_own_call_and_no_other(server, client, waiting):
    def broken(part: WireMessage) -> None:
        raise KeyError("mine")

    calls = [
        client.call("count", WireMessage.encode(5), timeout=20, on_part=on_part) for on_part in (None, broken, None)
    ]
    first, second, third = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(second, KeyError)
    assert first.decode(str) == third.decode(str) == "end"


def test_a_request_sees_nothing_of_the_one_whose_answer_was_sent_before_it():
    mine: ContextVar[str] = ContextVar("mine", default="nobody's")

    async def claim(request: IncomingRequest) -> WireMessage:
        before = mine.get()
        mine.set(request.decode(str))
        for _ in range(20):
            request.send_part(WireMessage.encode())
            await asyncio.sleep(0)
        return WireMessage.encode(before)

    async def main():
        async with (
            WireServer({"claim": claim}, settings=FAST) as server,
            WireClient(server.address, settings=FAST) as client,
        ):

            async def ask(name: str) -> set[str]:
                return {
                    (await client.call("claim", WireMessage.encode(name), timeout=20)).decode(str) for _ in range(20)
                }

            assert set().union(*await asyncio.gather(*map(ask, "abcdefgh"))) == {"nobody's"}

    asyncio.run(main())


@run
async def test_a_failure_arrives_as_the_class_that_bears_its_name(server, client, waiting):
    with pytest.raises(JudgeError, match="asleep") as caught:
        await client.call("fail", timeout=20)
    assert "raise JudgeError" in (caught.value.remote_traceback or "")


@run
async def test_what_is_asked_wrongly_is_refused_and_the_connection_goes_on(server, client, waiting):
    with pytest.raises(RequestInvalid, match="unknown method 'ecco'"):
        await client.call("ecco", timeout=20)
    with pytest.raises(RequestInvalid, match="Ask"):
        await client.call("echo", WireMessage.encode(7), timeout=20)
    assert (await client.call("echo", WireMessage.encode(Ask("ab")), timeout=20)).decode(str) == "ba"


@run
async def test_a_deadline_travels_and_ends_the_work_at_the_other_side(server, client, waiting):
    with pytest.raises(DeadlineExceeded, match="wait"):
        await client.call("wait", timeout=0.2)
    await waiting.ended.wait()
    assert server.num_open_requests == 0


@run
async def test_a_deadline_that_has_passed_is_one(server, client, waiting):
    with pytest.raises(DeadlineExceeded, match="than the 0 s it had"):
        await client.call("wait", timeout=-1.0)
    assert server.num_open_requests == 0


@run
async def test_a_call_that_is_cancelled_is_cancelled_at_the_other_side(server, client, waiting):
    call = asyncio.create_task(client.call("wait", timeout=60))
    await waiting.begun.wait()
    call.cancel()
    await waiting.ended.wait()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert client.num_pending == 0


@run
async def test_a_request_that_is_cancelled_before_it_begins_is_answered_all_the_same(server, client, waiting):
    calls = [asyncio.create_task(client.call("wait", timeout=60)) for _ in range(50)]
    await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (await client.call("echo", WireMessage.encode(Ask("ab")), timeout=20)).decode(str) == "ba"
    assert server.num_open_requests == 0


@run
async def test_a_server_that_closes_says_so_to_all_who_wait(server, client, waiting):
    call = asyncio.create_task(client.call("wait", timeout=60))
    await waiting.begun.wait()
    await server.close()
    with pytest.raises(PeerLost, match=r"closing|closed"):
        await call


def test_one_request_too_many_is_refused_by_name():
    async def main():
        waiting = Waiting()
        few = WireSettings(heartbeat_interval=0.1, max_open_requests=2)
        async with (
            WireServer({"wait": waiting}, settings=few) as server,
            WireClient(server.address, settings=FAST) as client,
        ):
            calls = [asyncio.create_task(client.call("wait", timeout=10)) for _ in range(3)]
            done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(QueueFull, match="2 requests"):
                await done.pop()
            waiting.open.set()
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(isinstance(answer, WireMessage) for answer in answers) == 2
        async with WireServer({"wait": waiting}) as server, WireClient(server.address, settings=few) as client:
            waiting.open.clear()
            calls = [asyncio.create_task(client.call("wait", timeout=10)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFull):
                await client.call("wait", timeout=10)
            waiting.open.set()
            await asyncio.gather(*calls)

    asyncio.run(main())


def test_a_failure_too_long_for_a_header_does_not_stop_what_comes_after_it():
    async def talk(request: IncomingRequest) -> WireMessage:
        try:
            raise ValueError("\U0001f333" * (1 << 20))
        except ValueError as error:
            raise JudgeError("begin" + "x" * (3 << 20) + "end") from error

    async def main():
        async with (
            WireServer({"talk": talk, "echo": echo}) as server,
            WireClient(server.address, settings=FAST) as client,
        ):
            with pytest.raises(JudgeError, match=r"(?s)^begin.*end$") as raised:
                await client.call("talk", timeout=10)
            assert "ValueError" in str(raised.value.remote_traceback) or raised.value.__cause__ is not None
            assert (await client.call("echo", WireMessage.encode(Ask("ab")), timeout=10)).decode(str) == "ba"

    asyncio.run(main())


def test_a_message_of_too_many_frames_is_refused_and_the_connection_lives_on():
    async def many(request: IncomingRequest) -> WireMessage:
        return WireMessage.encode(None, *([b""] * request.decode(int)))

    async def main():
        async with (
            WireServer({"echo": echo, "many": many}) as server,
            WireClient(server.address, settings=FAST) as client,
        ):
            with pytest.raises(RequestInvalid, match="echo: 2001 frames"):
                await client.call("echo", WireMessage.encode(Ask("ab"), *([b""] * 2000)), timeout=10)
            with pytest.raises(RequestInvalid, match="the answer has 2001 frames"):
                await client.call("many", WireMessage.encode(2000), timeout=10)
            most = [b""] * (MAX_BODY_FRAMES - 1)
            answer = await client.call("echo", WireMessage.encode(Ask("ab"), *most), timeout=10)
            assert answer.decode(str) == "ba" and len(answer.blobs) == len(most)

    asyncio.run(main())


def test_an_address_others_can_reach_needs_a_secret():
    for address in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.1.2.3:5000", "tcp://[::]:0"):
        with pytest.raises(ConfigInvalid, match="secret"):
            WireServer({}, address)
    for address in ("somewhere", "tcp://127.0.0.1", "http://127.0.0.1:1"):
        with pytest.raises(ConfigInvalid, match="tcp://HOST:PORT"):
            WireServer({}, address)


def test_only_who_knows_the_secret_is_answered():
    async def main():
        quick = WireSettings(heartbeat_interval=0.1, server_timeout=0.5)
        async with WireServer({"echo": echo}, "tcp://0.0.0.0:0", secret="sesame", settings=quick) as server:
            address = server.address.replace("0.0.0.0", "127.0.0.1")
            async with WireClient(address, secret="sesame", settings=quick) as client:
                assert (await client.call("echo", WireMessage.encode(Ask("ab")), timeout=20)).decode(str) == "ba"
            with pytest.raises(PeerLost, match="is the secret right"):
                await WireClient(address, secret="simsim", settings=quick).start()
            with pytest.raises(PeerLost):
                await WireClient(address, settings=quick).start()
        async with (
            WireServer({"echo": echo}, secret="sesame", encrypted=False, settings=quick) as server,
        ):
            with pytest.raises(PeerRefused, match="does not know the secret"):
                await WireClient(server.address, secret="simsim", encrypted=False, settings=quick).start()

    asyncio.run(main())
