"""Going on with the same requests is what planning the step anew would have been."""

from hypothesis import given
from hypothesis import strategies as st

from ramify.infer.block_pool import BlockPool
from ramify.infer.metrics import EngineCounters
from ramify.infer.request import EngineRequest, SamplingParams
from ramify.infer.scheduler import Scheduler


class Forgetful(Scheduler):
    """Plans every step anew."""

    def _go_on(self) -> bool:
        return False


class Counting(Scheduler):
    """Knows how often it went on."""

    times = 0

    def _go_on(self) -> bool:
        gone_on = super()._advance_decodes()
        self.times += gone_on
        return gone_on


def scheduler(kind: type[Scheduler], blocks: int, size: int = 4) -> Scheduler:
    counters = EngineCounters()
    return kind(BlockPool(blocks + 1, size, counters), counters, max_running=5, max_batch_tokens=12)


def request(length: int, tokens: int) -> EngineRequest:
    return EngineRequest(list(range(length)), SamplingParams(max_tokens=tokens, seed=0), tokens)


def step(each: Scheduler) -> list[tuple[int, int, int, bool, list[int]]]:
    """Run a step; what was scheduled, and the blocks that go with it. Tokens are the same in every run."""
    told = []
    for chunk in each.schedule():
        sampled, blocks = chunk.request, [block.number for block in chunk.request.blocks]
        told.append((len(sampled.prompt_token_ids), chunk.start, chunk.stop, chunk.samples_next, blocks))
        assert len(blocks) * each.pool.block_size >= chunk.stop
        sampled.num_computed_tokens = chunk.stop
        if chunk.samples_next:
            sampled.append_token(len(sampled.token_ids) % 7, 0.0, None)  # pyright: ignore[reportArgumentType]
            if sampled.finish_reason:
                each.finish_request(sampled)
    return told


Arrivals = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 18), st.integers(1, 16)), min_size=1, max_size=12)


@given(Arrivals, st.integers(36, 160), st.sampled_from([1, 3, 4]))
def test_going_on_is_planning_the_same(arrivals, tokens, size):
    one, other = scheduler(Counting, tokens // size, size), scheduler(Forgetful, tokens // size, size)
    for now in range(400):
        for when, length, tokens in arrivals:
            if when == now:
                one.add_request(request(length, tokens))
                other.add_request(request(length, tokens))
        assert step(one) == step(other)
        assert one.pool.num_free_blocks == other.pool.num_free_blocks
        if now > 12 and not one.running and not one.waiting:
            return
    raise AssertionError("not all requests have finished")


def test_requests_that_only_decode_are_not_planned_again():
    each = scheduler(Counting, 40)
    for length in (3, 5, 2):
        each.add_request(request(length, 9))
    while each.running or each.waiting:
        step(each)
    assert isinstance(each, Counting)
    assert each.times == 8, "all steps but the first, with prompts of 10 tokens in a budget of 12"
