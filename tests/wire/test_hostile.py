"""A client that means harm hurts nobody but itself."""

import asyncio
import os
import random
import socket

import psutil
import zmq

from ramify.errors import Failure
from ramify.wire import PROTOCOL_VERSION, IncomingRequest, WireClient, WireMessage, WireServer, WireSettings
from ramify.wire import headers as said
from ramify.wire.address import make_proof

COUNT = 10_000 if os.environ.get("RAMIFY_FULL") else 1000
SETTINGS = WireSettings(heartbeat_interval=0.1, server_timeout=10.0, session_timeout=5.0, max_frame_bytes=1 << 20)


async def echo(request: IncomingRequest) -> WireMessage:
    return WireMessage.encode(request.decode(str), *request.message.blobs)


def frame(rng: random.Random) -> list[bytes]:
    """Something a client could have said, or nearly."""
    any_failure = Failure("X", "y", "system", False)
    number, id = rng.randrange(1, 5), rng.randrange(5)
    headers = [
        said.HelloHeader(PROTOCOL_VERSION, f"c{id}", make_proof(None, f"c{id}"), rng.randrange(3)),
        said.RequestHeader(number, rng.randrange(4), id, rng.choice(["echo", "x"]), 1.0),
        said.CancelHeader(number, 0, id),
        said.HeartbeatHeader(rng.randrange(9), rng.randrange(9)),
        said.ResendHeader(rng.randrange(9)),
        said.ReplyHeader(number, 0, id),
        said.RejectedHeader(any_failure),
        said.GoodbyeHeader(),
    ]
    return [
        said.encode_header(rng.choice(headers)),
        *(rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(3))),
    ]


def hostile(kind: str, rng: random.Random) -> list[bytes]:
    if kind == "warm-up":
        kind = rng.choice(["random", "truncated", "version"])
    if kind == "random":
        return [rng.randbytes(rng.randrange(64)) for _ in range(rng.randrange(1, 5))]
    if kind == "truncated":
        whole = frame(rng)
        return [part[: rng.randrange(len(part) + 1)] for part in whole[: rng.randrange(1, len(whole) + 1)]]
    version = rng.choice([0, -1, PROTOCOL_VERSION + 1, 2**31, 2**62])
    return [said.encode_header(said.HelloHeader(version, rng.randbytes(4).hex(), b"", 0))]


def test_a_good_client_is_served_while_a_hostile_one_tries_everything():
    async def main():
        rng, process = random.Random(7), psutil.Process()
        context = zmq.Context()
        async with (
            WireServer({"echo": echo}, settings=SETTINGS) as server,
            WireClient(server.address, settings=SETTINGS) as good,
        ):
            for kind in ("warm-up", "random", "truncated", "version"):
                memory = []
                for number in range(COUNT):
                    bad = context.socket(zmq.DEALER)  # the one before was cut off
                    bad.connect(server.address)
                    if rng.random() < 0.5:  # a client of ours, so far
                        name = rng.randbytes(4).hex()
                        bad.send(
                            said.encode_header(said.HelloHeader(PROTOCOL_VERSION, name, make_proof(None, name), 0))
                        )
                    bad.send_multipart(hostile(kind, rng))
                    await asyncio.to_thread(bad.poll, 1000)  # whatever it said is answered
                    bad.close(10_000)
                    if number % 25 == 0:
                        answer = await good.call("echo", WireMessage.encode(f"{number}", bytes(100)), timeout=30)
                        assert answer.decode(str) == f"{number}"
                        memory.append(process.memory_info().rss)
                quarter = len(memory) // 4
                second, last = memory[quarter : 2 * quarter], memory[-quarter:]
                assert kind == "warm-up" or sum(last) / len(last) <= 1.05 * sum(second) / len(second)
            async with asyncio.timeout(60):
                while server.num_rejected < 2 * COUNT:
                    await asyncio.sleep(0.01)
        context.destroy(0)

    asyncio.run(main())


def test_bytes_that_are_no_zmq_and_frames_that_are_too_large_close_their_own_connection():
    async def main():
        context = zmq.Context()
        async with (
            WireServer({"echo": echo}, settings=SETTINGS) as server,
            WireClient(server.address, settings=SETTINGS) as good,
        ):
            host, _, port = server.address.removeprefix("tcp://").rpartition(":")
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, b"\0" * 64):
                with socket.create_connection((host, int(port))) as raw:
                    raw.sendall(garbage)
                    assert (await good.call("echo", WireMessage.encode("a"), timeout=30)).decode(str) == "a"
            large = context.socket(zmq.DEALER)
            large.connect(server.address)
            large.send(bytes(4 << 20))
            assert (await good.call("echo", WireMessage.encode("b"), timeout=30)).decode(str) == "b"
            large.close(0)
        context.destroy(0)

    asyncio.run(main())
