"""The engine on a GPU, in process and through HTTP: milliseconds of a decode step and tokens per second.

A wave is groups of requests with a common prompt that are submitted at once and sample the same number of tokens. Its
decode steps are those between the first token of the last request and the last token.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from pathlib import Path
from typing import Any

from _check import Row, show
from _random_qwen import VOCAB

WAVES = {  # name: groups, requests in each, tokens of the prompt, new tokens, target of a decode step in ms
    "8 x 16 requests": (8, 16, 368, 256, 2.5),
    "16 x 16 requests": (16, 16, 368, 256, 4.0),
    "1 request": (1, 1, 368, 256, 1.5),
    "2 x 16 behind 2,048 tokens": (2, 16, 2048, 256, 2.0),
    "8 x 16 behind 8,192 tokens": (8, 16, 8192, 128, 4.5),
}
QUANTIZED_WAVES = ("8 x 16 requests", "16 x 16 requests", "1 request")
LONG = "8 x 16 behind 8,192 tokens"
ENGINE = {"max_running_requests": 256, "max_num_batched_tokens": 8192, "kv_cache_tokens": 400_000}
TOKENS_PER_SECOND, SHARING_FACTOR, HTTP_SHARE = 45_000, 5.0, 0.85
KEEP_MILLISECONDS, RECOMPUTE_MILLISECONDS = 10.0, 150.0
ROUNDS, ORDINARY_STEPS = 3, 16


def build_prompts(groups: int, size: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(300, VOCAB) for _ in range(length)] for _ in range(groups)]
    return [prompt for prompt in prompts for _ in range(size)]


def run_wave(core: Any, groups: int, size: int, length: int, new_tokens: int, seed: int) -> tuple[float, float]:
    """Run a wave; return the milliseconds of a decode step and the tokens per second with prefill."""
    from ramify.infer.request import SamplingParams

    requests = [
        core.create_request(prompt, SamplingParams(max_tokens=new_tokens, seed=index))
        for index, prompt in enumerate(build_prompts(groups, size, length, seed))
    ]
    started = time.perf_counter()
    for request in requests:
        core.enqueue(request)
    decoding_since, num_steps = 0.0, 0
    while core.has_unfinished_requests:
        core.step()
        if decoding_since:
            num_steps += 1
        elif all(request.logprobs for request in requests):
            decoding_since = time.perf_counter()
    ended = time.perf_counter()
    return 1e3 * (ended - decoding_since) / num_steps, len(requests) * new_tokens / (ended - started)


def measure_in_process(model: Path) -> tuple[list[Row], float]:
    """Return the rows of the waves, and the tokens per second of the first."""
    from ramify.infer.config import EngineConfig
    from ramify.infer.engine_core import EngineCore
    from ramify.model.load import load_engine_model
    from ramify.trace.version import PolicyVersion

    loaded = load_engine_model(model, dtype="bfloat16", device="cuda")
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", **ENGINE}
    core = EngineCore(loaded, EngineConfig(**settings), PolicyVersion("bench"))
    rows: list[Row] = []
    step_ms: dict[str, float] = {}
    speed = 0.0
    for name, (*shape, target) in WAVES.items():
        run_wave(core, *shape, seed=0)  # captures its graphs
        rounds = [run_wave(core, *shape, seed=seed) for seed in range(1, 1 + ROUNDS)]
        step_ms[name] = min(milliseconds for milliseconds, _ in rounds)
        rows += show(Row(f"{name}: a decode step", step_ms[name], None, "ms", target))
        if not speed:
            speed = max(tokens for _, tokens in rounds)
            rows += show(Row(f"{name}: with prefill", speed, None, "tok/s", TOKENS_PER_SECOND, at_least=True))
    rows += show(*measure_swaps(core, *next(iter(WAVES.values()))[:4]))
    del core
    plain = EngineCore(loaded, EngineConfig(**settings, share_prefixes=False), PolicyVersion("bench"))
    shape = WAVES[LONG][:4]
    run_wave(plain, *shape, seed=0)
    alone, _ = run_wave(plain, *shape, seed=1)
    rows += show(Row(f"{LONG}: without sharing", alone, None, "ms"))
    rows += show(Row(f"{LONG}: faster by sharing", alone / step_ms[LONG], None, "x", SHARING_FACTOR, at_least=True))
    return rows, speed


def measure_quantized(model: Path) -> list[Row]:
    """Return the rows of engines with adapters whose base is in bfloat16, in 8 and in 4 bits."""
    from functools import partial

    import torch

    from ramify.infer.config import EngineConfig
    from ramify.infer.engine_core import EngineCore
    from ramify.model.load import load_engine_model
    from ramify.model.lora import add_engine_adapters
    from ramify.trace.version import PolicyVersion

    rows: list[Row] = []
    plain: dict[str, float] = {}
    for mode in (None, "8bit", "4bit"):
        base = mode or "bfloat16"
        add = partial(add_engine_adapters, rank=16, alpha=32, target_modules=[], quantize=mode)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        loaded = load_engine_model(model, dtype="bfloat16", device="cuda", add_adapters=add)
        peak_bytes = torch.cuda.max_memory_allocated()
        settings: dict[str, Any] = {**ENGINE, "device": "cuda", "dtype": "bfloat16", "kv_cache_tokens": 100_000}
        core = EngineCore(loaded, EngineConfig(**settings), PolicyVersion("bench"))
        num_bytes = sum(tensor.nbytes for tensor in (*loaded.module.parameters(), *loaded.module.buffers()))
        rows += show(Row(f"{base}: weights", num_bytes / 2**30, None, "GiB"))
        rows += show(Row(f"{base}: peak while loading the weights", peak_bytes / 2**30, None, "GiB"))
        for name in QUANTIZED_WAVES:
            shape = WAVES[name][:4]
            run_wave(core, *shape, seed=0)
            rounds = [run_wave(core, *shape, seed=seed) for seed in range(1, 1 + ROUNDS)]
            step_ms, speed = min(step for step, _ in rounds), max(tokens for _, tokens in rounds)
            reference = plain.setdefault(name, step_ms)
            target = reference if mode == "4bit" and name == QUANTIZED_WAVES[0] else None
            rows += show(Row(f"{base}, {name}: a decode step", step_ms, reference if mode else None, "ms", target))
            rows += show(Row(f"{base}, {name}: with prefill", speed, None, "tok/s"))
        description = core.runner.ops_description
        assert description == "Triton", description
        del core, loaded
    return rows


def measure_swaps(core: Any, groups: int, size: int, length: int, new_tokens: int) -> list[Row]:
    """Return how long a weight swap in the middle of a wave keeps its requests from their next token.

    The new weights are on the device already, as a trainer on the same GPU hands them over.
    """
    from ramify.infer.request import SamplingParams
    from ramify.model.weights import StagedWeights, get_untied_tensors
    from ramify.trace.version import PolicyVersion

    pauses: dict[str, list[float]] = {"keep": [], "recompute": []}
    requests: list[Any] = []
    computed = unique = 0
    for number, kv_mode in enumerate(["keep", "recompute"] * (1 + ROUNDS)):
        tensors = {name: tensor.clone() for name, tensor in get_untied_tensors(core.model.module).items()}
        staged = StagedWeights(PolicyVersion("bench", 0, number + 1), tensors)
        prompts = build_prompts(groups, size, length, seed=100 + number)
        requests = [
            core.create_request(prompt, SamplingParams(max_tokens=new_tokens, seed=index))
            for index, prompt in enumerate(prompts)
        ]
        for request in requests:
            core.enqueue(request)
        _wait_for_tokens(core, requests, new_tokens // 2)
        started = time.perf_counter()
        _wait_for_tokens(core, requests, ORDINARY_STEPS)
        ordinary = (time.perf_counter() - started) / ORDINARY_STEPS
        computed_before = core.counters.computed_tokens
        started = time.perf_counter()
        core.swap_weights(staged, kv_mode)  # waits for the step that is under way
        _wait_for_tokens(core, requests, 1)
        pauses[kv_mode].append(1e3 * (time.perf_counter() - started - 2 * ordinary))
        if kv_mode == "recompute":
            computed = core.counters.computed_tokens - computed_before
            unique = groups * length + sum(len(request.logprobs) for request in requests)
        while core.has_unfinished_requests:
            core.step()
    keep, recompute = (statistics.median(pauses[kv_mode][1:]) for kv_mode in ("keep", "recompute"))
    return [
        Row(f"{len(requests)} requests: pause for a swap that keeps keys", keep, None, "ms", KEEP_MILLISECONDS),
        Row("  that recomputes them, to the last next token", recompute, None, "ms", RECOMPUTE_MILLISECONDS),
        Row("  tokens it computes over distinct ones", computed / unique, None, "x", 1.1),
    ]


def _wait_for_tokens(core: Any, requests: list[Any], count: int) -> None:
    """Step until each request has this many more tokens, or is finished."""
    wanted = [len(request.logprobs) + count for request in requests]
    while any(
        len(request.logprobs) < number and request.finish_reason is None
        for request, number in zip(requests, wanted, strict=True)
    ):
        core.step()
