"""Whatever the engine does to save work, its logprobs equal transformers' own forward."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from ramify.core.errors import ConfigInvalid, ContextOverflow, ProviderError, QueueFull, RequestInvalid
from ramify.infer.cuda_runner import CudaModelRunner
from ramify.infer.engine_core import EngineCore, KVSwapMode
from ramify.infer.request import EngineRequest, SamplingParams
from ramify.infer.sampler import uniform_noise
from ramify.infer.scheduler import Scheduler
from ramify.model.kernels import attention_plan
from ramify.model.weights import StagedWeights, stage_weights
from ramify.trace.version import PolicyVersion
from tests.support.models import (
    DEVICE,
    DTYPE,
    POSITIONS,
    VOCAB,
    build_core,
    publish_as,
    reference,
    run,
    sampled_ids,
    scores,
    write_lfm2,
    write_llama,
    write_qwen3_next,
)

KVRun = tuple[PolicyVersion, int]
A, B = PolicyVersion("llama", 0, 1), PolicyVersion("llama", 0, 2)
CLOSE = 1e-4  # in float32; in bfloat16 the error may be as large as transformers' own
EXERCISED = ["prefix_hit_tokens", "prefill_chunks", "mixed_steps", "preemptions", "evictions", "cancelled"]
EXERCISED += ["recomputes", "kept"]
EXERCISED_BY = {
    "llama": [*EXERCISED, *(["replayed_steps", "shared_keys"] if DEVICE == "cuda" else [])],
    "qwen3_next": [*EXERCISED, "snapshots", "snapshot_hits", "snapshot_evictions"],
    "lfm2": [*EXERCISED, "snapshots", "snapshot_hits", "snapshot_evictions"],
}
WRITERS = {"llama": write_llama, "qwen3_next": write_qwen3_next, "lfm2": write_lfm2}


def build_world(name: str, directory: Path):
    """Publish two versions; return them, and their transformers models in float32 and in DTYPE."""
    published, models, rounded = {}, {}, {}
    for version, seed in ((A, 1), (B, 2)):
        source = WRITERS[name](directory / f"source-{seed}", seed)
        published[version] = publish_as(directory / f"v{version.step}", source, version)
        models[version] = reference(source)
        rounded[version] = models[version] if DTYPE == "float32" else reference(source, DTYPE)
    return published, models, rounded


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_world("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=WRITERS)
def each_world(request, world, tmp_path_factory):
    """The world of each model: a Llama, and two with recurrent layers, of which one has no fused forward."""
    return world if request.param == "llama" else build_world(request.param, tmp_path_factory.mktemp("models"))


fewer_worlds = pytest.mark.parametrize(
    "each_world",
    ["llama", "lfm2", pytest.param("qwen3_next", marks=pytest.mark.full("as lfm2"))],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def cores(each_world):
    """Cores with a small cache, 30 blocks of 4 tokens, so that requests compete for it."""
    published, _, _ = each_world
    settings = {"kv_cache_tokens": 120, "max_running_requests": 6, "max_num_batched_tokens": 24, "dtype": DTYPE}
    settings["state_snapshots"] = 8
    return {fused: build_core(published[A], A, fused_ops=fused, **settings) for fused in (True, False)}


def mixed_scores(models, request: EngineRequest, kv_runs, version: PolicyVersion) -> torch.Tensor:
    """Like `scores`, with keys and values of the first tokens computed by older versions."""
    cache, start, logits = DynamicCache(config=models[version].config), 0, []
    for owner, stop in [*kv_runs, (version, len(request.token_ids))]:
        if stop > start:
            with torch.no_grad():
                out = models[owner](
                    torch.tensor([request.token_ids[start:stop]]), past_key_values=cache, use_cache=True
                )
            logits.append(out.logits[0])
            start = stop
    return torch.log_softmax(torch.cat(logits).float() / (request.sampling_params.temperature or 1.0), -1)


class CoreDriver:
    """Runs a core step by step.

    For each token it records which versions computed which keys and values, and which version sampled it.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.requests: list[EngineRequest] = []
        self.kv_runs: dict[EngineRequest, list[KVRun]] = {}  # older versions, and the token up to which each computed
        self.states: dict[EngineRequest, list[tuple[tuple[KVRun, ...], PolicyVersion]]] = {}
        self.launched_states: dict[EngineRequest, list[tuple[tuple[KVRun, ...], PolicyVersion]]] = {}
        core.scheduler.requeue = self.requeue
        if isinstance(core.runner, CudaModelRunner):
            core.runner.launch = self.launch

    def launch(self, chunks):
        """Record the states of the tokens that are sampled now, and reported after the next step."""
        for chunk in chunks:
            if chunk.samples_next:
                state = tuple(self.kv_runs[chunk.request]), self.core.version
                self.launched_states.setdefault(chunk.request, []).append(state)
        return CudaModelRunner.launch(self.core.runner, chunks)

    def requeue(self, request: EngineRequest) -> None:
        self.kv_runs[request].clear()
        Scheduler.requeue(self.core.scheduler, request)

    def submit(self, request: EngineRequest) -> None:
        self.core.enqueue(request)
        self.requests.append(request)
        self.states[request], self.kv_runs[request] = [], []

    def swap(self, staged: StagedWeights, kv_mode: KVSwapMode) -> None:
        self.core.finish_launched_step()
        if kv_mode == "keep":
            for request in self.core.scheduler.running:
                self.kv_runs[request].append((self.core.version, request.num_computed_tokens))
        self.core.swap_weights(staged, kv_mode)

    def step(self) -> None:
        for request in self.core.step():
            launched = self.launched_states.get(request)
            state = launched.pop(0) if launched else (tuple(self.kv_runs[request]), self.core.version)
            self.states[request].append(state)

    def errors(self, models, rounded_models) -> tuple[list[float], list[float]]:
        """Return the distances of the engine's and of transformers' own logprobs from a float32 forward."""
        engine_errors: list[float] = []
        transformers_errors: list[float] = []
        for request in self.requests:
            by_state: dict[object, tuple[torch.Tensor, torch.Tensor]] = {}
            first = len(request.prompt_token_ids)
            samples = zip(self.states[request], sampled_ids(request), request.logprobs)
            for index, (state, token, logprob) in enumerate(samples):
                if state not in by_state:
                    exact = mixed_scores(models, request, *state)
                    is_exact = DTYPE == "float32"
                    by_state[state] = exact, exact if is_exact else mixed_scores(rounded_models, request, *state)
                exact, rounded = (table[first + index - 1, token].item() for table in by_state[state])
                engine_errors.append(abs(exact - logprob))
                transformers_errors.append(abs(exact - rounded))
                if DTYPE == "float32":
                    assert engine_errors[-1] <= CLOSE, (request.arrival_index, index, exact, logprob, state)
        return engine_errors, transformers_errors


