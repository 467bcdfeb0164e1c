"""A fake orchestrator: the trainer's protocol over a real wire, with its ledger in memory."""

import asyncio
import threading

from ramify.errors import PeerLost, PortTaken, ProcessReplaced
from ramify.launch.ports import PortReservation
from ramify.train.batch import Batch, PackSpec, repack, split_across_ranks
from ramify.train.batch_codec import encode_batch
from ramify.train.protocol import (
    BatchRequest,
    CheckpointRequest,
    PublishedRequest,
    RegisterReply,
    RegisterRequest,
    TrainedRequest,
    UnsavedRequest,
)
from ramify.wire import IncomingRequest, WireMessage, WireServer

REQUEST_TYPES = {
    "hello": RegisterRequest,
    "batch": BatchRequest,
    "trained": TrainedRequest,
    "published": PublishedRequest,
    "checkpoint": CheckpointRequest,
    "unsaved": UnsavedRequest,
}


class FakeOrchestrator:
    """Serves the same batches to every trainer, and records what trainers report."""

    def __init__(self, batches: list[Batch], address: str | None = None) -> None:
        self.batches = batches
        self.address = address or PortReservation({"it": "tcp://127.0.0.1:0"}).addresses["it"]  # free from now on
        self.committed, self.incarnation = 0, -1
        self.checkpoint = ("", "")  # directory and digest of the last commit
        self.pack_spec, self.world_size = PackSpec(), 0
        self.served: list[tuple[int, int]] = []  # (incarnation, step)
        self.trained: dict[tuple[int, int], float] = {}  # (incarnation, step): loss
        self.published: list[tuple[tuple[str, int, int], str]] = []
        self.commits: list[int] = []
        self.unsaved: dict[int, str] = {}  # step: message
        self.needed: list[tuple[str, int, int]] | None = []
        self.last_step: int | None = None  # trainers wait for later batches
        self.changed = threading.Condition()

    def __enter__(self):
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(60)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)

    def wait_for(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 60), "timed out"

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = WireServer({name: self._handler(name) for name in REQUEST_TYPES}, self.address)
        async with asyncio.timeout(60):
            while True:
                try:
                    await server.start()
                    break
                except PortTaken:  # the kernel frees the port of the previous server a little later
                    await asyncio.sleep(0.05)
        try:
            self.address = server.address
            started.set()
            await self._end.wait()
        finally:
            await server.close()

    def _handler(self, name: str):
        async def handle(incoming: IncomingRequest) -> WireMessage:
            request = incoming.decode(REQUEST_TYPES[name])
            if name != "hello" and request.incarnation != self.incarnation:
                raise ProcessReplaced(f"trainer {request.incarnation} was replaced by {self.incarnation}")
            if name != "hello" and not self.world_size:
                raise PeerLost("the orchestrator was restarted: register again")
            while name == "batch" and self.last_step is not None and request.step > self.last_step:
                await asyncio.sleep(0.01)
            with self.changed:
                reply = getattr(self, f"_{name}")(request)
                self.changed.notify_all()
            return reply

        return handle

    def _hello(self, request: RegisterRequest) -> WireMessage:
        if request.incarnation is None:
            self.incarnation += 1
        self.world_size, self.pack_spec = request.world_size, request.pack_spec
        return WireMessage.encode(
            RegisterReply(
                committed=self.committed,
                checkpoint=self.checkpoint[0],
                digest=self.checkpoint[1],
                incarnation=self.incarnation,
                policy="p",
            )
        )

    def _batch(self, request: BatchRequest) -> WireMessage:
        if request.step >= len(self.batches):
            return WireMessage.encode(None)
        self.served.append((request.incarnation, request.step))
        batch = repack([self.batches[request.step]], self.pack_spec)
        share = split_across_ranks(batch, self.pack_spec, self.world_size)[request.rank]
        return WireMessage.encode(None, encode_batch(share))

    def _trained(self, request: TrainedRequest) -> WireMessage:
        self.trained[request.incarnation, request.step] = request.metrics["train/loss"]
        return WireMessage.encode(False)

    def _published(self, request: PublishedRequest) -> WireMessage:
        self.published.append((request.version, request.path))
        return WireMessage.encode(self.needed)

    def _checkpoint(self, request: CheckpointRequest) -> WireMessage:
        self.committed, self.checkpoint = request.step, (request.directory, request.digest)
        self.commits.append(request.step)
        return WireMessage.encode(None)

    def _unsaved(self, request: UnsavedRequest) -> WireMessage:
        self.unsaved[request.step] = request.message
        return WireMessage.encode(None)
