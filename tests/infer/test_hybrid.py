"""A model with recurrent layers continues cached prefixes from snapshots of its states."""

from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ramify.core.errors import ConfigInvalid
from ramify.infer.block_pool import BlockPool, StateSlots
from ramify.infer.config import EngineConfig
from ramify.infer.engine_core import EngineCore
from ramify.infer.metrics import EngineCounters
from ramify.infer.request import PENDING_TOKEN, Block, EngineRequest, SamplingParams
from ramify.infer.scheduler import Scheduler
from ramify.model.load import load_engine_model
from ramify.model.weights import stage_weights
from ramify.trace.version import PolicyVersion
from tests.support.models import (
    DEVICE,
    HYBRIDS,
    build_core,
    publish_as,
    reference,
    run,
    sampled_ids,
    scores,
    write_lfm2,
    write_llama,
    write_qwen3_5,
)

A, B = PolicyVersion("hybrid", 0, 1), PolicyVersion("hybrid", 0, 2)
SYSTEM = [(7 * index) % 90 + 3 for index in range(40)]


# Qwen3-Next has no fused forward; the property of `test_engine.py` runs it with snapshots, forks, evictions and swaps.
FAMILIES = [name for name in HYBRIDS if name != "qwen3_next"]
FAMILIES += [pytest.param("qwen3_next", marks=pytest.mark.full("as the others, and in the property of test_engine.py"))]


@pytest.fixture(scope="module", params=FAMILIES)
def world(request, tmp_path_factory):
    """A published model, transformers' own, and how to write another one."""
    directory = tmp_path_factory.mktemp("hybrid")
    source = HYBRIDS[request.param](directory / "source")
    return publish_as(directory / "v1", source, A), reference(source), HYBRIDS[request.param]


@pytest.fixture(scope="module")
def shared_core(world):
    return build_core(world[0], A, kv_cache_tokens=1024, max_num_batched_tokens=128)


@pytest.fixture
def core(shared_core):
    shared_core.pool.reset_prefix_cache([])
    return shared_core


def sample(core: EngineCore, model, prompt: list[int], max_tokens: int = 10) -> tuple[EngineRequest, int]:
    """Run a request, whose logprobs must equal transformers'; return it and how many tokens were computed."""
    before = core.counters.computed_tokens
    (request,) = run(core, core.create_request(prompt, SamplingParams(max_tokens=max_tokens, seed=1)))
    expected = scores(model, request.token_ids, 1.0)
    for position, (token, logprob) in enumerate(zip(sampled_ids(request), request.logprobs), len(prompt)):
        assert abs(logprob - expected[position - 1, token].item()) < 1e-4
    return request, core.counters.computed_tokens - before


def test_dense_models_have_a_fused_forward(world, core):
    assert (core.runner.fused_model is not None) == (world[2] is not HYBRIDS["qwen3_next"])


@pytest.mark.parametrize("write", [write_llama, write_qwen3_5, write_lfm2])
def test_engine_runs_the_models_own_code_if_fused_operators_fail(write, tmp_path):
    model = load_engine_model(write(tmp_path / "model"), dtype="float32", device=DEVICE)

    def reject_long_tables(_, args, kwargs) -> None:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        if positions.shape[-1] > 100:
            raise IndexError("too many\nindices")

    model.module.get_decoder().rotary_emb.register_forward_pre_hook(reject_long_tables, with_kwargs=True)
    config = EngineConfig(device=DEVICE, dtype="float32", block_size=4, kv_cache_tokens=256, max_running_requests=4)
    core = EngineCore(model, config, A)
    problem = "the model's own code (fused operators failed: IndexError: too many)"
    assert core.runner.fused_model is None and core.runner.ops_description == problem
    (request,) = run(core, core.create_request(SYSTEM, SamplingParams(max_tokens=4, seed=1)))
    expected = scores(reference(tmp_path / "model"), request.token_ids, 1.0)
    for position, (token, logprob) in enumerate(zip(sampled_ids(request), request.logprobs), len(SYSTEM)):
        assert abs(logprob - expected[position - 1, token].item()) < 1e-4


def test_next_turn_continues_the_last_reply(world, core):
    first, _ = sample(core, world[1], SYSTEM)
    second, computed = sample(core, world[1], [*first.token_ids, 5, 6, 7])
    assert second.num_cached_tokens == 48  # the reply was computed up to token 49
    assert computed == 53 - 48 + 9