prompts = st.builds(
    lambda shared, family, own: [(7 * index + family) % VOCAB for index in range(shared)] + own,
    st.integers(0, 60),
    st.integers(3, 4),
    st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=12),
)
samplings = st.tuples(
    prompts, st.sampled_from([0.0, 0.6, 1.0, 1.7]), st.integers(1, 30), st.sampled_from(["", "", "salt"])
)
actions = st.one_of(
    st.tuples(st.just("submit"), st.lists(samplings, min_size=1, max_size=4)),
    st.tuples(st.just("step"), st.integers(1, 12)),
    st.tuples(st.just("swap"), st.sampled_from(["recompute", "keep"])),
    st.tuples(st.just("cancel"), st.integers(0, 7)),
)

SHARED_BURST = [([5] * 30 + [seed], 1.0, 20, "") for seed in range(4)]


@pytest.mark.promise
def test_logprobs_equal_those_of_transformers(each_world, cores, monkeypatch):
    monkeypatch.setattr(attention_plan, "MIN_SAVED_KEYS", 8)  # prompts are short here
    published, models, rounded = each_world
    totals: Counter[str] = Counter()
    engine_errors: list[float] = []
    transformers_errors: list[float] = []
    staged = {version: stage_weights(published[version], cores[True].model.module) for version in (A, B)}

    is_hybrid = bool(cores[True].model.state_specs)

    @settings(max_examples=settings().max_examples // (6 if is_hybrid else 2))  # one example runs dozens of requests
    @given(
        st.booleans(), st.lists(samplings, min_size=3, max_size=7), st.lists(actions, max_size=12), st.integers(6, 24)
    )
    @example(False, SHARED_BURST, [("swap", "keep"), ("step", 3), ("swap", "recompute"), ("cancel", 0)], 12)
    def property_holds(fused, burst, program, budget):
        core = cores[fused]
        for leftover in core.list_unfinished_requests():  # of an example that failed
            core.cancel(leftover)
        before = asdict(core.counters)
        core.scheduler.max_num_batched_tokens, core.scheduler.max_running_requests = budget, 6
        driver = CoreDriver(core)
        for action, detail in [("submit", burst), ("step", 3), *program]:
            match action:
                case "submit":
                    for prompt, temperature, tokens, salt in detail:
                        params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=len(driver.requests))
                        driver.submit(core.create_request(prompt, params, cache_salt=salt))
                case "step":
                    for _ in range(detail):
                        driver.step()
                case "swap":
                    driver.swap(staged[B if core.version == A else A], detail)
                case "cancel":
                    core.cancel(driver.requests[detail % len(driver.requests)])
        while core.has_unfinished_requests:
            driver.step()
        for errors, new in zip((engine_errors, transformers_errors), driver.errors(models, rounded)):
            errors += new
        assert core.pool.num_free_blocks == core.pool.num_usable_blocks
        for name, value in asdict(core.counters).items():
            totals[name] += value - before[name]

    property_holds()
    print(dict(totals))
    engine_error, transformers_error = mean(engine_errors), mean(transformers_errors)
    summary = f"mean error {engine_error:.2e}, max {max(engine_errors):.2e}; transformers {transformers_error:.2e}"
    print(f"{len(engine_errors)} tokens in {DTYPE}: {summary}")
    if DTYPE != "float32":
        assert engine_error <= 1.2 * transformers_error
    exercised = EXERCISED_BY[models[A].config.model_type]
    assert all(totals[name] for name in exercised), {name: totals[name] for name in exercised}


