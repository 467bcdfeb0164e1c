"""The trainer's door: it asks for batches and tells what became of them. docs/training.md has the protocol.

Every question can be asked twice and has the same answer. A trainer is known by its incarnation: one that was replaced
is refused, whatever it asks.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from ramify.errors import PeerLost, PeerRefused
from ramify.model.version import PolicyVersion
from ramify.orchestrate.batch import share_out
from ramify.orchestrate.core import Core
from ramify.orchestrate.progress import Progress
from ramify.orchestrate.weights import Weights
from ramify.train.batch import PackSpec, encode_batch
from ramify.train.protocol import (
    BatchRequest,
    CheckpointRequest,
    PublishedRequest,
    RegisterReply,
    RegisterRequest,
    TrainedRequest,
)
from ramify.wire import IncomingRequest, WireMessage

KEPT = 4  # batches whose shares are kept encoded


class TrainerService:
    """The methods a trainer calls."""

    def __init__(
        self,
        core: Core,
        weights: Weights,
        progress: Progress,
        *,
        policy: str,
        steps: int,
        replaced: Callable[[], None],
    ) -> None:
        self._core, self._weights, self._progress = core, weights, progress
        self._policy, self._steps, self._replaced = policy, steps, replaced
        self._laying, self._ranks, self._met = PackSpec(), 1, False
        self._shares: dict[int, list[bytes]] = {}
        self._served: dict[int, float] = {}  # step: when its batch was given out
        self.more = asyncio.Condition()  # told when a batch was cut or the run ends
        self.leaving = False  # the run was asked to end: a checkpoint now, and no more batches
        self.committed = asyncio.Event()
        self.asking: tuple[int, float] | None = None  # the step the trainer waits for, and since when

    @property
    def handlers(self) -> dict[str, Callable[[IncomingRequest], "asyncio.Future[WireMessage]"]]:
        found = {"hello": self.hello, "batch": self.batch, "trained": self.trained}
        return {**found, "published": self.published, "checkpoint": self.checkpoint}  # type: ignore[dict-item]

    @property
    def met(self) -> bool:
        """Whether a trainer has come."""
        return self._met

    @property
    def over(self) -> bool:
        """Whether every step of the run is in the history."""
        admission = self._core.admission
        return admission.finished and self._core.marks.committed >= admission.step

    async def announce(self) -> None:
        """A batch was cut, or the run ends: whoever waits looks again."""
        async with self.more:
            self.more.notify_all()

    async def hello(self, request: IncomingRequest) -> WireMessage:
        asked = request.decode(RegisterRequest)
        if asked.incarnation is not None:
            self._check(asked.incarnation)
        elif self._met or self._core.ledger.served_batches():  # a trainer was here, if only before this process was
            await self._core.restart_trainer()
            self._replaced()
            await self.announce()
        self._met, self._shares = True, {}
        self._laying, self._ranks = asked.laying, asked.ranks
        marks = self._core.marks
        welcome = RegisterReply(
            committed=marks.committed, incarnation=marks.incarnation, policy=self._policy, steps=self._steps
        )
        return WireMessage.encode(welcome)

    async def batch(self, request: IncomingRequest) -> WireMessage:
        """The share of a rank, as soon as there is one; nothing if none will come."""
        asked = request.decode(BatchRequest)
        self._check_met(asked.incarnation)
        self.asking = (asked.step, time.monotonic())
        try:
            async with self.more:
                await self.more.wait_for(lambda: self._known(asked))
        finally:
            self.asking = None
        self._check(asked.incarnation)
        if self.leaving or self._ended(asked.step):
            return WireMessage.encode(None)
        if asked.step not in self._shares:
            stored = await self._core.serve(asked.step)
            assert stored is not None  # `_known` saw it
            found = share_out(stored, self._core.forests(stored), self._laying, self._ranks)
            self._shares[asked.step] = [encode_batch(share) for share in found]
            for step in sorted(self._shares)[:-KEPT]:
                del self._shares[step]
        self._served.setdefault(asked.step, time.monotonic())
        return WireMessage.encode(None, self._shares[asked.step][asked.rank])

    async def trained(self, request: IncomingRequest) -> WireMessage:
        asked = request.decode(TrainedRequest)
        self._check_met(asked.incarnation)
        await self._core.acknowledge(asked.step)
        served = self._served.pop(asked.step, None)
        taken = {} if served is None else {"time/train": time.monotonic() - served}
        self._progress.record(asked.step, {**asked.metrics, **taken})
        self._progress.moved = time.monotonic()
        return WireMessage.encode(self.leaving)

    async def published(self, request: IncomingRequest) -> WireMessage:
        asked = request.decode(PublishedRequest)
        self._check_met(asked.incarnation)
        self._weights.offer(PolicyVersion(*asked.version), Path(asked.path))
        return WireMessage.encode([tuple(version) for version in self._weights.needed])

    async def checkpoint(self, request: IncomingRequest) -> WireMessage:
        asked = request.decode(CheckpointRequest)
        self._check_met(asked.incarnation)
        await self._core.commit(asked.step)
        self._progress.record(asked.step, {"committed": float(asked.step)})
        self.committed.set()
        return WireMessage.encode(None)

    def _known(self, asked: BatchRequest) -> bool:
        """Whether it is known by now what the answer is."""
        stale = asked.incarnation != self._core.marks.incarnation
        return stale or self.leaving or self._ended(asked.step) or asked.step < self._core.admission.step

    def _ended(self, step: int) -> bool:
        return self._core.admission.finished and step >= self._core.admission.step

    def _check(self, incarnation: int) -> None:
        now = self._core.marks.incarnation
        if incarnation != now:
            raise PeerRefused(f"this trainer is incarnation {incarnation}; the run goes on with incarnation {now}")

    def _check_met(self, incarnation: int) -> None:
        """Refuse a stranger: one who was replaced, and one who has not greeted this process yet."""
        self._check(incarnation)
        if not self._met:
            raise PeerLost("the orchestrator was started again and has forgotten the trainer: greet it first")
