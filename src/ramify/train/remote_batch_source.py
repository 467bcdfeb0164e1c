"""The batch source of a trainer in a run: the orchestrator, over the wire.

The trainer is one thread of plain code; a second thread runs the event loop of the wire. If the orchestrator does not
answer, the call is repeated until the timeout; all calls are idempotent. A restarted orchestrator no longer knows the
trainer, so the trainer first registers again, under the same incarnation, and reports the last published version again:
the old orchestrator may have died before the engines loaded it.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.core.errors import DataCorrupt, DeadlineExceeded, PeerLost, QueueFull
from ramify.processes.wire import WireClient, WireMessage
from ramify.run.fencing.token import FencingToken
from ramify.trace.version import PolicyVersion
from ramify.train.batch import Batch, PackSpec
from ramify.train.batch_codec import decode_batch
from ramify.train.batch_source import BatchRecording, BatchSource
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

CALL_TIMEOUT = 60.0  # seconds of one call before it is repeated
POLL_INTERVAL = 0.2  # seconds between two checks of whether to stop
RETRY_DELAY = 0.5  # seconds before a call is repeated
STOP_TIMEOUT = 5.0  # seconds to wait for pending calls after a stop was requested


class RemoteBatchSource(BatchSource):
    """A `BatchSource` that calls the orchestrator at `address`.

    A call is repeated for up to `timeout` seconds, or for STOP_TIMEOUT seconds once `should_stop` returns true; a batch
    is not waited for any longer then. If there is a `recording`, every received batch is written to it. `start_token`
    is the fencing token of the start of this trainer by a cluster launcher; None without one.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: str | None = None,
        timeout: float = 3600.0,
        recording: BatchRecording | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        start_token: FencingToken | None = None,
    ) -> None:
        self.address, self.timeout, self.recording, self.should_stop = address, timeout, recording, should_stop
        self._secret, self._start_token = secret, start_token
        self._registration: RegisterRequest | None = None
        self._last_published: PublishedRequest | None = None
        self._client: WireClient | None = None
        self._must_register_again = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire to the orchestrator", daemon=True)
        self._thread.start()

    def register(self, rank: int, world_size: int, pack_spec: PackSpec, incarnation: int | None) -> RegisterReply:
        """Register the rank at the orchestrator and return its reply."""
        request = RegisterRequest(
            rank=rank,
            world_size=world_size,
            pack_spec=pack_spec,
            incarnation=incarnation,
            start_token=self._start_token.number if self._start_token is not None else None,
        )
        reply = self._call_with_retries("hello", request).decode(RegisterReply)
        self._registration = msgspec.structs.replace(request, incarnation=reply.incarnation)
        return reply

    def get_batch(self, step: int) -> Batch | None:
        """Ask the orchestrator for the rank's share of a batch, until there is one or `should_stop` returns true."""
        if self.should_stop():
            return None
        request = BatchRequest(**self._sender, step=step)
        try:
            reply = self._call_with_retries("batch", request)
            if not reply.blobs:
                return None
            try:
                batch = decode_batch(reply.blobs[0])
            except DataCorrupt:
                reply = self._call_with_retries("batch", request)
                batch = decode_batch(reply.blobs[0])
        except DeadlineExceeded:
            if self.should_stop():
                return None
            raise
        if self.recording is not None:
            assert self._registration is not None
            self.recording.write_share(step, request.rank, reply.blobs[0], self._registration.world_size)
        return batch

    def report_trained(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Report a trained step; return whether the orchestrator asks for a checkpoint."""
        request = TrainedRequest(**self._sender, step=step, metrics=dict(metrics))
        return self._call_with_retries("trained", request).decode(bool)

    def report_published(self, version: PolicyVersion, path: Path) -> Sequence[PolicyVersion] | None:
        """Report published weights; return the versions that engines still need, None if unknown."""
        reply_type: Any = list[PolicyVersion] | None
        self._last_published = PublishedRequest(**self._sender, version=version, path=str(path))
        return self._call_with_retries("published", self._last_published).decode(reply_type)

    def wait_until_copied(self, version: PolicyVersion) -> str:
        """Ask the orchestrator until no engine copies a version; return which have not done so in time."""
        request = CopiedRequest(**self._sender, version=version)
        try:
            return self._call_with_retries("copied", request).decode(str)
        except DeadlineExceeded as error:
            if self.should_stop():
                return str(error)
            raise

    def commit_checkpoint(self, step: int, directory: str, digest: str) -> Mapping[int, float]:
        """Report that the checkpoint of a step is complete; return the values of `checkpoint.keep_best` by step."""
        request = CheckpointRequest(**self._sender, step=step, directory=directory, digest=digest)
        return self._call_with_retries("checkpoint", request).decode(dict[int, float])

    def report_unsaved(self, step: int, message: str) -> None:
        """Report that a checkpoint could not be saved."""
        self._call_with_retries("unsaved", UnsavedRequest(**self._sender, step=step, message=message))

    def close(self) -> None:
        """Close the connection and end its thread."""
        asyncio.run_coroutine_threadsafe(self._close_client(), self._loop).result(CALL_TIMEOUT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT)
        self._loop.close()

    async def _close_client(self) -> None:
        if self._client is not None:
            await self._client.close()
        if cancelled := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(cancelled, timeout=STOP_TIMEOUT)

    @property
    def _sender(self) -> dict[str, Any]:
        """Rank and incarnation; the orchestrator refuses a trainer whose incarnation was replaced."""
        assert self._registration is not None, "register first"
        return {"rank": self._registration.rank, "incarnation": self._registration.incarnation}

    def _call_with_retries(self, method: str, request: msgspec.Struct) -> WireMessage:
        """Call the orchestrator, with retries for up to `timeout` seconds, or STOP_TIMEOUT once a stop was requested.

        Raises DeadlineExceeded when time is up.
        """
        message, started = WireMessage.encode(request), time.monotonic()
        deadline = started + self.timeout
        stop_timeout = 0.0 if method == "batch" else STOP_TIMEOUT  # after a stop nobody trains the batch
        while True:
            future = asyncio.run_coroutine_threadsafe(self._call_once(method, message), self._loop)
            try:
                while not future.done():
                    deadline = self._limit_deadline(deadline, stop_timeout)
                    if self.should_stop() and time.monotonic() >= deadline:
                        future.cancel()
                        raise DeadlineExceeded("stop requested")
                    concurrent.futures.wait([future], POLL_INTERVAL)
                return future.result()
            except (PeerLost, DeadlineExceeded, QueueFull) as error:
                self._must_register_again |= isinstance(error, PeerLost)
                deadline = self._limit_deadline(deadline, stop_timeout)
                if time.monotonic() >= deadline:
                    waited = f"{method} was not answered for {time.monotonic() - started:.1f} s"
                    raise DeadlineExceeded(f"the orchestrator at {self.address}: {waited} ({error})") from error
            time.sleep(RETRY_DELAY)

    def _limit_deadline(self, deadline: float, stop_timeout: float) -> float:
        return min(deadline, time.monotonic() + stop_timeout) if self.should_stop() else deadline

    async def _call_once(self, method: str, message: WireMessage) -> WireMessage:
        timeout = min(CALL_TIMEOUT, self.timeout)
        if self._client is None:
            self._client = await WireClient(self.address, secret=self._secret).start(timeout)
        if self._must_register_again and self._registration is not None:
            await self._client.call("hello", WireMessage.encode(self._registration), timeout=timeout)
            if self._last_published is not None:
                await self._client.call("published", WireMessage.encode(self._last_published), timeout=timeout)
        self._must_register_again = False
        return await self._client.call(method, message, timeout=timeout)