# -- sampling ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core(world):
    return build_core(world[0][A], A, kv_cache_tokens=2048)


def build_request(core: EngineCore, prompt, **sampling) -> EngineRequest:
    return core.create_request(list(prompt), SamplingParams(**{"seed": 7, "max_tokens": 12, **sampling}))


def test_tokens_do_not_depend_on_the_batch(core):
    (alone,) = run(core, build_request(core, range(3, 20)))
    others = [build_request(core, range(5, 5 + size), seed=size) for size in range(1, 12)]
    batched, *_ = run(core, build_request(core, range(3, 20)), *others)
    assert sampled_ids(alone) == sampled_ids(batched)


@pytest.fixture
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("tokens", "dtype", "threads"),
    [(32, "float32", 1), (80, "float32", 2), (32, "bfloat16", 1)],
)
@pytest.mark.promise
def test_batch_invariant_mode_gives_the_same_bits_in_any_batch(world, tokens, dtype, threads, restore_threads):
    """The steps have fewer and more tokens than the operators in C compute at once."""
    torch.set_num_threads(threads)
    core = build_core(
        world[0][A], A, kv_cache_tokens=2048, batch_invariant=True, max_num_batched_tokens=tokens, dtype=dtype
    )
    (alone,) = run(core, build_request(core, range(3, 90), max_tokens=6))
    others = [build_request(core, range(5, 5 + 3 * size), seed=size, max_tokens=6) for size in range(1, 12, 2)]
    *_, batched = run(core, *others, build_request(core, range(3, 90), max_tokens=6))
    assert (sampled_ids(alone), alone.logprobs) == (sampled_ids(batched), batched.logprobs)
    assert core.counters.prefix_hit_tokens > 0  # the second time the prompt came from the cache
    assert core.counters.prefill_chunks > 0


@pytest.fixture
def two_threads(restore_threads):
    torch.set_num_threads(2)


@pytest.mark.usefixtures("two_threads")
def test_fused_bfloat16_is_as_exact_as_the_models_own_code(world):
    published, models, _ = world
    errors: dict[bool, list[float]] = {True: [], False: []}
    for fused in errors:
        core = build_core(
            published[A], A, kv_cache_tokens=2048, dtype="bfloat16", fused_ops=fused, max_num_batched_tokens=16
        )
        for request in run(core, build_request(core, range(3, 20)), build_request(core, range(5, 9), max_tokens=40)):
            exact = scores(models[A], request.token_ids, 1.0)
            for position, logprob in enumerate(request.logprobs, len(request.prompt_token_ids)):
                errors[fused].append(abs(logprob - exact[position - 1, request.token_ids[position]].item()))
        assert core.counters.prefill_chunks > 0
    assert mean(errors[True]) < 1.5 * mean(errors[False])


