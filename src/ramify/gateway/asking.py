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

from ramify.gateway.exchange import Reply, Request


class Asking:
    """A call that is running or answered."""

    def __init__(self, call: Coroutine[Any, Any, Reply], linger: float) -> None:
        self._task = asyncio.create_task(call)
        self._linger = linger
        self._waiting = 0
        self._farewell: asyncio.TimerHandle | None = None
        self._given_up = False
        self.delivered = False

    @property
    def over(self) -> bool:
        """Whether it ended without an answer."""
        if self._given_up:
            return True
        return self._task.done() and (self._task.cancelled() or self._task.exception() is not None)

    @property
    def lost(self) -> bool:
        """Whether its client is gone without having got the answer."""
        return not self.delivered and not self._waiting and not self.over

    def join(self) -> None:
        """Begin to wait."""
        self._waiting += 1
        if self._farewell is not None:
            self._farewell.cancel()
            self._farewell = None

    async def answer(self) -> Reply:
        """The reply, or how the call failed. Being cancelled here leaves the call running for others."""
        return await asyncio.shield(self._task)

    def leave(self, *, delivered: bool) -> None:
        """Stop waiting. A call that nobody waits for any more is given up after a while."""
        self._waiting -= 1
        self.delivered = self.delivered or delivered
        if not self._waiting and not self._task.done():
            self._farewell = asyncio.get_running_loop().call_later(self._linger, self.cancel)

    def cancel(self) -> None:
        """Give the call up now."""
        if self._farewell is not None:
            self._farewell.cancel()
        self._given_up = not self._task.done()
        self._task.cancel()

    def when_done(self, then: Callable[[], None]) -> None:
        """Call back when the call has ended, however it did; its failure counts as seen."""

        def seen(task: asyncio.Task[Reply]) -> None:
            if not task.cancelled():
                task.exception()
            then()

        self._task.add_done_callback(seen)


class Askings:
    """The requests of a session, by what they ask and by the key they bear."""

    def __init__(self, linger: float) -> None:
        self._linger = linger
        self._equal: dict[Hashable, list[Asking]] = {}
        self._keyed: dict[str, Asking] = {}
        self._running: set[Asking] = set()

    def begin(self, request: Request, same: Hashable, call: Callable[[], Coroutine[Any, Any, Reply]]) -> Asking:
        """The call this request is a retry of, or a new one, joined."""
        known = self._earlier(request, same)
        if known is None:
            known = Asking(call(), self._linger)
            self._equal.setdefault(same, []).append(known)
            self._running.add(known)
            known.when_done(lambda: self._running.discard(known))
            if request.retry is not None:
                self._keyed[request.retry] = known
        known.join()
        return known

    def close(self) -> None:
        """Give up what is running."""
        for asking in list(self._running):
            asking.cancel()

    def _earlier(self, request: Request, same: Hashable) -> Asking | None:
        if request.retry is not None:
            known = self._keyed.get(request.retry)
            return None if known is None or known.over else known
        equal = [asking for asking in self._equal.get(same, ()) if not asking.over]
        lost = next((asking for asking in equal if asking.lost), None)
        if lost is not None or not request.retries:
            return lost
        waiting = [asking for asking in equal if not asking.delivered]
        return next(reversed(waiting or equal), None)
