"""The orchestrator over the wire.

The trainer is one thread of plain code; a second thread runs the event loop of the wire. A question that gets no answer
because the orchestrator is gone or slow is asked again until `patience` is over: it is the same question, so it has the
same answer. An orchestrator that was started again has forgotten the trainer, so it is greeted again first, under the
incarnation it had, and told what was published last: its predecessor may have died before the engines had it.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import BatchCorrupt, DeadlineExceeded, PeerLost, QueueFull
from ramify.model.version import PolicyVersion
from ramify.train.batches import Batch, Laying, decode
from ramify.train.protocol import AskBatch, Checkpointed, Hello, Published, Trained, Welcome
from ramify.train.source import Recording
from ramify.wire import WireClient, WireMessage

ASK = 60.0  # seconds that one question may take before it is asked again
LOOK = 0.2  # seconds between two looks at whether to stop
AGAIN = 0.5  # seconds before a question is repeated
PARTING = 5.0  # seconds that whoever was asked to stop still gives an answer


class _Stopped(Exception):
    """Nobody wants the answer any more."""


class RemoteSource:
    """A `BatchSource` that asks the orchestrator at `address`."""

    def __init__(
        self,
        address: str,
        *,
        secret: str | None = None,
        patience: float = 3600.0,
        recording: Recording | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.address, self.patience, self.recording, self.stopped = address, patience, recording, stopped
        self._secret = secret
        self._greeting: Hello | None = None
        self._published: Published | None = None
        self._client: WireClient | None = None
        self._forgotten = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire to the orchestrator", daemon=True)
        self._thread.start()

    def hello(self, rank: int, ranks: int, laying: Laying, incarnation: int | None) -> Welcome:
        greeting = Hello(rank=rank, ranks=ranks, laying=laying, incarnation=incarnation)
        welcome = self._ask("hello", greeting).decode(Welcome)
        self._greeting = msgspec.structs.replace(greeting, incarnation=welcome.incarnation)
        return welcome

    def batch(self, step: int, stopped: Callable[[], bool]) -> Batch | None:
        asked = AskBatch(**self._own, step=step)
        try:
            answer = self._ask("batch", asked, stopped)
            if not answer.blobs:
                return None
            try:
                found = decode(answer.blobs[0])
            except BatchCorrupt:
                answer = self._ask("batch", asked, stopped)
                found = decode(answer.blobs[0])
        except _Stopped:
            return None
        if self.recording is not None:
            assert self._greeting is not None
            self.recording.add(step, asked.rank, answer.blobs[0], self._greeting.ranks)
        return found

    def trained(self, step: int, metrics: Mapping[str, float]) -> bool:
        return self._ask("trained", Trained(**self._own, step=step, metrics=dict(metrics))).decode(bool)

    def published(self, version: PolicyVersion, path: Path) -> Sequence[PolicyVersion] | None:
        kind: Any = list[tuple[str, int, int]] | None
        self._published = Published(**self._own, version=version, path=str(path))
        found = self._ask("published", self._published).decode(kind)
        return None if found is None else [PolicyVersion(*each) for each in found]

    def checkpoint(self, step: int) -> None:
        self._ask("checkpoint", Checkpointed(**self._own, step=step))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._part(), self._loop).result(ASK)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ASK)
        self._loop.close()

    async def _part(self) -> None:
        if self._client is not None:
            await self._client.close()
        if given_up := asyncio.all_tasks() - {asyncio.current_task()}:  # questions that were cancelled
            await asyncio.wait(given_up, timeout=PARTING)

    @property
    def _own(self) -> dict[str, Any]:
        """Who asks: a trainer that was replaced is told so by its incarnation."""
        assert self._greeting is not None, "say hello first"
        return {"rank": self._greeting.rank, "incarnation": self._greeting.incarnation}

    def _ask(self, method: str, said: msgspec.Struct, stopped: Callable[[], bool] = lambda: False) -> WireMessage:
        """The answer, however often the question has to be asked until `patience` is over, or `PARTING`."""
        message, started = WireMessage.encode(said), time.monotonic()
        deadline = started + self.patience
        while True:
            asked = asyncio.run_coroutine_threadsafe(self._talk(method, message), self._loop)
            try:
                while not asked.done():
                    if stopped():
                        asked.cancel()
                        raise _Stopped
                    deadline = self._sooner(deadline)
                    if self.stopped() and time.monotonic() > deadline:
                        asked.cancel()
                        raise DeadlineExceeded("it was asked to stop")
                    concurrent.futures.wait([asked], LOOK)
                return asked.result()
            except (PeerLost, DeadlineExceeded, QueueFull) as error:
                self._forgotten |= isinstance(error, PeerLost)
                deadline = self._sooner(deadline)
                if time.monotonic() > deadline:
                    waited = f"{method} was not answered for {time.monotonic() - started:.1f} s"
                    raise DeadlineExceeded(f"the orchestrator at {self.address}: {waited} ({error})") from error
            time.sleep(AGAIN)

    def _sooner(self, deadline: float) -> float:
        return min(deadline, time.monotonic() + PARTING) if self.stopped() else deadline

    async def _talk(self, method: str, message: WireMessage) -> WireMessage:
        wait = min(ASK, self.patience)
        if self._client is None:
            self._client = await WireClient(self.address, secret=self._secret).start(wait)
        if self._forgotten and self._greeting is not None:
            await self._client.call("hello", WireMessage.encode(self._greeting), timeout=wait)
            if self._published is not None:
                await self._client.call("published", WireMessage.encode(self._published), timeout=wait)
        self._forgotten = False
        return await self._client.call(method, message, timeout=wait)