def test_noise_is_uniform_and_depends_on_seed_and_position():
    noise = uniform_noise([seed for seed in range(100) for _ in range(100)], list(range(100)) * 100)
    assert len(set(noise.tolist())) == 10_000
    assert abs(noise.mean() - 0.5) < 0.01
    assert abs(noise.std() - 12**-0.5) < 0.01
    assert noise.min() >= 0 and noise.max() < 1


def test_sampled_frequencies_follow_the_distribution(world):
    published, models, _ = world
    core = build_core(
        published[A],
        A,
        kv_cache_tokens=8192,
        max_running_requests=64,
        max_num_batched_tokens=512,
        max_queued_requests=2000,
    )
    prompt, temperature = [5, 9, 31], 1.5
    requests = run(
        core, *(build_request(core, prompt, seed=seed, max_tokens=1, temperature=temperature) for seed in range(2000))
    )
    expected = scores(models[A], prompt, temperature)[-1].exp()
    counts = torch.bincount(torch.tensor([sampled_ids(request)[0] for request in requests]), minlength=VOCAB)
    likely = expected > 5 / 2000
    chi = ((counts - 2000 * expected) ** 2 / (2000 * expected))[likely].sum() / likely.sum()
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
def test_filters_limit_tokens_but_not_logprobs(world, core, sampling, allowed):
    _, models, _ = world
    settings = {"temperature": 1.3, **sampling}
    requests = run(
        core, *(build_request(core, [4, 8, 15], max_tokens=1, **{**settings, "seed": seed}) for seed in range(60))
    )
    expected = scores(models[A], [4, 8, 15], settings["temperature"])[-1]
    sampled = {sampled_ids(request)[0] for request in requests}
    assert sampled <= allowed(expected.exp())
    assert len(sampled) == len(allowed(expected.exp())) or len(sampled) > 1
    for request in requests:
        assert abs(request.logprobs[0] - expected[sampled_ids(request)[0]].item()) < CLOSE


def nucleus(probabilities: torch.Tensor, mass: float) -> set[int]:
    values, order = probabilities.sort(descending=True)
    return set(order[(values.cumsum(-1) - values) < mass].tolist())


def test_filters_biases_and_top_logprobs_of_one_batch_are_each_requests_own(core):
    settings = [
        {},
        {"top_k": 3, "top_logprobs": 4},
        {"top_p": 0.5, "logit_bias": ((7, 2.0), (9, -3.0))},
        {"min_p": 0.2, "top_logprobs": 1},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
        {"top_p": 0.999, "logit_bias": ((7, -100.0),)},
        {"temperature": 0.0, "logit_bias": ((11, 0.5),), "top_logprobs": 2},
    ]
    settings = [{"temperature": 1.3, "seed": seed, **sampling} for seed, sampling in enumerate(settings)]
    together = run(core, *(build_request(core, [4, 8, 15], **sampling) for sampling in settings))
    for sampling, request in zip(settings, together):
        (alone,) = run(core, build_request(core, [4, 8, 15], **sampling))
        assert sampled_ids(request) == sampled_ids(alone)
        assert request.logprobs == pytest.approx(alone.logprobs, abs=CLOSE)
        assert [[token for token, _ in top] for top in request.top_logprobs] == [
            [token for token, _ in top] for top in alone.top_logprobs
        ]
        assert {len(top) for top in request.top_logprobs} <= {sampling.get("top_logprobs", 0)}


def test_logit_bias_changes_the_distribution(core):
    (request,) = run(core, build_request(core, [4, 8], temperature=0.0, logit_bias=((42, 1000.0),)))
    assert set(sampled_ids(request)) == {42}
    assert request.logprobs == pytest.approx([0.0] * 12)


def test_stop_id_ends_the_reply_and_is_part_of_it(core):
    (free,) = run(core, build_request(core, [9, 10, 11]))
    stop = sampled_ids(free)[4]
    (stopped,) = run(core, build_request(core, [9, 10, 11], stop_ids=frozenset([stop])))
    assert sampled_ids(stopped) == sampled_ids(free)[: sampled_ids(free).index(stop) + 1]
    assert len(stopped.logprobs) == len(sampled_ids(stopped))
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")


def test_prompt_logprobs_cover_a_chunked_prompt(each_world):
    published, models, _ = each_world
    core = build_core(published[A], A, kv_cache_tokens=2048, max_num_batched_tokens=16)
    prompt = [(5 * index) % VOCAB for index in range(100)]
    for _ in range(2):  # the second time the prompt is cached
        (request,) = run(core, build_request(core, prompt, prompt_logprobs=True))
        expected = scores(models[A], prompt, 1.0)
        assert request.prompt_logprobs[0] is None
        exact = [expected[position, prompt[position + 1]].item() for position in range(99)]
        assert request.prompt_logprobs[1:] == pytest.approx(exact, abs=CLOSE)


