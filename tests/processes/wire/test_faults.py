"""Broken connections, restarted servers, clients that disappear, blocked event loops."""

import asyncio
import contextlib
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import PeerLost
from ramify.processes.wire import IncomingRequest, WireClient, WireMessage, WireServer, WireSettings
from ramify.processes.wire.message import CancelHeader, decode_header
from ramify.processes.wire.socket_protocol import SequencedStream
from tests.support.proxy import Proxy

FAST = WireSettings(heartbeat_interval=0.05, server_timeout=10.0, session_timeout=10.0)


@contextlib.asynccontextmanager
async def connect(address: str, settings: WireSettings):
    """Yield a client that had more time to connect than it has for a loss."""
    client = await WireClient(address, settings=settings).start(60)
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.promise
async def test_broken_connection_loses_no_reply_and_repeats_no_request():
    runs: Counter[int] = Counter()
    parts: Counter[int] = Counter()

    async def work(request: IncomingRequest) -> WireMessage:
        number = request.decode(int)
        runs[number] += 1
        request.send_part(WireMessage.encode(number))
        await asyncio.sleep(0.002 * (number % 20))
        return WireMessage.encode(number, bytes(1000 * (number % 50)))

    def count(part: WireMessage) -> None:
        parts[part.decode(int)] += 1

    async with (
        WireServer({"work": work}, settings=FAST) as server,
        Proxy(server.address) as proxy,
        WireClient(proxy.address, settings=FAST) as client,
    ):
        slots = asyncio.Semaphore(50)

        async def one(number: int) -> int:
            async with slots:
                reply = await client.call("work", WireMessage.encode(number), timeout=60, on_part=count)
            if number % 40 == 0:
                proxy.cut()
            return reply.decode(int)

        replies = await asyncio.gather(*(one(number) for number in range(400)))
        assert replies == list(range(400))
        assert set(runs.values()) == set(parts.values()) == {1}
        assert proxy.connections >= 2


async def test_connection_is_open_again_soon_after_a_silent_network_works_again():
    """A connection that was being opened when packets were dropped times out after `server_timeout`."""
    impatient = WireSettings(heartbeat_interval=0.05, server_timeout=0.3)

    async def answer(request: IncomingRequest) -> WireMessage:
        return request.message

    async with (
        WireServer({"answer": answer}, settings=FAST) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, impatient) as client,
    ):
        proxy.silent = True
        proxy.cut()
        while proxy.connections < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(PeerLost):
            await client.call("answer", timeout=5)
        proxy.silent = False
        async with asyncio.timeout(60):
            while True:
                try:
                    await client.call("answer", timeout=5)
                    return
                except PeerLost:
                    continue


async def test_restarted_server_fails_pending_calls_and_serves_new_ones():
    started = asyncio.Event()

    async def wait(request: IncomingRequest) -> WireMessage:
        started.set()
        await asyncio.sleep(60)
        return WireMessage.encode()

    async def answer(request: IncomingRequest) -> WireMessage:
        return WireMessage.encode("new")

    async with (
        WireServer({"wait": wait}, settings=FAST) as first,
        WireServer({"answer": answer}, settings=FAST) as second,
        Proxy(first.address) as proxy,
        WireClient(proxy.address, settings=FAST) as client,
    ):
        call = asyncio.create_task(client.call("wait", timeout=60))
        await started.wait()
        proxy.target = second.address  # a restart: another server at the same address
        proxy.cut()
        with pytest.raises(PeerLost, match="forgotten"):
            await call
        assert (await client.call("answer", timeout=10)).decode(str) == "new"


async def test_session_of_a_silent_client_is_closed_and_its_requests_cancelled():
    started, ended = asyncio.Event(), asyncio.Event()
    brief = WireSettings(heartbeat_interval=0.05, server_timeout=0.3, session_timeout=0.5)

    async def wait(request: IncomingRequest) -> WireMessage:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return WireMessage.encode()

    async with (
        WireServer({"wait": wait}, settings=brief) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, brief) as client,
    ):
        call = asyncio.create_task(client.call("wait", timeout=60))
        await started.wait()
        proxy.silent = True
        with pytest.raises(PeerLost, match=r"no message for 0\.3 s"):
            await call
        await asyncio.wait_for(ended.wait(), 60)
        assert server.num_clients == 0


def test_blocked_event_loop_keeps_the_connection_and_reports_its_stack():
    async def block_the_loop(request: IncomingRequest) -> WireMessage:
        time.sleep(2.5)
        return WireMessage.encode("done")

    brief = WireSettings(heartbeat_interval=0.05, server_timeout=0.6, session_timeout=0.6)
    address: asyncio.Queue[str] = asyncio.Queue()
    stop = threading.Event()

    def serve(loop: asyncio.AbstractEventLoop) -> None:
        async def main() -> None:
            async with WireServer({"block": block_the_loop}, settings=brief) as server:
                loop.call_soon_threadsafe(address.put_nowait, server.address)
                while not stop.is_set():
                    await asyncio.sleep(0.01)

        asyncio.run(main())

    async def main():
        thread = threading.Thread(target=serve, args=(asyncio.get_running_loop(),))
        thread.start()
        try:
            async with connect(await address.get(), brief) as client:
                call = asyncio.create_task(client.call("block", timeout=20))
                while not (heartbeat := client.last_heartbeat).stack:
                    await asyncio.sleep(0.01)
                assert heartbeat.lag > 1.0
                assert "block_the_loop" in heartbeat.stack
                assert heartbeat.task == "block 1"
                assert (await call).decode(str) == "done"
                while client.last_heartbeat.lag > 0.5:
                    await asyncio.sleep(0.01)
        finally:
            stop.set()
            thread.join()

    asyncio.run(main())


@pytest.mark.promise
@given(st.lists(st.sampled_from(["send", "lose", "repeat", "connect", "deliver"]), max_size=60))
def test_every_message_arrives_once_and_in_order_despite_loss_and_repetition(steps):
    sender, receiver = SequencedStream(), SequencedStream()
    in_flight: list[list[bytes]] = []
    arrived: list[int] = []

    def deliver() -> None:
        header = decode_header(in_flight.pop(0)[0], 1)
        assert isinstance(header, CancelHeader)
        if receiver.accept(header):
            arrived.append(header.request_id)

    def send(frames) -> bool:
        in_flight.append(frames)
        return True

    sent = 0
    for step in [*steps, "connect", "deliver"]:
        if step == "send":
            sent += 1
            sender.enqueue(CancelHeader(0, 0, sent))
            sender.flush(send)
        elif step == "lose" and in_flight:
            in_flight.pop(0)
        elif step == "repeat" and in_flight:
            in_flight.insert(0, in_flight[0])
        elif step == "connect":
            sender.resend_after(receiver.received)
            sender.flush(send)
        elif step == "deliver":
            while in_flight:
                deliver()
    assert arrived == list(range(1, sent + 1))
    sender.handle_ack(receiver.received)
    assert sender.num_unacked == sender.unacked_bytes == 0
