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
from ramify.train.batch import Batch, PackSpec, decode_batch
from ramify.train.batch_source import BatchRecording
from ramify.train.protocol import (
    BatchRequest,
    CheckpointRequest,
    PublishedRequest,
    RegisterReply,
    RegisterRequest,
    TrainedRequest,
)
from ramify.wire import WireClient, WireMessage

CALL_TIMEOUT = 60.0  # seconds that one question may take before it is asked again
POLL_INTERVAL = 0.2  # seconds between two looks at whether to stop
RETRY_DELAY = 0.5  # seconds before a question is repeated
STOP_TIMEOUT = 5.0  # seconds that whoever was asked to stop still gives an answer


class _StopRequested(Exception):
    """Nobody wants the answer any more."""


class RemoteBatchSource:
    """A `BatchSource` that asks the orchestrator at `address`."""

    def __init__(
        self,
        address: str,
        *,
        secret: str | None = None,
        timeout: float = 3600.0,
        recording: BatchRecording | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.address, self.timeout, self.recording, self.should_stop = address, timeout, recording, should_stop
        self._secret = secret
        self._registration: RegisterRequest | None = None
        self._last_published: PublishedRequest | None = None
        self._client: WireClient | None = None
        self._must_register_again = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire to the orchestrator", daemon=True)
        self._thread.start()

    def register(self, rank: int, world_size: int, pack_spec: PackSpec, incarnation: int | None) -> RegisterReply:
        greeting = RegisterRequest(rank=rank, ranks=world_size, laying=pack_spec, incarnation=incarnation)
        welcome = self._call_with_retries("hello", greeting).decode(RegisterReply)
        self._registration = msgspec.structs.replace(greeting, incarnation=welcome.incarnation)
        return welcome

    def get_batch(self, step: int, should_stop: Callable[[], bool]) -> Batch | None:
        asked = BatchRequest(**self._sender, step=step)
        try:
            answer = self._call_with_retries("batch", asked, should_stop)
            if not answer.blobs:
                return None
            try:
                found = decode_batch(answer.blobs[0])
            except BatchCorrupt:
                answer = self._call_with_retries("batch", asked, should_stop)
                found = decode_batch(answer.blobs[0])
        except _StopRequested:
            return None
        if self.recording is not None:
            assert self._registration is not None
            self.recording.write_share(step, asked.rank, answer.blobs[0], self._registration.ranks)
        return found

    def report_trained(self, step: int, metrics: Mapping[str, float]) -> bool:
        return self._call_with_retries(
            "trained", TrainedRequest(**self._sender, step=step, metrics=dict(metrics))
        ).decode(bool)

    def report_published(self, version: PolicyVersion, path: Path) -> Sequence[PolicyVersion] | None:
        kind: Any = list[tuple[str, int, int]] | None
        self._last_published = PublishedRequest(**self._sender, version=version, path=str(path))
        found = self._call_with_retries("published", self._last_published).decode(kind)
        return None if found is None else [PolicyVersion(*each) for each in found]

    def commit_checkpoint(self, step: int) -> None:
        self._call_with_retries("checkpoint", CheckpointRequest(**self._sender, step=step))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close_client(), self._loop).result(CALL_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT)
        self._loop.close()

    async def _close_client(self) -> None:
        if self._client is not None:
            await self._client.close()
        if given_up := asyncio.all_tasks() - {asyncio.current_task()}:  # questions that were cancelled
            await asyncio.wait(given_up, timeout=STOP_TIMEOUT)

    @property
    def _sender(self) -> dict[str, Any]:
        """Who asks: a trainer that was replaced is told so by its incarnation."""
        assert self._registration is not None, "say hello first"
        return {"rank": self._registration.rank, "incarnation": self._registration.incarnation}

    def _call_with_retries(
        self, method: str, request: msgspec.Struct, should_stop: Callable[[], bool] = lambda: False
    ) -> WireMessage:
        """The answer, however often the question has to be asked until `patience` is over, or `PARTING`."""
        message, started = WireMessage.encode(request), time.monotonic()
        deadline = started + self.timeout
        while True:
            asked = asyncio.run_coroutine_threadsafe(self._call_once(method, message), self._loop)
            try:
                while not asked.done():
                    if should_stop():
                        asked.cancel()
                        raise _StopRequested
                    deadline = self._limit_deadline(deadline)
                    if self.should_stop() and time.monotonic() > deadline:
                        asked.cancel()
                        raise DeadlineExceeded("it was asked to stop")
                    concurrent.futures.wait([asked], POLL_INTERVAL)
                return asked.result()
            except (PeerLost, DeadlineExceeded, QueueFull) as error:
                self._must_register_again |= isinstance(error, PeerLost)
                deadline = self._limit_deadline(deadline)
                if time.monotonic() > deadline:
                    waited = f"{method} was not answered for {time.monotonic() - started:.1f} s"
                    raise DeadlineExceeded(f"the orchestrator at {self.address}: {waited} ({error})") from error
            time.sleep(RETRY_DELAY)

    def _limit_deadline(self, deadline: float) -> float:
        return min(deadline, time.monotonic() + STOP_TIMEOUT) if self.should_stop() else deadline

    async def _call_once(self, method: str, message: WireMessage) -> WireMessage:
        wait = min(CALL_TIMEOUT, self.timeout)
        if self._client is None:
            self._client = await WireClient(self.address, secret=self._secret).start(wait)
        if self._must_register_again and self._registration is not None:
            await self._client.call("hello", WireMessage.encode(self._registration), timeout=wait)
            if self._last_published is not None:
                await self._client.call("published", WireMessage.encode(self._last_published), timeout=wait)
        self._must_register_again = False
        return await self._client.call(method, message, timeout=wait)