@fewer_worlds
def test_logprobs_start_keeps_the_cached_prefix_before_it(each_world):
    published, models, _ = each_world
    core = build_core(published[A], A, kv_cache_tokens=2048, max_num_batched_tokens=16)
    prompt = [(5 * index) % VOCAB for index in range(100)]
    run(core, build_request(core, prompt))
    before = core.counters.computed_tokens
    params = {"prompt_logprobs": True, "prompt_top_logprobs": VOCAB, "logprobs_start": 70, "max_tokens": 1}
    (request,) = run(core, build_request(core, prompt, **params))
    cached = 64 if core.model.state_specs else 68  # 17 of the blocks of 4 precede token 69; a snapshot is after a chunk
    assert core.counters.computed_tokens - before == 100 - cached
    assert request.prompt_logprobs[:70] == [None] * 70
    expected = scores(models[A], prompt, 1.0)
    exact = [expected[position - 1, prompt[position]].item() for position in range(70, 100)]
    assert request.prompt_logprobs[70:] == pytest.approx(exact, abs=CLOSE)
    for position, likeliest in enumerate(request.prompt_top_logprobs[70:], 70):
        assert dict(likeliest) == pytest.approx(dict(enumerate(expected[position - 1].tolist())), abs=CLOSE)


@pytest.mark.parametrize("start", [1, 17, 99, 100, 500])
def test_logprobs_start_does_not_change_the_logprobs_after_it(core, start):
    prompt = [(7 * index) % VOCAB for index in range(100)]
    (whole,) = run(core, build_request(core, prompt, prompt_logprobs=True, max_tokens=1))
    (part,) = run(core, build_request(core, prompt, prompt_logprobs=True, logprobs_start=start, max_tokens=1))
    assert part.prompt_logprobs[start:] == pytest.approx(whole.prompt_logprobs[start:], abs=CLOSE)
    assert part.prompt_logprobs[:start] == [None] * min(start, 100)
    assert sampled_ids(part) == sampled_ids(whole)


def test_top_logprobs_are_the_likeliest_tokens(world, core):
    (request,) = run(core, build_request(core, [9, 10, 11], top_logprobs=5, max_tokens=1))
    expected = scores(world[1][A], [9, 10, 11], 1.0)[-1].topk(5)
    assert [token for token, _ in request.top_logprobs[0]] == expected.indices.tolist()
    assert [value for _, value in request.top_logprobs[0]] == pytest.approx(expected.values.tolist(), abs=CLOSE)


# -- the queue --------------------------------------------------------------------------------------------------------


def test_lower_priority_number_runs_first(world):
    core = build_core(world[0][A], A, kv_cache_tokens=512, max_running_requests=1)
    late, early = (core.create_request([3, 4], SamplingParams(max_tokens=2), priority=priority) for priority in (1, 0))
    core.enqueue(late)
    core.enqueue(early)
    while not early.logprobs:
        core.step()
    assert (len(early.logprobs), len(late.logprobs)) == (1, 0)


def test_full_queue_rejects_and_counts(world):
    core = build_core(world[0][A], A, kv_cache_tokens=512, max_queued_requests=2)
    for _ in range(2):
        core.enqueue(build_request(core, [3]))
    with pytest.raises(QueueFull, match="2 requests are waiting already, the limit is 2"):
        core.check_capacity()
    assert core.counters.rejected == 1


def test_too_long_prompt_is_rejected_with_both_lengths(core):
    with pytest.raises(ContextOverflow, match=f"length is {POSITIONS} tokens.*has {POSITIONS} tokens"):
        build_request(core, [3] * POSITIONS)


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
def test_invalid_input_is_rejected(core, prompt, sampling, message):
    with pytest.raises(RequestInvalid, match=message):
        build_request(core, prompt, **sampling)


def test_shared_prompt_is_computed_once(world):
    core = build_core(world[0][A], A, kv_cache_tokens=2048, max_running_requests=16, max_num_batched_tokens=256)
    prompt = [(3 * index) % VOCAB for index in range(41)]
    run(core, *(build_request(core, prompt, seed=seed, max_tokens=1) for seed in range(16)))
    assert core.counters.computed_tokens == 41 + 15  # 40 tokens in full blocks are shared, even within one step


