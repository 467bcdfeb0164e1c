"""Connections that break, servers that come back, clients that vanish, loops that are blocked."""

import asyncio
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.errors import PeerLost
from ramify.wire import IncomingRequest, WireClient, WireMessage, WireServer, WireSettings
from ramify.wire.headers import CancelHeader, decode_header
from ramify.wire.sequenced_stream import SequencedStream
from tests.wire.proxy import Proxy

FAST = WireSettings(heartbeat_interval=0.05, server_timeout=10.0, session_timeout=10.0)


def test_a_connection_that_breaks_loses_no_reply_and_runs_nothing_twice():
    async def main():
        ran: Counter[int] = Counter()
        parts: Counter[int] = Counter()

        async def work(request: IncomingRequest) -> WireMessage:
            number = request.decode(int)
            ran[number] += 1
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
                    answer = await client.call("work", WireMessage.encode(number), timeout=60, on_part=count)
                if number % 40 == 0:
                    proxy.cut()
                return answer.decode(int)

            answers = await asyncio.gather(*(one(number) for number in range(400)))
            assert answers == list(range(400))
            assert set(ran.values()) == set(parts.values()) == {1}
            assert proxy.connections >= 2

    asyncio.run(main())


def test_a_server_that_was_started_again_has_forgotten_and_is_met_again():
    async def main():
        begun = asyncio.Event()

        async def wait(request: IncomingRequest) -> WireMessage:
            begun.set()
            await asyncio.sleep(60)
            return WireMessage.encode()

        async def say(request: IncomingRequest) -> WireMessage:
            return WireMessage.encode("new")

        async with (
            WireServer({"wait": wait}, settings=FAST) as first,
            WireServer({"say": say}, settings=FAST) as second,
            Proxy(first.address) as proxy,
            WireClient(proxy.address, settings=FAST) as client,
        ):
            call = asyncio.create_task(client.call("wait", timeout=60))
            await begun.wait()
            proxy.target = second.address  # at the same address now another process answers
            proxy.cut()
            with pytest.raises(PeerLost, match="forgotten"):
                await call
            assert (await client.call("say", timeout=10)).decode(str) == "new"

    asyncio.run(main())


def test_a_client_that_vanishes_is_forgotten_after_the_grace_and_its_work_cancelled():
    async def main():
        begun, ended = asyncio.Event(), asyncio.Event()
        brief = WireSettings(heartbeat_interval=0.05, server_timeout=0.3, session_timeout=0.5)

        async def wait(request: IncomingRequest) -> WireMessage:
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
            return WireMessage.encode()

        async with (
            WireServer({"wait": wait}, settings=brief) as server,
            Proxy(server.address) as proxy,
            WireClient(proxy.address, settings=brief) as client,
        ):
            call = asyncio.create_task(client.call("wait", timeout=60))
            await begun.wait()
            proxy.silent = True
            with pytest.raises(PeerLost, match=r"not been heard for 0\.3 s"):
                await call
            await asyncio.wait_for(ended.wait(), 10)
            assert server.num_clients == 0

    asyncio.run(main())


def test_a_blocked_loop_does_not_look_dead_and_says_what_blocks_it():
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
            async with WireClient(await address.get(), settings=brief) as client:
                call = asyncio.create_task(client.call("block", timeout=20))
                while not client.last_heartbeat.stack:
                    await asyncio.sleep(0.01)
                assert client.last_heartbeat.lag > 1.0
                assert "block_the_loop" in client.last_heartbeat.stack
                assert client.last_heartbeat.task == "block 1"
                assert (await call).decode(str) == "done"
                while client.last_heartbeat.lag > 0.5:
                    await asyncio.sleep(0.01)
        finally:
            stop.set()
            thread.join()

    asyncio.run(main())


@given(st.lists(st.sampled_from(["send", "lose", "repeat", "connect", "deliver"]), max_size=60))
def test_whatever_is_lost_or_repeated_every_frame_arrives_once_and_in_order(steps):
    near, far = SequencedStream(), SequencedStream()
    air: list[list[bytes]] = []
    arrived: list[int] = []

    def deliver() -> None:
        header = decode_header(air.pop(0)[0], 1)
        assert isinstance(header, CancelHeader)
        if far.accept(header):
            arrived.append(header.request_id)

    def fly(frames) -> bool:
        air.append(frames)
        return True

    sent = 0
    for step in [*steps, "connect", "deliver"]:
        if step == "send":
            sent += 1
            near.enqueue(CancelHeader(0, 0, sent))
            near.flush(fly)
        elif step == "lose" and air:
            air.pop(0)
        elif step == "repeat" and air:
            air.insert(0, air[0])
        elif step == "connect":
            near.resend_after(far.received)
            near.flush(fly)
        elif step == "deliver":
            while air:
                deliver()
    assert arrived == list(range(1, sent + 1))
    near.handle_ack(far.received)
    assert near.num_unacked == near.unacked_bytes == 0
