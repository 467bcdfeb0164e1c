"""Whatever the engine does to save work, the logprobs are those of a plain forward of the same tokens."""

from collections import Counter
from dataclasses import asdict
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from ramify.errors import ConfigInvalid, ContextOverflow, ProviderError, QueueFull, RequestInvalid
from ramify.infer.engine_core import EngineCore
from ramify.infer.request import EngineRequest, SamplingParams
from ramify.infer.sampler import uniform_noise
from ramify.model.version import PolicyVersion
from ramify.model.weights import stage_weights
from tests.infer.llama import (
    DEVICE,
    DTYPE,
    POSITIONS,
    VOCAB,
    build_core,
    publish_as,
    reference,
    run,
    scores,
    write_llama,
)

A, B = PolicyVersion("llama", 0, 1), PolicyVersion("llama", 0, 2)
CLOSE = 1e-4  # float32; in bfloat16 the engine may be as far from float32 as transformers' own bfloat16 is
EXERCISED = ["prefix_hit_tokens", "prefill_chunks", "mixed_steps", "preemptions", "evictions", "cancelled"]
EXERCISED += ["recomputes", "kept", *(["replayed_steps"] if DEVICE == "cuda" else [])]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two sets of weights, published, with the models transformers makes of them."""
    home = tmp_path_factory.mktemp("models")
    published, models, rounded = {}, {}, {}
    for version, seed in ((A, 1), (B, 2)):
        source = write_llama(home / f"source-{seed}", seed)
        published[version] = publish_as(home / f"v{version.step}", source, version)
        models[version], rounded[version] = reference(source), reference(source, DTYPE)
    return published, models, rounded


@pytest.fixture(scope="module")
def cores(world):
    """A small cache, so that requests get in each other's way: 30 blocks of 4 tokens."""
    published, _, _ = world
    settings = {"kv_tokens": 120, "max_running": 6, "max_batch_tokens": 24, "dtype": DTYPE}
    return {fused: build_core(published[A], A, fused=fused, **settings) for fused in (True, False)}


def mixed_scores(models, request: EngineRequest, runs, version: PolicyVersion) -> torch.Tensor:
    """Like `scores`, reusing the keys and values that older versions computed for the first tokens."""
    cache, start, parts = DynamicCache(), 0, []
    for owner, stop in [*runs, (version, len(request.token_ids))]:
        if stop > start:
            with torch.no_grad():
                out = models[owner](
                    torch.tensor([request.token_ids[start:stop]]), past_key_values=cache, use_cache=True
                )
            parts.append(out.logits[0])
            start = stop
    return torch.log_softmax(torch.cat(parts).float() / (request.sampling_params.temperature or 1.0), -1)