@fewer_worlds
@pytest.mark.parametrize("budget", [16, 256])
def test_recompute_computes_each_shared_block_once(each_world, budget):
    """Two groups of eight requests with common prompts."""
    published, _, _ = each_world
    core = build_core(published[A], A, kv_cache_tokens=2048, max_num_batched_tokens=budget)
    prompts = [[(step * index) % VOCAB for index in range(length)] for step, length in ((3, 41), (5, 30))]
    requests = [build_request(core, prompt, seed=seed, max_tokens=24) for prompt in prompts for seed in range(8)]
    for request in requests:
        core.enqueue(request)
    while min(len(request.logprobs) for request in requests) < 6:
        core.step()
    core.finish_launched_step()
    lengths = [len(request.token_ids) for request in requests]
    core.swap_weights(stage_weights(published[B], core.model.module), "recompute")
    computed, duplicates = core.counters.computed_tokens, core.counters.duplicate_blocks
    while any(len(request.token_ids) == length for request, length in zip(requests, lengths)):
        core.step()
    core.finish_launched_step()
    decoded = sum(len(request.token_ids) - length - 1 for request, length in zip(requests, lengths))
    shareable = [request.token_ids[: (length - 1) // 4 * 4] for request, length in zip(requests, lengths)]
    blocks = {tuple(tokens[:stop]) for tokens in shareable for stop in range(4, len(tokens) + 1, 4)}
    once = 4 * len(blocks) + sum(length - len(tokens) for length, tokens in zip(lengths, shareable))
    assert core.counters.computed_tokens - computed == once + decoded
    assert core.counters.duplicate_blocks == duplicates  # some requests sampled the same tokens before the swap


@fewer_worlds
def test_blocks_of_one_token(each_world):
    inputs = [(range(3, 12), 1), (range(3, 9), 2)]
    small, usual = (build_core(each_world[0][A], A, kv_cache_tokens=512, block_size=size) for size in (1, 4))
    actual, expected = (
        run(engine, *(build_request(engine, prompt, seed=seed) for prompt, seed in inputs)) for engine in (small, usual)
    )
    assert [sampled_ids(request) for request in actual] == [sampled_ids(request) for request in expected]
    assert small.counters.prefix_hit_tokens >= (0 if small.model.state_specs else 5)


@pytest.mark.parametrize("settings", [{"kv_memory_fraction": 1e-12}, {"kv_cache_tokens": 1, "block_size": 1}])
def test_too_small_cache_is_rejected(world, settings):
    published, _, _ = world
    with pytest.raises(ConfigInvalid, match=r"room for [01] tokens.*kv_memory_fraction or inference\.kv_cache_tokens"):
        build_core(published[A], A, **settings)


def test_unused_cache_scopes_are_dropped(world):
    core = build_core(world[0][A], A, kv_cache_tokens=64)
    for salt in range(50):
        run(core, core.create_request([3], SamplingParams(max_tokens=2), cache_salt=str(salt)))
    assert not core.pool.roots


def test_request_shares_blocks_after_its_scope_was_dropped(world):
    core = build_core(world[0][A], A, kv_cache_tokens=512)
    short, long = build_request(core, [3], max_tokens=1), build_request(core, [3], max_tokens=12)
    run(core, short, long)
    run(core, core.create_request(long.token_ids, SamplingParams(max_tokens=1)))
    assert core.counters.prefix_hit_tokens == 12


@pytest.mark.parametrize("fused", [True, False])
def test_nan_weights_are_reported(world, fused):
    core = build_core(world[0][A], A, kv_cache_tokens=64, fused_ops=fused)
    for parameter in core.model.module.parameters():
        parameter.data.fill_(float("nan"))
    for sampling in ({}, {"top_p": 0.9}, {"top_logprobs": 2}, {"temperature": 0.0}):
        with pytest.raises(ProviderError, match=f"the logits of {A} are NaN"):
            run(core, request := build_request(core, [3, 4], **sampling))
        core.cancel(request)


def test_cache_salt_separates_prefixes(world):
    core = build_core(world[0][A], A, kv_cache_tokens=2048)
    prompt = list(range(3, 40))
    for salt in ("one", "two"):
        run(core, core.create_request(prompt, SamplingParams(max_tokens=1), cache_salt=salt))
    assert core.counters.prefix_hit_tokens == 0
