"""A small orchestrator: the trainer's protocol over a real wire, its ledger in memory."""

import asyncio
import threading

from ramify.errors import PeerLost, PeerRefused, PortTaken
from ramify.launch.ports import assign_ports
from ramify.train.batch import Batch, PackSpec, encode_batch, repack, split_across_ranks
from ramify.train.protocol import (
    BatchRequest,
    CheckpointRequest,
    PublishedRequest,
    RegisterReply,
    RegisterRequest,
    TrainedRequest,
)
from ramify.wire import IncomingRequest, WireMessage, WireServer

KINDS = {
    "hello": RegisterRequest,
    "batch": BatchRequest,
    "trained": TrainedRequest,
    "published": PublishedRequest,
    "checkpoint": CheckpointRequest,
}


class Orchestrator:
    """Serves the same batches to whoever comes, and remembers what it was told."""

    def __init__(self, batches: list[Batch], address: str | None = None) -> None:
        self.batches = batches
        self.address = address or assign_ports({"it": "tcp://127.0.0.1:0"})["it"]  # a port that nobody takes in between
        self.committed, self.incarnation = 0, -1
        self.laying, self.ranks = PackSpec(), 0
        self.served: list[tuple[int, int]] = []  # (incarnation, step)
        self.trained: dict[tuple[int, int], float] = {}  # the loss
        self.published: list[tuple[tuple[str, int, int], str]] = []
        self.commits: list[int] = []
        self.needed: list[tuple[str, int, int]] | None = []
        self.changed = threading.Condition()

    def __enter__(self):
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(30)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)

    def wait_for(self, what) -> None:
        with self.changed:
            assert self.changed.wait_for(what, 60), "it never came"

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = WireServer({name: self._handler(name) for name in KINDS}, self.address)
        async with asyncio.timeout(20):
            while True:
                try:
                    await server.start()
                    break
                except PortTaken:  # the one before it has closed its socket, which lets go of the port in its own time
                    await asyncio.sleep(0.05)
        try:
            self.address = server.address
            started.set()
            await self._end.wait()
        finally:
            await server.close()

    def _handler(self, name: str):
        async def handle(request: IncomingRequest) -> WireMessage:
            said = request.decode(KINDS[name])
            if name != "hello" and said.incarnation != self.incarnation:
                raise PeerRefused(f"trainer {said.incarnation} was replaced by {self.incarnation}")
            if name != "hello" and not self.ranks:
                raise PeerLost("started again: greet me first")
            with self.changed:
                answer = getattr(self, f"_{name}")(said)
                self.changed.notify_all()
            return answer

        return handle

    def _hello(self, said: RegisterRequest) -> WireMessage:
        if said.incarnation is None:
            self.incarnation += 1
        self.ranks, self.laying = said.ranks, said.laying
        return WireMessage.encode(RegisterReply(committed=self.committed, incarnation=self.incarnation, policy="p"))

    def _batch(self, said: BatchRequest) -> WireMessage:
        if said.step >= len(self.batches):
            return WireMessage.encode(None)
        self.served.append((said.incarnation, said.step))
        whole = repack([self.batches[said.step]], self.laying)
        return WireMessage.encode(None, encode_batch(split_across_ranks(whole, self.laying, self.ranks)[said.rank]))

    def _trained(self, said: TrainedRequest) -> WireMessage:
        self.trained[said.incarnation, said.step] = said.metrics["train/loss"]
        return WireMessage.encode(False)

    def _published(self, said: PublishedRequest) -> WireMessage:
        self.published.append((said.version, said.path))
        return WireMessage.encode(self.needed)

    def _checkpoint(self, said: CheckpointRequest) -> WireMessage:
        self.committed = said.step
        self.commits.append(said.step)
        return WireMessage.encode(None)