def test_same_prompt_is_computed_once_in_a_group(world, core):
    requests = [core.create_request([*SYSTEM, 9], SamplingParams(max_tokens=1, seed=seed)) for seed in range(8)]
    before = core.counters.computed_tokens
    run(core, *requests)
    assert core.counters.computed_tokens - before == 41 + 7
    assert [request.num_cached_tokens for request in requests] == [0] + [40] * 7


def test_prefix_without_a_snapshot_gets_one_where_requests_fork(world, core):
    """The first prompt has no snapshot at its 40th token. The second forks there and leaves one for the third."""
    computed = [sample(core, world[1], [*SYSTEM, *[token] * 21], max_tokens=1)[1] for token in (11, 12, 13)]
    assert computed == [61, 61, 21]
    blocks = [core.pool.num_usable_blocks - core.pool.num_free_blocks, len(core.pool.states.snapshots)]
    assert blocks == [0, 4]  # the fork, and the last full block before the end of each prompt


def test_fork_in_the_middle_of_a_reply_starts_at_the_prompt(world, core):
    first, _ = sample(core, world[1], [*SYSTEM, 9], max_tokens=20)
    _, computed = sample(core, world[1], [*first.token_ids[:52], 9], max_tokens=1)
    assert computed == 53 - 40


def test_snapshots_are_bounded_and_the_oldest_goes(world):
    core = build_core(world[0], A, kv_cache_tokens=1024, max_num_batched_tokens=128, state_snapshots=2)
    prompts = [[family, *SYSTEM] for family in (3, 4, 5)]
    for prompt in prompts:
        sample(core, world[1], prompt, max_tokens=1)
    assert [sample(core, world[1], prompt, max_tokens=1)[1] for prompt in reversed(prompts)] == [1, 1, 41]
    assert core.counters.snapshot_evictions == 2


@pytest.mark.parametrize("settings", [{"state_snapshots": 0}, {"prefix_cache": False}])
def test_without_snapshots_every_prompt_is_computed(world, settings):
    core = build_core(world[0], A, kv_cache_tokens=1024, max_num_batched_tokens=128, **settings)
    assert [sample(core, world[1], SYSTEM, max_tokens=2)[1] for _ in range(2)] == [41, 41]
    assert core.counters.snapshots == 0


def test_snapshot_ends_with_its_block(world):
    core = build_core(world[0], A, kv_cache_tokens=64, max_num_batched_tokens=128)
    sample(core, world[1], SYSTEM, max_tokens=1)
    sample(core, world[1], [3, *SYSTEM, 4, 5], max_tokens=16)  # needs 15 of 16 blocks
    assert core.counters.evictions > 0
    states = core.pool.states
    assert {block.parent is None for block in states.snapshots} == {False}
    assert sample(core, world[1], SYSTEM, max_tokens=1)[1] == 40


def test_swap_drops_all_snapshots(world, tmp_path):
    core = build_core(world[0], A, kv_cache_tokens=1024, max_num_batched_tokens=128)
    sample(core, world[1], SYSTEM, max_tokens=1)
    other = publish_as(tmp_path / "v2", world[2](tmp_path / "source", seed=5), B)
    core.swap_weights(stage_weights(other, core.model.module))
    assert not core.pool.states.snapshots
    assert sample(core, reference(tmp_path / "source"), SYSTEM, max_tokens=1)[1] == 40


def test_states_that_leave_no_memory_for_blocks_are_rejected(world):
    with pytest.raises(ConfigInvalid, match=r"room for 0 tokens.* or lower inference\.max_running_requests or"):
        build_core(world[0], A, kv_memory_fraction=1e-12)


def test_batch_invariance_is_rejected(world):
    with pytest.raises(ConfigInvalid, match="batch_invariant is not supported for models with recurrent layers"):
        build_core(world[0], A, kv_cache_tokens=64, batch_invariant=True)


# -- scheduling, with states that are the tokens they have seen ------------------------------------------------------


class RecordedStates:
    """States that are lists of token ids."""

    def __init__(self, num_slots: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_slots)]

    def clear(self, slot: int) -> None:
        self.tokens[slot] = []

    def copy(self, source: int, target: int) -> None:
        self.tokens[target] = list(self.tokens[source])


