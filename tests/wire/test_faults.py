"""Connections that break, servers that come back, clients that vanish, loops that are blocked."""

import asyncio
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.errors import PeerLost
from ramify.wire import Client, Message, Request, Server, Settings
from ramify.wire.frames import Cancel, decode
from ramify.wire.link import Link
from tests.wire.proxy import Proxy

FAST = Settings(interval=0.05, patience=10.0, grace=10.0)


def test_a_connection_that_breaks_loses_no_reply_and_runs_nothing_twice():
    async def main():
        ran: Counter[int] = Counter()
        parts: Counter[int] = Counter()

        async def work(request: Request) -> Message:
            number = request.read(int)
            ran[number] += 1
            request.part(Message.of(number))
            await asyncio.sleep(0.002 * (number % 20))
            return Message.of(number, bytes(1000 * (number % 50)))

        def count(part: Message) -> None:
            parts[part.read(int)] += 1

        async with (
            Server({"work": work}, settings=FAST) as server,
            Proxy(server.address) as proxy,
            Client(proxy.address, settings=FAST) as client,
        ):
            slots = asyncio.Semaphore(50)

            async def one(number: int) -> int:
                async with slots:
                    answer = await client.call("work", Message.of(number), deadline=60, on_part=count)
                if number % 40 == 0:
                    proxy.cut()
                return answer.read(int)

            answers = await asyncio.gather(*(one(number) for number in range(400)))
            assert answers == list(range(400))
            assert set(ran.values()) == set(parts.values()) == {1}
            assert proxy.connections >= 2

    asyncio.run(main())


def test_a_server_that_was_started_again_has_forgotten_and_is_met_again():
    async def main():
        begun = asyncio.Event()

        async def wait(request: Request) -> Message:
            begun.set()
            await asyncio.sleep(60)
            return Message.of()

        async def say(request: Request) -> Message:
            return Message.of("new")

        async with (
            Server({"wait": wait}, settings=FAST) as first,
            Server({"say": say}, settings=FAST) as second,
            Proxy(first.address) as proxy,
            Client(proxy.address, settings=FAST) as client,
        ):
            call = asyncio.create_task(client.call("wait", deadline=60))
            await begun.wait()
            proxy.target = second.address  # at the same address now another process answers
            proxy.cut()
            with pytest.raises(PeerLost, match="forgotten"):
                await call
            assert (await client.call("say", deadline=10)).read(str) == "new"

    asyncio.run(main())


def test_a_client_that_vanishes_is_forgotten_after_the_grace_and_its_work_cancelled():
    async def main():
        begun, ended = asyncio.Event(), asyncio.Event()
        brief = Settings(interval=0.05, patience=0.3, grace=0.5)

        async def wait(request: Request) -> Message:
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
            return Message.of()

        async with (
            Server({"wait": wait}, settings=brief) as server,
            Proxy(server.address) as proxy,
            Client(proxy.address, settings=brief) as client,
        ):
            call = asyncio.create_task(client.call("wait", deadline=60))
            await begun.wait()
            proxy.silent = True
            with pytest.raises(PeerLost, match=r"not been heard for 0\.3 s"):
                await call
            await asyncio.wait_for(ended.wait(), 10)
            assert server.clients == 0

    asyncio.run(main())


def test_a_blocked_loop_does_not_look_dead_and_says_what_blocks_it():
    async def block_the_loop(request: Request) -> Message:
        time.sleep(2.5)
        return Message.of("done")

    brief = Settings(interval=0.05, patience=0.6, grace=0.6)
    address: asyncio.Queue[str] = asyncio.Queue()
    stop = threading.Event()

    def serve(loop: asyncio.AbstractEventLoop) -> None:
        async def main() -> None:
            async with Server({"block": block_the_loop}, settings=brief) as server:
                loop.call_soon_threadsafe(address.put_nowait, server.address)
                while not stop.is_set():
                    await asyncio.sleep(0.01)

        asyncio.run(main())

    async def main():
        thread = threading.Thread(target=serve, args=(asyncio.get_running_loop(),))
        thread.start()
        try:
            async with Client(await address.get(), settings=brief) as client:
                call = asyncio.create_task(client.call("block", deadline=20))
                while not client.beat.stack:
                    await asyncio.sleep(0.01)
                assert client.beat.lag > 1.0
                assert "block_the_loop" in client.beat.stack
                assert client.beat.task == "block 1"
                assert (await call).read(str) == "done"
                while client.beat.lag > 0.5:
                    await asyncio.sleep(0.01)
        finally:
            stop.set()
            thread.join()

    asyncio.run(main())


@given(st.lists(st.sampled_from(["send", "lose", "repeat", "connect", "deliver"]), max_size=60))
def test_whatever_is_lost_or_repeated_every_frame_arrives_once_and_in_order(steps):
    near, far = Link(), Link()
    air: list[list[bytes]] = []
    arrived: list[int] = []

    def deliver() -> None:
        header = decode(air.pop(0)[0], 1)
        assert isinstance(header, Cancel)
        if far.take(header):
            arrived.append(header.id)

    def fly(frames) -> bool:
        air.append(frames)
        return True

    sent = 0
    for step in [*steps, "connect", "deliver"]:
        if step == "send":
            sent += 1
            near.add(Cancel(0, 0, sent))
            near.flush(fly)
        elif step == "lose" and air:
            air.pop(0)
        elif step == "repeat" and air:
            air.insert(0, air[0])
        elif step == "connect":
            near.rewind(far.got)
            near.flush(fly)
        elif step == "deliver":
            while air:
                deliver()
    assert arrived == list(range(1, sent + 1))
    near.acknowledged(far.got)
    assert near.kept == near.kept_bytes == 0