class Drive:
    """Runs a core step by step and remembers under which weights, and over whose keys, each token was sampled."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.requests: list[EngineRequest] = []
        self.seen: dict[EngineRequest, list[tuple[tuple[tuple[PolicyVersion, int], ...], PolicyVersion]]] = {}

    def submit(self, request: EngineRequest) -> None:
        self.core.add_request(request)
        self.requests.append(request)
        self.seen[request] = []

    def step(self) -> None:
        for request in self.core.step():
            self.seen[request].append((tuple(request.kv_runs), self.core.version))

    def errors(self, models, rounded) -> tuple[list[float], list[float]]:
        """How far from a float32 forward the engine's logprobs are, and those of transformers in the engine's type."""
        ours: list[float] = []
        theirs: list[float] = []
        for request in self.requests:
            by_state: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
            first = len(request.prompt_token_ids)
            for index, (state, token, found) in enumerate(
                zip(self.seen[request], request.output_token_ids, request.logprobs)
            ):
                if state not in by_state:
                    exact = mixed_scores(models, request, *state)
                    by_state[state] = exact, exact if DTYPE == "float32" else mixed_scores(rounded, request, *state)
                exact, other = (table[first + index - 1, token].item() for table in by_state[state])
                ours.append(abs(exact - found))
                theirs.append(abs(exact - other))
                if DTYPE == "float32":
                    assert ours[-1] <= CLOSE, (request.arrival_index, index, exact, found, state)
        return ours, theirs


prompts = st.builds(
    lambda shared, family, own: [(7 * index + family) % VOCAB for index in range(shared)] + own,
    st.integers(0, 60),
    st.integers(3, 4),
    st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12),
)
asks = st.tuples(prompts, st.sampled_from([0.0, 0.6, 1.0, 1.7]), st.integers(1, 30), st.sampled_from(["", "", "salt"]))
actions = st.one_of(
    st.tuples(st.just("submit"), st.lists(asks, min_size=1, max_size=4)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("swap"), st.sampled_from(["recompute", "keep"])),
    st.tuples(st.just("cancel"), st.integers(0, 7)),
)


def test_logprobs_are_those_of_a_plain_forward_through_everything_the_engine_does(world, cores):
    published, models, rounded = world
    totals: Counter[str] = Counter()
    ours: list[float] = []
    theirs: list[float] = []
    staged = {version: stage_weights(published[version], cores[True].model.module) for version in (A, B)}

    @given(st.booleans(), st.lists(asks, min_size=3, max_size=7), st.lists(actions, max_size=12), st.integers(6, 24))
    def property_holds(fused, burst, program, budget):
        core = cores[fused]
        for leftover in core.everyone():  # of an example that failed
            core.cancel(leftover)
        before = asdict(core.counters)
        core.scheduler.max_batch_tokens, core.scheduler.max_running = budget, 6
        drive = Drive(core)
        for action, detail in [("submit", burst), ("step", 3), *program]:
            match action:
                case "submit":
                    for prompt, temperature, tokens, salt in detail:
                        sampling = SamplingParams(temperature=temperature, max_tokens=tokens, seed=len(drive.requests))
                        drive.submit(core.request(prompt, sampling, salt=salt))
                case "step":
                    for _ in range(detail):
                        drive.step()
                case "swap":
                    core.swap(staged[B if core.version == A else A], detail)
                case "cancel":
                    core.cancel(drive.requests[detail % len(drive.requests)])
        while core.busy:
            drive.step()
        for errors, more in zip((ours, theirs), drive.errors(models, rounded)):
            errors += more
        assert core.pool.free == core.pool.capacity
        for name, value in asdict(core.counters).items():
            totals[name] += value - before[name]

    property_holds()
    print(dict(totals))
    found = f"mean error {mean(ours):.2e}, max {max(ours):.2e}; transformers itself {mean(theirs):.2e}"
    print(f"{len(ours)} tokens in {DTYPE}: {found}")
    if DTYPE != "float32":
        assert mean(ours) <= 1.2 * mean(theirs)
    assert all(totals[name] for name in EXERCISED), {name: totals[name] for name in EXERCISED}


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core(world):
    return build_core(world[0][A], A, kv_tokens=2048)


def ask(core, prompt, **sampling) -> EngineRequest:
    return core.request(list(prompt), SamplingParams(**{"seed": 7, "max_tokens": 12, **sampling}))


def test_a_request_samples_the_same_tokens_alone_and_in_company(core):
    (alone,) = run(core, ask(core, range(3, 20)))
    company = [ask(core, range(5, 5 + size), seed=size) for size in range(1, 12)]
    crowded, *_ = run(core, ask(core, range(3, 20)), *company)
    assert alone.output_token_ids == crowded.output_token_ids


@pytest.mark.parametrize(("tokens", "dtype"), [(32, "float32"), (80, "float32"), (32, "bfloat16")])
def test_batch_invariant_mode_gives_the_same_bits_in_any_company(world, tokens, dtype):
    """Of tokens there are fewer and more than operators in C take at once."""
    core = build_core(world[0][A], A, kv_tokens=2048, batch_invariant=True, max_batch_tokens=tokens, dtype=dtype)
    (alone,) = run(core, ask(core, range(3, 90)))
    company = [ask(core, range(5, 5 + 3 * size), seed=size) for size in range(1, 12)]
    *_, crowded = run(core, *company, ask(core, range(3, 90)))
    assert (alone.output_token_ids, alone.logprobs) == (crowded.output_token_ids, crowded.logprobs)
    assert core.counters.prefix_hit_tokens > 0  # the second time the prompt came from the cache
    assert core.counters.prefill_chunks > 0


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("two_threads")
def test_few_requests_in_bfloat16_are_as_exact_as_by_the_models_own_code(world):
    published, models, _ = world
    off: dict[bool, list[float]] = {True: [], False: []}
    for fused in off:
        core = build_core(published[A], A, kv_tokens=2048, dtype="bfloat16", fused=fused, max_batch_tokens=16)
        for request in run(core, ask(core, range(3, 20)), ask(core, range(5, 9), max_tokens=40)):
            exact = scores(models[A], request.token_ids, 1.0)
            for place, logprob in enumerate(request.logprobs, len(request.prompt_token_ids)):
                off[fused].append(abs(logprob - exact[place - 1, request.token_ids[place]].item()))
        assert core.counters.prefill_chunks > 0
    assert mean(off[True]) < 1.5 * mean(off[False])


def test_seeds_differ_and_no_seed_is_random(core):
    first, second, third, fourth = run(
        core, *(ask(core, range(3, 9), seed=seed, max_tokens=40) for seed in (1, 2, None, None))
    )
    assert len({tuple(request.output_token_ids) for request in (first, second, third, fourth)}) == 4


def test_uniforms_are_uniform_and_depend_on_seed_and_position():
    noise = uniform_noise([seed for seed in range(100) for _ in range(100)], list(range(100)) * 100)
    assert len(set(noise.tolist())) == 10_000
    assert abs(noise.mean() - 0.5) < 0.01
    assert abs(noise.std() - 12**-0.5) < 0.01
    assert noise.min() >= 0 and noise.max() < 1


def test_sampled_frequencies_follow_the_distribution(world):
    published, models, _ = world
    core = build_core(published[A], A, kv_tokens=8192, max_running=64, max_batch_tokens=512, queue=4000)
    prompt, temperature = [5, 9, 31], 1.5
    requests = run(core, *(ask(core, prompt, seed=seed, max_tokens=1, temperature=temperature) for seed in range(4000)))
    expected = scores(models[A], prompt, temperature)[-1].exp()
    counts = torch.bincount(torch.tensor([request.output_token_ids[0] for request in requests]), minlength=VOCAB)
    likely = expected > 5 / 4000
    chi = ((counts - 4000 * expected) ** 2 / (4000 * expected))[likely].sum() / likely.sum()
    assert chi < 1.6


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"top_k": 3}, lambda p: set(p.topk(3).indices.tolist())),
        ({"top_p": 0.5}, lambda p: nucleus(p, 0.5)),
        ({"min_p": 0.2}, lambda p: set(torch.nonzero(p >= 0.2 * p.max()).flatten().tolist())),
        ({"temperature": 0.0}, lambda p: {int(p.argmax())}),
    ],
)
def test_filters_narrow_what_is_drawn_but_not_the_logprobs(world, core, sampling, allowed):
    _, models, _ = world
    settings = {"temperature": 1.3, **sampling}
    requests = run(core, *(ask(core, [4, 8, 15], max_tokens=1, **{**settings, "seed": seed}) for seed in range(60)))
    expected = scores(models[A], [4, 8, 15], settings["temperature"])[-1]
    drawn = {request.output_token_ids[0] for request in requests}
    assert drawn <= allowed(expected.exp())
    assert len(drawn) == len(allowed(expected.exp())) or len(drawn) > 1
    for request in requests:
        assert abs(request.logprobs[0] - expected[request.output_token_ids[0]].item()) < CLOSE


def nucleus(probabilities: torch.Tensor, mass: float) -> set[int]:
    values, order = probabilities.sort(descending=True)
    return set(order[(values.cumsum(-1) - values) < mass].tolist())


def test_the_most_likely_token_stays_whatever_is_left_out(core):
    (greedy, narrow) = run(core, ask(core, [4, 8, 15], temperature=0.0), ask(core, [4, 8, 15], top_p=1e-300))
    assert narrow.output_token_ids == greedy.output_token_ids


def test_a_bias_moves_the_distribution(core):
    (request,) = run(core, ask(core, [4, 8], temperature=0.0, logit_bias=((42, 1000.0),)))
    assert set(request.output_token_ids) == {42}
    assert request.logprobs == pytest.approx([0.0] * 12)


def test_a_stop_id_ends_the_reply_and_is_part_of_it(core):
    (free,) = run(core, ask(core, [9, 10, 11]))
    stop = free.output_token_ids[4]
    (stopped,) = run(core, ask(core, [9, 10, 11], stop_ids=frozenset([stop])))
    assert stopped.output_token_ids == free.output_token_ids[: free.output_token_ids.index(stop) + 1]
    assert len(stopped.logprobs) == len(stopped.output_token_ids)
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")


def test_prompt_logprobs_cover_a_chunked_prompt(world):
    published, models, _ = world
    core = build_core(published[A], A, kv_tokens=2048, max_batch_tokens=16)
    prompt = [(5 * index) % VOCAB for index in range(100)]
    for _ in range(2):  # the second time the cache knows the prompt
        (request,) = run(core, ask(core, prompt, prompt_logprobs=True))
        expected = scores(models[A], prompt, 1.0)
        assert request.prompt_logprobs[0] is None
        found = request.prompt_logprobs[1:]
        assert found == pytest.approx([expected[at, prompt[at + 1]].item() for at in range(99)], abs=CLOSE)


def test_top_logprobs_are_the_most_likely_tokens(world, core):
    (request,) = run(core, ask(core, [9, 10, 11], top_logprobs=5, max_tokens=1))
    expected = scores(world[1][A], [9, 10, 11], 1.0)[-1].topk(5)
    assert [token for token, _ in request.top_logprobs[0]] == expected.indices.tolist()
    assert [value for _, value in request.top_logprobs[0]] == pytest.approx(expected.values.tolist(), abs=CLOSE)


# -- the queue --------------------------------------------------------------------------------------------------------


def test_priority_goes_first(world):
    core = build_core(world[0][A], A, kv_tokens=512, max_running=1)
    late, early = (core.create_request([3, 4], SamplingParams(max_tokens=2), priority=priority) for priority in (1, 0))
    core.add_request(late)
    core.add_request(early)
    core.step()
    assert (len(early.logprobs), len(late.logprobs)) == (1, 0)


def test_a_full_queue_refuses_and_counts(world):
    core = build_core(world[0][A], A, kv_tokens=512, queue=2)
    for _ in range(2):
        core.add_request(ask(core, [3]))
    with pytest.raises(QueueFull, match="2 requests wait already, the limit is 2"):
        core.add_request(ask(core, [3]))
    assert core.counters.rejected == 1


def test_a_prompt_over_the_limit_is_refused_with_both_lengths(core):
    with pytest.raises(ContextOverflow, match=f"length is {POSITIONS} tokens.*has {POSITIONS} tokens"):
        ask(core, [3] * POSITIONS)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, f"token id {VOCAB}"),
        ([3], {"temperature": -1.0}, "temperature"),
        ([3], {"temperature": 1e-50}, "temperature: expected 0, which is greedy, or a number of at least 1e-06"),
        ([3], {"top_p": 0.0}, "top_p"),
        ([3], {"max_tokens": 0}, "max_tokens"),
        ([3], {"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
        ([3], {"logit_bias": ((5, 1e39),)}, "logit_bias"),
    ],
)
def test_bad_input_is_refused_by_name(core, prompt, sampling, message):
    with pytest.raises(RequestInvalid, match=message):
        ask(core, prompt, **sampling)


def test_a_group_with_one_prompt_computes_it_once(world):
    core = build_core(world[0][A], A, kv_tokens=2048, max_running=16, max_batch_tokens=256)
    prompt = [(3 * index) % VOCAB for index in range(41)]
    run(core, *(ask(core, prompt, seed=seed, max_tokens=1) for seed in range(16)))
    assert core.counters.computed_tokens == 41 + 15  # 40 tokens in full blocks are shared, even within one step


def test_blocks_of_one_token_do_as_well(world, core):
    small = build_core(world[0][A], A, kv_tokens=512, block_size=1)
    asked = [(range(3, 12), 1), (range(3, 9), 2)]
    found, expected = (run(each, *(ask(each, prompt, seed=seed) for prompt, seed in asked)) for each in (small, core))
    assert [request.output_token_ids for request in found] == [request.output_token_ids for request in expected]
    assert small.counters.prefix_hit_tokens >= 5


@pytest.mark.parametrize("settings", [{"memory": 1e-12}, {"kv_tokens": 1, "block_size": 1}])
def test_a_cache_without_room_for_a_request_is_refused_at_the_start(world, settings):
    published, _, _ = world
    with pytest.raises(ConfigInvalid, match=r"room for [01] tokens.*inference\.memory or inference\.kv_tokens"):
        build_core(published[A], A, **settings)


def test_a_salt_for_every_request_leaves_nothing_behind(world):
    core = build_core(world[0][A], A, kv_tokens=64)
    for salt in range(50):
        run(core, core.create_request([3], SamplingParams(max_tokens=2), cache_salt=str(salt)))
    assert not core.pool.roots


def test_what_others_leave_behind_does_not_keep_a_request_from_sharing(world):
    core = build_core(world[0][A], A, kv_tokens=512)
    short, long = ask(core, [3], max_tokens=1), ask(core, [3], max_tokens=12)
    run(core, short, long)
    run(core, core.create_request(long.token_ids, SamplingParams(max_tokens=1)))
    assert core.counters.prefix_hit_tokens == 12


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_logprobs": 2}, {"temperature": 0.0}])
def test_weights_that_are_no_numbers_are_named(world, fused, sampling):
    core = build_core(world[0][A], A, kv_tokens=64, fused=fused)
    for parameter in core.model.module.parameters():
        parameter.data.fill_(float("nan"))
    with pytest.raises(ProviderError, match=f"the logits of {A} are not numbers"):
        run(core, ask(core, [3, 4], **sampling))


def test_a_salt_keeps_prefixes_apart(world):
    core = build_core(world[0][A], A, kv_tokens=2048)
    prompt = list(range(3, 40))
    for salt in ("one", "two"):
        run(core, core.create_request(prompt, SamplingParams(max_tokens=1), cache_salt=salt))
    assert core.counters.prefix_hit_tokens == 0
