"""One request, and everyone who waits for its answer.

A client that loses patience hangs up and asks again. Sampling once more would be another sample, and one that favours
short replies, since those are lost less often. So a request is a retry if it says so, or if an equal one was answered
and the answer never arrived; a retry waits for, or is given, what the first one got. Anything else is a new sample.

    running ──> answered ──> delivered          running ──> abandoned (nobody came back within `linger` seconds)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

from ramify.gateway.model_call import ModelReply, ModelRequest


class SharedCall:
    """A call that is running or answered."""

    def __init__(self, call: Coroutine[Any, Any, ModelReply], abandon_after: float) -> None:
        self._task = asyncio.create_task(call)
        self._abandon_after = abandon_after
        self._num_waiters = 0
        self._abandon_timer: asyncio.TimerHandle | None = None
        self._abandoned = False
        self.delivered = False

    @property
    def has_failed(self) -> bool:
        """Whether it ended without an answer."""
        if self._abandoned:
            return True
        return self._task.done() and (self._task.cancelled() or self._task.exception() is not None)

    @property
    def is_undelivered(self) -> bool:
        """Whether its client is gone without having got the answer."""
        return not self.delivered and not self._num_waiters and not self.has_failed

    def join(self) -> None:
        """Begin to wait."""
        self._num_waiters += 1
        if self._abandon_timer is not None:
            self._abandon_timer.cancel()
            self._abandon_timer = None

    async def wait(self) -> ModelReply:
        """The reply, or how the call failed. Being cancelled here leaves the call running for others."""
        return await asyncio.shield(self._task)

    def leave(self, *, delivered: bool) -> None:
        """Stop waiting. A call that nobody waits for any more is given up after a while."""
        self._num_waiters -= 1
        self.delivered = self.delivered or delivered
        if not self._num_waiters and not self._task.done():
            self._abandon_timer = asyncio.get_running_loop().call_later(self._abandon_after, self.cancel)

    def cancel(self) -> None:
        """Give the call up now."""
        if self._abandon_timer is not None:
            self._abandon_timer.cancel()
        self._abandoned = not self._task.done()
        self._task.cancel()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back when the call has ended, however it did; its failure counts as seen."""

        def seen(task: asyncio.Task[ModelReply]) -> None:
            if not task.cancelled():
                task.exception()
            callback()

        self._task.add_done_callback(seen)


class RequestDeduplicator:
    """The requests of a session, by what they ask and by the key they bear."""

    def __init__(self, abandon_after: float) -> None:
        self._abandon_after = abandon_after
        self._by_fingerprint: dict[Hashable, list[SharedCall]] = {}
        self._by_idempotency_key: dict[str, SharedCall] = {}
        self._running: set[SharedCall] = set()

    def join_or_start(
        self, request: ModelRequest, fingerprint: Hashable, make_call: Callable[[], Coroutine[Any, Any, ModelReply]]
    ) -> SharedCall:
        """The call this request is a retry of, or a new one, joined."""
        known = self._find_original(request, fingerprint)
        if known is None:
            known = SharedCall(make_call(), self._abandon_after)
            self._by_fingerprint.setdefault(fingerprint, []).append(known)
            self._running.add(known)
            known.add_done_callback(lambda: self._running.discard(known))
            if request.idempotency_key is not None:
                self._by_idempotency_key[request.idempotency_key] = known
        known.join()
        return known

    def cancel_all(self) -> None:
        """Give up what is running."""
        for asking in list(self._running):
            asking.cancel()

    def _find_original(self, request: ModelRequest, fingerprint: Hashable) -> SharedCall | None:
        if request.idempotency_key is not None:
            known = self._by_idempotency_key.get(request.idempotency_key)
            return None if known is None or known.has_failed else known
        equal = [asking for asking in self._by_fingerprint.get(fingerprint, ()) if not asking.has_failed]
        lost = next((asking for asking in equal if asking.is_undelivered), None)
        if lost is not None or not request.retry_count:
            return lost
        waiting = [asking for asking in equal if not asking.delivered]
        return next(reversed(waiting or equal), None)
