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
from ramify.orchestrate.batches import split_by_rank
from ramify.orchestrate.core import OrchestratorCore
from ramify.orchestrate.progress import RunProgress
from ramify.orchestrate.weight_updates import WeightUpdater
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

MAX_CACHED_BATCHES = 4  # batches whose shares are kept encoded


class TrainerService:
    """The methods a trainer calls."""

    def __init__(
        self,
        core: OrchestratorCore,
        weight_updater: WeightUpdater,
        progress: RunProgress,
        *,
        policy: str,
        max_steps: int,
        on_trainer_replaced: Callable[[], None],
    ) -> None:
        self._core, self._weight_updater, self._progress = core, weight_updater, progress
        self._policy, self._max_steps, self._on_trainer_replaced = policy, max_steps, on_trainer_replaced
        self._pack_spec, self._num_ranks, self._trainer_registered = PackSpec(), 1, False
        self._encoded_shares: dict[int, list[bytes]] = {}
        self._served_at: dict[int, float] = {}  # step: when its batch was given out
        self.state_changed = asyncio.Condition()  # told when a batch was cut or the run ends
        self.is_stopping = False  # the run was asked to end: a checkpoint now, and no more batches
        self.checkpoint_committed = asyncio.Event()
        self.pending_request: tuple[int, float] | None = None  # the step the trainer waits for, and since when

    @property
    def handlers(self) -> dict[str, Callable[[IncomingRequest], "asyncio.Future[WireMessage]"]]:
        found = {"hello": self.handle_hello, "batch": self.handle_batch, "trained": self.handle_trained}
        return {**found, "published": self.handle_published, "checkpoint": self.handle_checkpoint}  # type: ignore[dict-item]

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer has come."""
        return self._trainer_registered

    @property
    def is_finished(self) -> bool:
        """Whether every step of the run is in the history."""
        admission = self._core.admission
        return admission.is_finished and self._core.ledger_progress.committed >= admission.next_step

    async def notify_waiters(self) -> None:
        """A batch was cut, or the run ends: whoever waits looks again."""
        async with self.state_changed:
            self.state_changed.notify_all()

    async def handle_hello(self, request: IncomingRequest) -> WireMessage:
        asked = request.decode(RegisterRequest)
        if asked.incarnation is not None:
            self._check_incarnation(asked.incarnation)
        elif (
            self._trainer_registered or self._core.ledger.served_batches()
        ):  # a trainer was here, if only before this process was
            await self._core.restart_trainer()
            self._on_trainer_replaced()
            await self.notify_waiters()
        self._trainer_registered, self._encoded_shares = True, {}
        self._pack_spec, self._num_ranks = asked.laying, asked.ranks
        ledger_progress = self._core.ledger_progress
        welcome = RegisterReply(
            committed=ledger_progress.committed,
            incarnation=ledger_progress.incarnation,
            policy=self._policy,
            steps=self._max_steps,
        )
        return WireMessage.encode(welcome)

    async def handle_batch(self, request: IncomingRequest) -> WireMessage:
        """The share of a rank, as soon as there is one; nothing if none will come."""
        asked = request.decode(BatchRequest)
        self._check_registered(asked.incarnation)
        self.pending_request = (asked.step, time.monotonic())
        try:
            async with self.state_changed:
                await self.state_changed.wait_for(lambda: self._can_answer(asked))
        finally:
            self.pending_request = None
        self._check_incarnation(asked.incarnation)
        if self.is_stopping or self._is_past_last_step(asked.step):
            return WireMessage.encode(None)
        if asked.step not in self._encoded_shares:
            stored = await self._core.serve_batch(asked.step)
            assert stored is not None  # `_known` saw it
            found = split_by_rank(stored, self._core.get_forests(stored), self._pack_spec, self._num_ranks)
            self._encoded_shares[asked.step] = [encode_batch(share) for share in found]
            for step in sorted(self._encoded_shares)[:-MAX_CACHED_BATCHES]:
                del self._encoded_shares[step]
        self._served_at.setdefault(asked.step, time.monotonic())
        return WireMessage.encode(None, self._encoded_shares[asked.step][asked.rank])

    async def handle_trained(self, request: IncomingRequest) -> WireMessage:
        asked = request.decode(TrainedRequest)
        self._check_registered(asked.incarnation)
        await self._core.acknowledge_step(asked.step)
        served = self._served_at.pop(asked.step, None)
        taken = {} if served is None else {"time/train": time.monotonic() - served}
        self._progress.record_metrics(asked.step, {**asked.metrics, **taken})
        self._progress.last_progress_time = time.monotonic()
        return WireMessage.encode(self.is_stopping)

    async def handle_published(self, request: IncomingRequest) -> WireMessage:
        asked = request.decode(PublishedRequest)
        self._check_registered(asked.incarnation)
        self._weight_updater.request_update(PolicyVersion(*asked.version), Path(asked.path))
        return WireMessage.encode([tuple(version) for version in self._weight_updater.versions_in_use])

    async def handle_checkpoint(self, request: IncomingRequest) -> WireMessage:
        asked = request.decode(CheckpointRequest)
        self._check_registered(asked.incarnation)
        await self._core.commit_version(asked.step)
        self._progress.record_metrics(asked.step, {"committed": float(asked.step)})
        self.checkpoint_committed.set()
        return WireMessage.encode(None)

    def _can_answer(self, request: BatchRequest) -> bool:
        """Whether it is known by now what the answer is."""
        stale = request.incarnation != self._core.ledger_progress.incarnation
        return (
            stale
            or self.is_stopping
            or self._is_past_last_step(request.step)
            or request.step < self._core.admission.next_step
        )

    def _is_past_last_step(self, step: int) -> bool:
        return self._core.admission.is_finished and step >= self._core.admission.next_step

    def _check_incarnation(self, incarnation: int) -> None:
        now = self._core.ledger_progress.incarnation
        if incarnation != now:
            raise PeerRefused(f"this trainer is incarnation {incarnation}; the run goes on with incarnation {now}")

    def _check_registered(self, incarnation: int) -> None:
        """Refuse a stranger: one who was replaced, and one who has not greeted this process yet."""
        self._check_incarnation(incarnation)
        if not self._trainer_registered:
            raise PeerLost("the orchestrator was started again and has forgotten the trainer: greet it first")
