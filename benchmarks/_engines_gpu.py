"""An engine on one GPU, in an interpreter of its own: milliseconds of a prefill and of a decode step.

    _engines_gpu.py ramify|vllm MODEL_DIR [WAVE ...]

All prompts of a wave are submitted at once, in process. A prefill is the time until each has sampled one token. A
decode step is the time until each has sampled 256 tokens, minus the time until each has sampled one, divided by 255.
Every wave runs once to warm up and then several times with new prompts; the best times count. The native engine returns
logprobs, which vLLM is not asked for. Prints each wave on stderr as soon as it is measured, and at the end one JSON
object: wave -> milliseconds.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from _sampler_gpu import build_prompts

WAVES = {  # name: groups, prompts in each, their tokens, new tokens, runs
    "decode 8 x 16": (8, 16, 368, 256, 3),
    "decode 1": (1, 1, 368, 256, 3),
    "prefill 128 x 368": (128, 1, 368, 1, 3),
    "prefill 128 x 2,048": (128, 1, 2048, 1, 3),
    "prefill 16 x 32k": (16, 1, 32_768, 1, 2),
}
MAX_LENGTH = 33_024
MEMORY_FRACTION = 0.85

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], None]  # samples this many tokens after each prompt


def main() -> None:
    kind, model, *waves = sys.argv[1:]
    generate = {"ramify": start_ramify, "vllm": start_vllm}[kind](model)
    print(json.dumps(measure_all(kind, generate, waves or list(WAVES))))


def measure_all(kind: str, generate: Generate, waves: Sequence[str]) -> dict[str, float]:
    """Return the milliseconds of each wave."""
    milliseconds: dict[str, float] = {}
    seeds = itertools.count()
    for wave in waves:
        milliseconds[wave] = measure(generate, *WAVES[wave], seeds)
        print(f"{kind}: {wave}: {milliseconds[wave]:.4g} ms", file=sys.stderr, flush=True)
    return milliseconds


def measure(
    generate: Generate,
    groups: int,
    size: int,
    length: int,
    new_tokens: int,
    runs: int,
    seeds: Iterator[int],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the milliseconds of a prefill or, with several new tokens, of a decode step."""

    def time_best(count: int) -> float:
        times: list[float] = []
        for _ in range(1 + runs):
            prompts = build_prompts(groups, size, length, next(seeds))
            started = clock()
            generate(prompts, count)
            times.append(1e3 * (clock() - started))
        return min(times[1:])

    prefill = time_best(1)
    return prefill if new_tokens == 1 else (time_best(new_tokens) - prefill) / (new_tokens - 1)


def start_ramify(model: str) -> Generate:
    from ramify.infer.config import EngineConfig
    from ramify.infer.engine_core import EngineCore
    from ramify.infer.request import SamplingParams
    from ramify.model.load import load_engine_model
    from ramify.trace.version import PolicyVersion

    settings: Any = {"device": "cuda", "dtype": "bfloat16", "kv_memory_fraction": 0.7, "max_model_len": MAX_LENGTH}
    loaded = load_engine_model(Path(model), dtype="bfloat16", device="cuda")
    core = EngineCore(loaded, EngineConfig(**settings), PolicyVersion("bench"))

    def generate(prompts: Prompts, new_tokens: int) -> None:
        for seed, prompt in enumerate(prompts):
            core.enqueue(core.create_request(prompt, SamplingParams(max_tokens=new_tokens, seed=seed)))
        while core.has_unfinished_requests:
            core.step()

    return generate


def start_vllm(model: str) -> Generate:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in process it is faster
    from vllm import LLM, SamplingParams

    settings: Any = {"dtype": "bfloat16", "max_model_len": MAX_LENGTH, "gpu_memory_utilization": MEMORY_FRACTION}
    llm = LLM(model, **settings)

    def generate(prompts: Prompts, new_tokens: int) -> None:
        sampling: Any = SamplingParams(max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    return generate


if __name__ == "__main__":
    main()
