"""Who advances in the next step, and by how many tokens.

Every step is one forward over a flat row of tokens, at most `max_batch_tokens`. Requests that decode come first, with
one token each, so that a long prompt never makes the others wait; what is left of the budget goes to prefill, cut into
chunks where it does not fit. Blocks are taken as tokens come. When none are left, the request that would be served last
gives up its blocks and waits again (it is computed anew later, with the tokens it has); so the first one always
advances, and it fits, because no request may be longer than the whole cache.
"""

import bisect
import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from ramify.infer.blocks import BlockPool
from ramify.infer.metrics import Counters
from ramify.infer.request import Request, State


@dataclass(slots=True)
class Chunk:
    """Tokens [start, stop) of a request, computed in this step."""

    request: Request
    start: int
    stop: int
    last: bool  # whether the next token is sampled from it

    @property
    def new(self) -> int:
        """How many they are."""
        return self.stop - self.start


class Scheduler:
    """The queue and the running requests."""

    def __init__(self, pool: BlockPool, counters: Counters, *, max_running: int, max_batch_tokens: int) -> None:
        self.pool = pool
        self.counters = counters
        self.max_running, self.max_batch_tokens = max_running, max_batch_tokens
        self.version: Hashable = None
        self.waiting: list[tuple[tuple[int, int], Request]] = []
        self.running: list[Request] = []  # in order
        self._chunks: list[Chunk] = []
        self._steady = False  # whether all that run have sampled since, and nobody has come or gone

    def add(self, request: Request) -> None:
        """Put a request in the queue, by priority and arrival."""
        self._steady = False
        heapq.heappush(self.waiting, (request.order, request))

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step."""
        if not self._steady or not self._go_on():
            self._chunks = self._plan()
            decoding = len(self._chunks) == len(self.running) and all(chunk.last for chunk in self._chunks)
            self._steady = decoding and not self.waiting
        return self._chunks

    def _go_on(self) -> bool:
        """Move the last step's chunks on by a token, which is all there is to do in most steps; False without room."""
        size = self.pool.size
        for chunk in self._chunks:
            chunk.start, chunk.stop = chunk.stop, chunk.stop + 1
        for chunk in self._chunks:
            if chunk.start % size == 0 and not self.pool.extend(chunk.request, chunk.stop):
                return False
        for chunk in self._chunks:
            if chunk.stop % size == 0:
                self.pool.share(chunk.request, chunk.stop)
        return True

    def _plan(self) -> list[Chunk]:
        """Decoding first, then prefill under way, then new requests."""
        decoding = [request for request in self.running if len(request.tokens) - request.computed == 1]
        prefilling = [request for request in self.running if len(request.tokens) - request.computed > 1]
        chunks: dict[int, Chunk] = {}
        budget, size = self.max_batch_tokens, self.pool.size
        for request in [*decoding, *prefilling]:
            if request.state is not State.RUNNING or not budget:
                continue
            stop = min(request.computed + budget, len(request.tokens))
            if stop <= len(request.blocks) * size or self._make_room(request, stop, chunks):
                chunks[request.arrival] = _chunk(request, budget)
                budget -= stop - request.computed
        for chunk in chunks.values():
            if chunk.stop >= (chunk.request.published + 1) * size:
                self.pool.share(chunk.request, chunk.stop)
        return [*chunks.values(), *self._admit(budget)]

    def _make_room(self, request: Request, length: int, chunks: dict[int, Chunk]) -> bool:
        while not self.pool.extend(request, length):
            victim = max(self.running, key=lambda candidate: candidate.order)
            chunks.pop(victim.arrival, None)
            self.counters.preemptions += 1
            self.requeue(victim)
            if victim is request:
                return False
        return True

    def _admit(self, budget: int) -> Iterable[Chunk]:
        while self.waiting and budget and len(self.running) < self.max_running:
            request = self.waiting[0][1]
            reserve = len(self.running)  # a block each for those that run, or they would be preempted at once
            scope = (self.version, request.salt)
            if not self.pool.admit(request, scope, reserve=reserve, budget=budget):
                return
            heapq.heappop(self.waiting)
            request.move(State.RUNNING)
            if not request.logprobs:
                request.cached = request.computed
            bisect.insort(self.running, request, key=lambda each: each.order)
            chunk = _chunk(request, budget)
            self.pool.share(request, chunk.stop)
            budget -= chunk.new
            yield chunk

    def requeue(self, request: Request) -> None:
        """Take a running request's blocks and let it wait again, with the tokens it has."""
        self.pool.release(request)
        self.running.remove(request)
        request.move(State.WAITING)
        request.kv_runs.clear()
        self.add(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        self._steady = False
        if request.state is State.RUNNING:
            self.pool.release(request)
            self.running.remove(request)
        elif request.state is State.WAITING:
            self.waiting = [entry for entry in self.waiting if entry[1] is not request]
            heapq.heapify(self.waiting)
        request.move(State.FINISHED)


def _chunk(request: Request, budget: int) -> Chunk:
    """The next tokens of a request, as many as there are or may be."""
    length = len(request.tokens)
    stop = min(request.computed + budget, length)
    return Chunk(request, request.computed, stop, stop == length)
