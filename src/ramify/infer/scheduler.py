"""Which requests advance in the next step, and by how many tokens.

Every step is one forward over a flat row of at most `max_num_batched_tokens` tokens. Requests that decode come first,
with one token each, so that a long prompt never delays the others; the rest of the budget goes to prefill, in chunks if
it does not fit. Blocks are allocated as tokens come. When none are left, the request that is last in order frees its
blocks and waits again (it is recomputed later, with the tokens it has). So the first request always advances, and it
fits, because no request may be longer than the whole cache.
"""

import bisect
import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from ramify.infer.block_pool import BlockPool
from ramify.infer.metrics import EngineCounters
from ramify.infer.request import EngineRequest, RequestStatus


@dataclass(slots=True)
class ScheduledChunk:
    """Tokens [start, stop) of a request, computed in this step."""

    request: EngineRequest
    start: int
    stop: int
    samples_next: bool  # whether the next token is sampled from the last one's logits

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the chunk."""
        return self.stop - self.start


class Scheduler:
    """The queue of waiting requests, a heap, and the running requests, in order of priority and arrival."""

    def __init__(
        self, pool: BlockPool, counters: EngineCounters, *, max_running_requests: int, max_num_batched_tokens: int
    ) -> None:
        self.pool = pool
        self.counters = counters
        self.max_running_requests, self.max_num_batched_tokens = max_running_requests, max_num_batched_tokens
        self.version: Hashable = None
        self.waiting: list[tuple[tuple[int, int], EngineRequest]] = []
        self.running: list[EngineRequest] = []
        self._chunks: list[ScheduledChunk] = []
        self._decode_only = False  # whether every running request decodes and the set is unchanged

    def add_request(self, request: EngineRequest) -> None:
        """Put a request in the queue, by priority and arrival."""
        self._decode_only = False
        heapq.heappush(self.waiting, (request.scheduling_key, request))

    def schedule(self) -> list[ScheduledChunk]:
        """Return the chunks of the next step."""
        if not self._decode_only or not self._advance_decodes():
            self._chunks = self._schedule_step()
            all_decode = len(self._chunks) == len(self.running) and all(chunk.samples_next for chunk in self._chunks)
            self._decode_only = all_decode and not self.waiting
        return self._chunks

    def _advance_decodes(self) -> bool:
        """Move the last step's chunks on by a token, which suffices in most steps; return False without free blocks."""
        size = self.pool.block_size
        if any(chunk.request.has_all_tokens for chunk in self._chunks):
            return False
        for chunk in self._chunks:
            chunk.start, chunk.stop = chunk.stop, chunk.stop + 1
        for chunk in self._chunks:
            if chunk.start % size == 0 and not self.pool.allocate_slots(chunk.request, chunk.stop):
                return False
        for chunk in self._chunks:
            num_known = chunk.stop - chunk.request.num_pending
            if num_known % size == 0:
                self.pool.cache_full_blocks(chunk.request, num_known)
        return True

    def _schedule_step(self) -> list[ScheduledChunk]:
        """Schedule decoding first, then prefill that has begun, then new requests."""
        remaining = [
            (len(request.token_ids) - request.num_computed_tokens, request)
            for request in self.running
            if not request.has_all_tokens
        ]
        decoding = [request for num_tokens, request in remaining if num_tokens == 1]
        prefilling = [request for num_tokens, request in remaining if num_tokens > 1]
        chunks: dict[int, ScheduledChunk] = {}
        token_budget, size = self.max_num_batched_tokens, self.pool.block_size
        for request in [*decoding, *prefilling]:
            if request.status is not RequestStatus.RUNNING or not token_budget:
                continue
            chunk = self._next_chunk(request, token_budget)
            if chunk.stop <= len(request.blocks) * size or self._allocate_or_preempt(request, chunk.stop, chunks):
                chunks[request.arrival_index] = chunk
                token_budget -= chunk.num_tokens
        for chunk in chunks.values():
            num_known = min(chunk.stop, chunk.request.num_known_tokens)
            if num_known >= (chunk.request.num_shared_blocks + 1) * size:
                self.pool.cache_full_blocks(chunk.request, num_known)
        return [*chunks.values(), *self._admit_waiting(token_budget)]

    def _next_chunk(self, request: EngineRequest, token_budget: int) -> ScheduledChunk:
        """Return the next tokens of a request, at most `token_budget`."""
        start, length = request.num_computed_tokens, len(request.token_ids)
        stop = self.pool.find_chunk_end(request, min(start + token_budget, length))
        return ScheduledChunk(request, start, stop, stop == length)

    def _allocate_or_preempt(self, request: EngineRequest, num_tokens: int, chunks: dict[int, ScheduledChunk]) -> bool:
        while not self.pool.allocate_slots(request, num_tokens):
            victim = max(self.running, key=lambda candidate: candidate.scheduling_key)
            chunks.pop(victim.arrival_index, None)
            self.counters.preemptions += 1
            self.requeue(victim)
            if victim is request:
                return False
        return True

    def _admit_waiting(self, token_budget: int) -> Iterable[ScheduledChunk]:
        while self.waiting and token_budget and len(self.running) < self.max_running_requests:
            request = self.waiting[0][1]
            if request.num_pending:  # it was preempted, and its last token is known after this step
                return
            reserved = len(self.running)  # one block for each running request, or it would be preempted at once
            scope = (self.version, request.cache_salt)
            if not self.pool.allocate(request, scope, reserved_blocks=reserved, token_budget=token_budget):
                return
            heapq.heappop(self.waiting)
            request.set_status(RequestStatus.RUNNING)
            if not request.logprobs:
                request.num_cached_tokens = request.num_computed_tokens
            bisect.insort(self.running, request, key=lambda running: running.scheduling_key)
            chunk = self._next_chunk(request, token_budget)
            self.pool.cache_full_blocks(request, chunk.stop)
            token_budget -= chunk.num_tokens
            yield chunk

    def requeue(self, request: EngineRequest) -> None:
        """Free a running request's blocks and let it wait again, with the tokens it has."""
        self.pool.free(request)
        self.running.remove(request)
        request.set_status(RequestStatus.WAITING)
        self.add_request(request)

    def finish_request(self, request: EngineRequest) -> None:
        """Remove a waiting or running request."""
        self._decode_only = False
        if request.status is RequestStatus.RUNNING:
            self.pool.cache_full_blocks(request, min(request.num_computed_tokens, request.num_known_tokens))
            self.pool.free(request)
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting = [entry for entry in self.waiting if entry[1] is not request]
            heapq.heapify(self.waiting)
        request.set_status(RequestStatus.FINISHED)
