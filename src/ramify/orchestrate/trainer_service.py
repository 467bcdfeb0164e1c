"""The requests that a trainer makes to the orchestrator; docs/trainer.md has the protocol.

Every request may be repeated and gets the same reply. A trainer is identified by its incarnation: after a trainer was
replaced, all its requests are rejected.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from ramify.core.errors import Failure, PeerLost, StorageFull
from ramify.orchestrate.batches import split_by_rank
from ramify.orchestrate.core import OrchestratorCore
from ramify.orchestrate.progress import RunProgress, TrainedStep
from ramify.orchestrate.weight_updates import WeightUpdater
from ramify.processes.wire import IncomingRequest, WireMessage
from ramify.run.fencing.token import FencingToken, TokenGate, check_token
from ramify.run.store.ledger_tables import CommitRecord
from ramify.trace.version import PolicyVersion
from ramify.train.batch import PackSpec
from ramify.train.batch_codec import encode_batch
from ramify.train.protocol import (
    BatchRequest,
    CheckpointRequest,
    CopiedRequest,
    PublishedRequest,
    RegisterReply,
    RegisterRequest,
    TrainedRequest,
    UnsavedRequest,
)

MAX_CACHED_BATCHES = 4  # batches whose encoded shares stay in memory


class TrainerService:
    """Handles the requests of the trainer. `on_trainer_replaced` is called when a new trainer registers.

    `run` is the id of the run, which tells its uploaded weights apart from other runs with the same name.
    `get_keep_values` returns the values of the metric `checkpoint.keep_best` by step.

    Attributes:
        has_trainer: whether a trainer has registered.
        is_stopping: whether the run stops: the trainer saves a checkpoint and gets no more batches.
        checkpoint_committed: set when the trainer has saved a checkpoint.
        pending_request: the step whose batch the trainer waits for, and the monotonic time of the request.
        trained_steps: steps that the trainer has reported, for `background.record_engine_times`.
    """

    def __init__(
        self,
        core: OrchestratorCore,
        weight_updater: WeightUpdater,
        progress: RunProgress,
        *,
        policy: str,
        run: str = "",
        max_steps: int,
        on_trainer_replaced: Callable[[], None],
        get_keep_values: Callable[[], Mapping[int, float]] = dict,
    ) -> None:
        self._core, self._weight_updater, self._progress = core, weight_updater, progress
        self._policy, self._run, self._max_steps = policy, run, max_steps
        self._on_trainer_replaced, self._get_keep_values = on_trainer_replaced, get_keep_values
        self._pack_spec, self._num_ranks, self.has_trainer = PackSpec(), 1, False
        self._start_gate = TokenGate("trainer start")
        self._encoded_shares: dict[int, list[bytes]] = {}
        self._served_at: dict[int, float] = {}  # monotonic time at which a batch was served, by step
        self._state_changed = asyncio.Condition()  # notified when a batch was formed or the run ends
        self.is_stopping = False
        self.checkpoint_committed = asyncio.Event()
        self.pending_request: tuple[int, float] | None = None
        self.trained_steps: asyncio.Queue[TrainedStep] = asyncio.Queue()
        self._last_unsaved: tuple[int, int] | None = None  # incarnation and step of the last failed save
        self._last_trained: tuple[int, float] | None = None  # the last step reported, and its monotonic time

    @property
    def handlers(self) -> dict[str, Callable[[IncomingRequest], Awaitable[WireMessage]]]:
        """Handlers by the name of the request on the wire."""
        return {
            "hello": self.handle_hello,
            "batch": self.handle_batch,
            "trained": self.handle_trained,
            "published": self.handle_published,
            "copied": self.handle_copied,
            "checkpoint": self.handle_checkpoint,
            "unsaved": self.handle_unsaved,
        }

    @property
    def is_finished(self) -> bool:
        """Whether every step of the run is committed."""
        admission = self._core.admission
        return admission.is_finished and self._core.ledger_progress.committed >= admission.next_step

    async def notify_waiters(self) -> None:
        """Wake up pending batch requests after a batch was formed, or because the run ends."""
        async with self._state_changed:
            self._state_changed.notify_all()

    async def handle_hello(self, message: IncomingRequest) -> WireMessage:
        """Register a trainer. A new one starts a new incarnation, unless it is the first of the run.

        Raises ProcessReplaced for a rank of an earlier start: it must not replace the newer one.
        """
        request = message.decode(RegisterRequest)
        incarnation = request.incarnation
        if request.start_token is not None:
            self._start_gate.check(FencingToken.from_number(request.start_token))
        if incarnation is None:
            registration = await self._core.register_trainer()
            incarnation = registration.incarnation
            if registration.is_replacement:
                self._on_trainer_replaced()
                await self.notify_waiters()
        self._check_incarnation(incarnation)  # another trainer may have registered during an await
        self.has_trainer, self._encoded_shares, self._last_trained = True, {}, None
        self._pack_spec, self._num_ranks = request.pack_spec, request.world_size
        committed = self._core.ledger_progress.committed
        commit = self._core.ledger.get_commit(committed)
        reply = RegisterReply(
            committed=committed,
            checkpoint=commit.directory if commit is not None else "",
            digest=commit.digest if commit is not None else "",
            incarnation=incarnation,
            policy=self._policy,
            steps=self._max_steps,
            run=self._run,
        )
        return WireMessage.encode(reply)

    async def handle_batch(self, message: IncomingRequest) -> WireMessage:
        """Return the share of a rank as soon as its batch is formed; nothing if no batch will follow."""
        request = message.decode(BatchRequest)
        self._check_registered(request.incarnation)
        self.pending_request = (request.step, time.monotonic())
        try:
            async with self._state_changed:
                await self._state_changed.wait_for(lambda: self._can_answer(request))
        finally:
            self.pending_request = None
        self._check_incarnation(request.incarnation)
        if self.is_stopping or self._is_past_last_step(request.step):
            return WireMessage.encode(None)
        if request.step not in self._encoded_shares:
            batch = await self._core.serve_batch(request.step, request.incarnation)
            assert batch is not None  # `_can_answer` implies that it is formed
            shares = split_by_rank(batch, self._core.get_forests(batch), self._pack_spec, self._num_ranks)
            self._encoded_shares[request.step] = [encode_batch(share) for share in shares]
            for step in sorted(self._encoded_shares)[:-MAX_CACHED_BATCHES]:
                del self._encoded_shares[step]
        self._served_at.setdefault(request.step, time.monotonic())
        return WireMessage.encode(None, self._encoded_shares[request.step][request.rank])

    async def handle_trained(self, message: IncomingRequest) -> WireMessage:
        """Acknowledge a step and record its metrics; the reply says whether the run stops."""
        request = message.decode(TrainedRequest)
        self._check_registered(request.incarnation)
        await self._core.acknowledge_step(request.step, request.incarnation)
        metrics, now = dict(request.metrics), time.monotonic()
        if (served_at := self._served_at.pop(request.step, None)) is not None:
            metrics["time/train"] = now - served_at
        if self._last_trained is not None and request.step > self._last_trained[0]:  # else the report is repeated
            metrics["time/step"] = now - self._last_trained[1]
            self.trained_steps.put_nowait(TrainedStep(request.step, metrics["time/step"], metrics))
        if self._last_trained is None or request.step > self._last_trained[0]:
            self._last_trained = (request.step, now)
        self._progress.record_metrics(request.step, metrics)
        self._progress.mark_progress()
        return WireMessage.encode(self.is_stopping)

    async def handle_published(self, message: IncomingRequest) -> WireMessage:
        """Request an update of the engines; the reply lists the versions that must stay on disk."""
        request = message.decode(PublishedRequest)
        self._check_registered(request.incarnation)
        self._weight_updater.request_update(PolicyVersion(*request.version), Path(request.path))
        return WireMessage.encode([tuple(version) for version in self._weight_updater.versions_in_use])

    async def handle_copied(self, message: IncomingRequest) -> WireMessage:
        """Reply when no engine copies a version from the trainer's memory, or say which have not copied it in time."""
        request = message.decode(CopiedRequest)
        self._check_registered(request.incarnation)
        return WireMessage.encode(await self._weight_updater.wait_until_copied(PolicyVersion(*request.version)))

    async def handle_checkpoint(self, message: IncomingRequest) -> WireMessage:
        """Commit the version of a saved checkpoint."""
        request = message.decode(CheckpointRequest)
        self._check_registered(request.incarnation)
        commit = CommitRecord(request.step, request.incarnation, request.directory, request.digest)
        await self._core.commit_version(commit)
        self._progress.record_metrics(request.step, {"committed": float(request.step)})
        self.checkpoint_committed.set()
        return WireMessage.encode(dict(self._get_keep_values()))

    async def handle_unsaved(self, message: IncomingRequest) -> WireMessage:
        """Record that a checkpoint could not be saved, for the display and `ramify why`."""
        request = message.decode(UnsavedRequest)
        self._check_registered(request.incarnation)
        if self._last_unsaved != (key := (request.incarnation, request.step)):  # else the report is repeated
            self._last_unsaved = key
            self._progress.record_failure("checkpoints", Failure.from_exception(StorageFull(request.message)))
        return WireMessage.encode(None)

    def _can_answer(self, request: BatchRequest) -> bool:
        """Return whether a batch request can be answered now."""
        is_replaced = request.incarnation != self._core.ledger_progress.incarnation
        is_formed = request.step < self._core.admission.next_step
        return is_replaced or self.is_stopping or self._is_past_last_step(request.step) or is_formed

    def _is_past_last_step(self, step: int) -> bool:
        return self._core.admission.is_finished and step >= self._core.admission.next_step

    def _check_incarnation(self, incarnation: int) -> None:
        newest = FencingToken.from_number(self._core.ledger_progress.incarnation)
        check_token("trainer", FencingToken.from_number(incarnation), newest)

    def _check_registered(self, incarnation: int) -> None:
        """Raise ProcessReplaced if the trainer was replaced, PeerLost if it has not registered with this process."""
        self._check_incarnation(incarnation)
        if not self.has_trainer:
            raise PeerLost("the orchestrator was restarted; send hello before other requests")
