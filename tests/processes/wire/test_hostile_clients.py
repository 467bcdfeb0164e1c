"""A hostile client does not affect other clients."""

import asyncio
import os
import random
import socket

import psutil
import zmq

from ramify.core.errors import Failure
from ramify.processes.wire import (
    PROTOCOL_VERSION,
    IncomingRequest,
    WireClient,
    WireMessage,
    WireServer,
    WireSettings,
    message,
)
from ramify.processes.wire.address import make_proof

COUNT = 10_000 if os.environ.get("RAMIFY_FULL") else 200
SETTINGS = WireSettings(heartbeat_interval=0.1, server_timeout=10.0, session_timeout=5.0, max_frame_bytes=1 << 20)


async def echo(request: IncomingRequest) -> WireMessage:
    return WireMessage.encode(request.decode(str), *request.message.blobs)


def random_client_message(rng: random.Random) -> list[bytes]:
    """A message that a client could send, or nearly."""
    any_failure = Failure("X", "y", "system", False)
    number, request_id = rng.randrange(1, 5), rng.randrange(5)
    candidates = [
        message.HelloHeader(PROTOCOL_VERSION, f"c{request_id}", make_proof(None, f"c{request_id}"), rng.randrange(3)),
        message.RequestHeader(number, rng.randrange(4), request_id, rng.choice(["echo", "x"]), 1.0),
        message.CancelHeader(number, 0, request_id),
        message.HeartbeatHeader(rng.randrange(9), rng.randrange(9)),
        message.ResendHeader(rng.randrange(9)),
        message.ReplyHeader(number, 0, request_id),
        message.RejectedHeader(any_failure),
        message.GoodbyeHeader(),
    ]
    return [
        message.encode_header(rng.choice(candidates)),
        *(rng.randbytes(rng.randrange(40)) for _ in range(rng.randrange(3))),
    ]


def hostile_message(kind: str, rng: random.Random) -> list[bytes]:
    if kind == "warm-up":
        kind = rng.choice(["random", "truncated", "version"])
    if kind == "random":
        return [rng.randbytes(rng.randrange(64)) for _ in range(rng.randrange(1, 5))]
    if kind == "truncated":
        frames = random_client_message(rng)
        return [part[: rng.randrange(len(part) + 1)] for part in frames[: rng.randrange(1, len(frames) + 1)]]
    version = rng.choice([0, -1, PROTOCOL_VERSION + 1, 2**31, 2**62])
    return [message.encode_header(message.HelloHeader(version, rng.randbytes(4).hex(), b"", 0))]


async def test_hostile_clients_are_rejected_and_memory_stays_flat():
    rng, process = random.Random(7), psutil.Process()
    context = zmq.Context()
    async with (
        WireServer({"echo": echo}, settings=SETTINGS) as server,
        WireClient(server.address, settings=SETTINGS) as good,
    ):
        for kind in ("warm-up", "random", "truncated", "version"):
            memory = []
            for number in range(COUNT):
                bad = context.socket(zmq.DEALER)  # the one before was rejected
                bad.connect(server.address)
                if rng.random() < 0.5:  # a valid hello first
                    name = rng.randbytes(4).hex()
                    bad.send(
                        message.encode_header(message.HelloHeader(PROTOCOL_VERSION, name, make_proof(None, name), 0))
                    )
                bad.send_multipart(hostile_message(kind, rng))
                await asyncio.to_thread(bad.poll, 1000)  # wait for the answer
                bad.close(10_000)
                if number % 25 == 0:
                    reply = await good.call("echo", WireMessage.encode(f"{number}", bytes(100)), timeout=30)
                    assert reply.decode(str) == f"{number}"
                    memory.append(process.memory_info().rss)
            quarter = len(memory) // 4
            second, last = memory[quarter : 2 * quarter], memory[-quarter:]
            assert kind == "warm-up" or sum(last) / len(last) <= 1.05 * sum(second) / len(second)
        async with asyncio.timeout(60):
            while server.num_rejected < 2 * COUNT:
                await asyncio.sleep(0.01)
    context.destroy(0)


async def test_non_zmq_bytes_and_oversized_frames_close_only_their_own_connection():
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
