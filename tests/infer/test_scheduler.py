"""Advancing the last step's chunks schedules the same as planning the step anew."""

from hypothesis import given
from hypothesis import strategies as st

from ramify.infer.block_pool import BlockPool
from ramify.infer.metrics import EngineCounters
from ramify.infer.request import EngineRequest, SamplingParams
from ramify.infer.scheduler import Scheduler


class ReplanningScheduler(Scheduler):
    """Plans every step anew."""

    def _advance_decodes(self) -> bool:
        return False


class CountingScheduler(Scheduler):
    """Counts the steps that were not planned anew."""

    num_advanced = 0

    def _advance_decodes(self) -> bool:
        advanced = super()._advance_decodes()
        self.num_advanced += advanced
        return advanced


def build_scheduler(scheduler_class: type[Scheduler], num_blocks: int, block_size: int = 4) -> Scheduler:
    counters = EngineCounters()
    pool = BlockPool(num_blocks + 1, block_size, counters)
    return scheduler_class(pool, counters, max_running_requests=5, max_num_batched_tokens=12)


def build_request(length: int, max_tokens: int) -> EngineRequest:
    return EngineRequest(list(range(length)), SamplingParams(max_tokens=max_tokens, seed=0), max_tokens)


def step(scheduler: Scheduler) -> list[tuple[int, int, int, bool, list[int]]]:
    """Run a step; return what was scheduled, with the blocks. Sampled tokens are the same in every run."""
    scheduled = []
    for chunk in scheduler.schedule():
        request, block_ids = chunk.request, [block.block_id for block in chunk.request.blocks]
        scheduled.append((len(request.prompt_token_ids), chunk.start, chunk.stop, chunk.samples_next, block_ids))
        assert len(block_ids) * scheduler.pool.block_size >= chunk.stop
        request.num_computed_tokens = chunk.stop
        if chunk.samples_next:
            request.append_token(len(request.token_ids) % 7, 0.0, None)
            if request.finish_reason:
                scheduler.finish_request(request)
    return scheduled


Arrivals = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 18), st.integers(1, 16)), min_size=1, max_size=12)


@given(Arrivals, st.integers(36, 160), st.sampled_from([1, 3, 4]))
def test_advancing_equals_replanning(arrivals, cache_tokens, block_size):
    advancing = build_scheduler(CountingScheduler, cache_tokens // block_size, block_size)
    replanning = build_scheduler(ReplanningScheduler, cache_tokens // block_size, block_size)
    for now in range(400):
        for arrival, length, max_tokens in arrivals:
            if arrival == now:
                advancing.add_request(build_request(length, max_tokens))
                replanning.add_request(build_request(length, max_tokens))
        assert step(advancing) == step(replanning)
        assert advancing.pool.num_free_blocks == replanning.pool.num_free_blocks
        if now > 12 and not advancing.running and not advancing.waiting:
            return
    raise AssertionError("not all requests have finished")


def test_decode_steps_are_not_planned_anew():
    scheduler = build_scheduler(CountingScheduler, 40)
    for length in (3, 5, 2):
        scheduler.add_request(build_request(length, 9))
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    assert isinstance(scheduler, CountingScheduler)
    assert scheduler.num_advanced == 8, "all steps but the first, with prompts of 10 tokens in a budget of 12"
