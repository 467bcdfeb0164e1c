"""Prefill on one GPU, in an interpreter of its own: milliseconds until unrelated prompts have their first token.

    _prefill_gpu.py ramify|vllm MODEL_DIR [WAVE ...]

All prompts of a wave are submitted at once, in process, and each samples one token. Every wave runs once to warm up and
then several times with new prompts; the best time counts. Prints one JSON object: wave -> milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAVES = {
    "128 x 368": (128, 368, 3),
    "128 x 2,048": (128, 2048, 3),
    "16 x 32k": (16, 32_768, 2),
}  # prompts, tokens, runs
VOCABULARY = 30_000
MAX_LENGTH = 33_024
MEMORY_FRACTION = 0.85

Prompts = list[list[int]]


def main() -> None:
    kind, model, *waves = sys.argv[1:]
    prefill = {"ramify": start_ramify, "vllm": start_vllm}[kind](model)
    print(json.dumps({wave: measure(prefill, *WAVES[wave]) for wave in waves or WAVES}))


def measure(prefill: Callable[[Prompts], None], count: int, length: int, runs: int) -> float:
    """Return the milliseconds of the best run."""
    rng = random.Random(length)
    times: list[float] = []
    for _ in range(1 + runs):
        prompts = [[rng.randrange(300, VOCABULARY) for _ in range(length)] for _ in range(count)]
        started = time.perf_counter()
        prefill(prompts)
        times.append(1e3 * (time.perf_counter() - started))
    return min(times[1:])


def start_ramify(model: str) -> Callable[[Prompts], None]:
    from ramify.infer.config import EngineConfig
    from ramify.infer.engine_core import EngineCore
    from ramify.infer.request import SamplingParams
    from ramify.model.load import load_engine_model
    from ramify.trace.version import PolicyVersion

    settings: Any = {"device": "cuda", "dtype": "bfloat16", "kv_memory_fraction": 0.7, "max_model_len": MAX_LENGTH}
    loaded = load_engine_model(Path(model), dtype="bfloat16", device="cuda")
    core = EngineCore(loaded, EngineConfig(**settings), PolicyVersion("bench"))

    def prefill(prompts: Prompts) -> None:
        for seed, prompt in enumerate(prompts):
            core.enqueue(core.create_request(prompt, SamplingParams(max_tokens=1, seed=seed)))
        while core.has_unfinished_requests:
            core.step()

    return prefill


def start_vllm(model: str) -> Callable[[Prompts], None]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in process it is faster
    from vllm import LLM, SamplingParams

    settings: Any = {"dtype": "bfloat16", "max_model_len": MAX_LENGTH, "gpu_memory_utilization": MEMORY_FRACTION}
    llm = LLM(model, **settings)
    sampling: Any = SamplingParams(max_tokens=1, detokenize=False)

    def prefill(prompts: Prompts) -> None:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    return prefill


if __name__ == "__main__":
    main()