def step(scheduler: Scheduler, states: RecordedStates) -> None:
    """Run a step. Every state must cover the tokens before the chunk."""
    for chunk in scheduler.schedule():
        request, tokens = chunk.request, states.tokens[chunk.request.state_slot]
        assert tokens == request.token_ids[: chunk.start]
        tokens += request.token_ids[chunk.start : chunk.stop]
        request.num_computed_tokens = chunk.stop
    for chunk in (chunks := scheduler._chunks):
        assert len(chunk.request.blocks) * scheduler.pool.block_size >= chunk.stop
    scheduler.pool.take_snapshots()
    for chunk in list(chunks):
        request = chunk.request
        if chunk.samples_next:
            request.append_token(len(request.token_ids) % 3, 0.0, None)
            if request.finish_reason:
                scheduler.finish_request(request)


def launch(scheduler: Scheduler, states: RecordedStates, launched: list[tuple[EngineRequest, int]]):
    """Launch a step as on a GPU, then read the tokens of the step before; return the tokens that are being sampled.

    The token with index i of a reply is i % 3, which the GPU knows before the host.
    """
    sampling: list[tuple[EngineRequest, int]] = []
    for chunk in scheduler.schedule():
        request, tokens = chunk.request, states.tokens[chunk.request.state_slot]
        ids = [index % 3 if token == PENDING_TOKEN else token for index, token in enumerate(request.token_ids)]
        assert tokens == ids[: chunk.start]
        tokens += ids[chunk.start : chunk.stop]
        request.num_computed_tokens = chunk.stop
        if chunk.samples_next:
            request.expect_token(len(sampling))
            sampling.append((request, chunk.stop))
    scheduler.pool.take_snapshots()
    for request, index in launched:
        if request.is_expecting(index):
            request.append_token(index % 3, 0.0, None)
            if request.finish_reason:
                request.drop_pending()
                scheduler.finish_request(request)
    return sampling


Arrivals = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 12)),
    min_size=1,
    max_size=16,
)


def test_states_are_those_of_the_tokens():
    totals: Counter[str] = Counter()

    @settings(max_examples=max(50, settings().max_examples))  # a few do not reach all counters below
    @given(
        Arrivals, st.integers(40, 120), st.sampled_from([1, 2, 4]), st.integers(0, 6), st.integers(5, 16), st.booleans()
    )
    @example([(0, [n % 2] * 6, 12) for n in range(5)], 40, 1, 2, 16, False)  # the cache is too small for all of them
    def property_holds(arrivals, cache_tokens, block_size, num_snapshots, budget, is_ahead):
        launched: list[tuple[EngineRequest, int]] = []
        stop_ids = frozenset({2}) if is_ahead else frozenset()
        counters, states = EngineCounters(), RecordedStates(5 + num_snapshots)
        slots = StateSlots(states, 5, num_snapshots, counters)
        pool = BlockPool(cache_tokens // block_size + 1, block_size, counters, states=slots)
        scheduler = Scheduler(pool, counters, max_running_requests=5, max_num_batched_tokens=budget)
        for now in range(600):
            for arrival, prompt, max_tokens in arrivals:
                if arrival == now:
                    params = SamplingParams(max_tokens=max_tokens, seed=0, stop_ids=stop_ids)
                    scheduler.add_request(EngineRequest(list(prompt), params, max_tokens))
            if is_ahead:
                launched = launch(scheduler, states, launched)
            else:
                step(scheduler, states)
            for block, slot in slots.snapshots.items():
                assert states.tokens[slot] == list_path_tokens(block)
            if now > 30 and not scheduler.running and not scheduler.waiting:
                break
        assert not scheduler.running and not scheduler.waiting
        assert len(slots.request_slots) == 5
        assert len(slots.snapshots) + len(slots.snapshot_slots) == num_snapshots
        assert pool.num_free_blocks == pool.num_usable_blocks
        totals.update(asdict(counters))

    property_holds()
    exercised = ("snapshot_hits", "snapshot_evictions", "preemptions", "evictions")
    assert all(totals[name] for name in exercised), {name: totals[name] for name in exercised}


def list_path_tokens(block: Block) -> list[int]:
    """Return the tokens from the root of the tree to the end of a block."""
    tokens: list[int] = []
    while block.parent is not None:
        tokens, block = [*block.token_key, *tokens], block.parent
    return tokens
