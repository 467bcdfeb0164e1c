"""Deduplicate retried requests: a retry gets the reply of the original call.

A client that times out disconnects and sends its request again. Sampling again would bias the samples towards short
replies, because those are lost less often. So a request is a retry if its headers say so, or if the reply to an equal
request was never delivered; a retry joins the original call. Any other request is a new sample.

    running ──> answered ──> delivered          running ──> cancelled (no client within `reconnect_timeout` seconds)
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

from ramify.infer.dialects.model_call import ModelReply, ModelRequest

T = TypeVar("T")
RECONNECT_TIMEOUT = 5.0  # seconds a call runs on after its client disconnected; SDKs retry within about this time


class SharedCall(Generic[T]):
    """A running or finished call that several requests may wait for.

    `delivered` says whether a client has received the reply. A call without waiters is cancelled after
    `reconnect_timeout` seconds.
    """

    def __init__(
        self,
        call: Coroutine[Any, Any, T],
        reconnect_timeout: float,
        name: str,
        on_failure: Callable[["SharedCall[T]"], None] | None = None,
    ) -> None:
        self.task = asyncio.create_task(call, name=name)
        self.task.add_done_callback(self._on_done)
        self._on_failure = on_failure
        self._reconnect_timeout = reconnect_timeout
        self._num_waiters = 0
        self._cancel_timer: asyncio.TimerHandle | None = None
        self._cancelled = False
        self.delivered = False

    @property
    def has_failed(self) -> bool:
        """Whether the call ended without a reply."""
        if self._cancelled:
            return True
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)

    @property
    def is_undelivered(self) -> bool:
        """Whether all clients disconnected before they received the reply."""
        return not self.delivered and not self._num_waiters and not self.has_failed

    def join(self) -> None:
        """Add a waiter, who must call `leave` later."""
        self._num_waiters += 1
        if self._cancel_timer is not None:
            self._cancel_timer.cancel()
            self._cancel_timer = None

    async def wait(self) -> T:
        """Wait for the reply, or raise the failure of the call. Cancelling the wait does not cancel the call."""
        return await asyncio.shield(self.task)

    def leave(self, *, delivered: bool) -> None:
        """Remove a waiter. A running call without waiters is cancelled after a while."""
        self._num_waiters -= 1
        self.delivered = self.delivered or delivered
        if not self._num_waiters and not self.task.done():
            self._cancel_timer = asyncio.get_running_loop().call_later(self._reconnect_timeout, self.cancel)

    def cancel(self) -> None:
        """Cancel the call now."""
        if self._cancel_timer is not None:
            self._cancel_timer.cancel()
        self._cancelled = not self.task.done()
        self.task.cancel()

    def _on_done(self, task: asyncio.Task[T]) -> None:
        if (
            self.has_failed and self._on_failure is not None
        ):  # which also retrieves the exception: asyncio warns about one that nobody has retrieved
            self._on_failure(self)


class RequestDeduplicator:
    """The calls of a session, by the fingerprint and by the idempotency key of their request.

    `task_name` is the name of the tasks that run the calls. A call that has failed is forgotten.
    """

    def __init__(self, reconnect_timeout: float, task_name: str) -> None:
        self._reconnect_timeout, self._task_name = reconnect_timeout, task_name
        self._by_fingerprint: dict[Hashable, list[SharedCall[ModelReply]]] = {}
        self._by_idempotency_key: dict[str, SharedCall[ModelReply]] = {}

    def join_or_start(
        self, request: ModelRequest, fingerprint: Hashable, make_call: Callable[[], Coroutine[Any, Any, ModelReply]]
    ) -> SharedCall[ModelReply]:
        """Join the call that this request is a retry of, or start a new call and join it."""
        call = self._find_original(request, fingerprint)
        if call is None:
            key = request.idempotency_key
            forget = partial(self._forget, fingerprint, key)
            call = SharedCall(make_call(), self._reconnect_timeout, self._task_name, forget)
            self._by_fingerprint.setdefault(fingerprint, []).append(call)
            if key is not None:
                self._by_idempotency_key[key] = call
        call.join()
        return call

    def _forget(self, fingerprint: Hashable, idempotency_key: str | None, call: SharedCall[ModelReply]) -> None:
        """Remove a failed call: its exception refers to the request, and no further request may join it."""
        calls = self._by_fingerprint[fingerprint]
        calls.remove(call)
        if not calls:
            del self._by_fingerprint[fingerprint]
        if idempotency_key is not None and self._by_idempotency_key.get(idempotency_key) is call:
            del self._by_idempotency_key[idempotency_key]

    def cancel_all(self) -> None:
        """Cancel all running calls."""
        for calls in self._by_fingerprint.values():
            for call in calls:
                call.cancel()

    def _find_original(self, request: ModelRequest, fingerprint: Hashable) -> SharedCall[ModelReply] | None:
        """Return the call that this request is a retry of, or None."""
        if request.idempotency_key is not None:
            call = self._by_idempotency_key.get(request.idempotency_key)
            return None if call is None or call.has_failed else call
        calls = [call for call in self._by_fingerprint.get(fingerprint, ()) if not call.has_failed]
        undelivered = next((call for call in calls if call.is_undelivered), None)
        if undelivered is not None or not request.retry_count:
            return undelivered
        pending = [call for call in calls if not call.delivered]
        return next(reversed(pending or calls), None)
