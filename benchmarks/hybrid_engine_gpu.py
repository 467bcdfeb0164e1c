"""The engine with a hybrid model on a GPU, beside a dense model with as many parameters and the same vocabulary.

Both are random. The hybrid has the shape of Qwen3.5-0.8B, or with `--shape lfm2-1.2b` of LFM2-1.2B. A wave is 8 groups
of 16 requests with a common prompt of 368 tokens, and 256 new tokens each; a decode step is the mean between the first
token of the last request and the last token, the best of three waves. Prefill is the time in which unrelated prompts
get their first tokens, the best of three. The logprobs of the hybrid's samples are compared with the model's own code,
behind prompts of several chunks that are computed together, in graphs, and beside decoding requests. `--small` runs
small models of the same structure in seconds on a CPU.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _check import Row, finish, parser
from _sampler_gpu import build_prompts, run_wave
from transformers import AutoModelForCausalLM, Lfm2Config, Qwen3_5TextConfig, Qwen3Config

from ramify.infer.config import EngineConfig
from ramify.infer.engine_core import EngineCore
from ramify.infer.request import SamplingParams
from ramify.model.load import load_engine_model
from ramify.model.precision import disable_tf32_convolutions
from ramify.trace.version import PolicyVersion

WAVE, SMALL_WAVE = (8, 16, 368, 256), (2, 2, 20, 8)
PREFILLS, SMALL_PREFILLS = [(64, 368), (16, 2048)], [(2, 100)]  # prompts, and their tokens
ROUNDS, CHECKED_LENGTHS, CHECKED_REQUESTS = 3, (900, 500, 200), 4  # of each length
MAX_RATIO, MIN_REPLAYED, MAX_MEAN_DIFFERENCE, MAX_PREFILL_RATIO = 1.4, 0.95, 0.05, 1.6
LFM2_ATTENTION_LAYERS = {2, 5, 8, 10, 12, 14}
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


def build_qwen3_5_configs(small: bool) -> dict[str, Any]:
    """Return the configs of Qwen3.5-0.8B and of a dense model."""
    shared = build_shared_settings(small, vocab=248_320, hidden=1024)
    num_linear_heads = 2 if small else 16
    return {
        "hybrid": Qwen3_5TextConfig(
            **shared,
            linear_num_key_heads=num_linear_heads,
            linear_num_value_heads=num_linear_heads,
            intermediate_size=128 if small else 3584,
            num_hidden_layers=4 if small else 24,
            num_attention_heads=2 if small else 8,
            num_key_value_heads=1 if small else 2,
            head_dim=32 if small else 256,
            rope_parameters=ROPE,
        ),
        "dense": build_dense_config(shared, num_layers=4 if small else 32, inner=128 if small else 3072, small=small),
    }


def build_lfm2_configs(small: bool) -> dict[str, Any]:
    """Return the configs of LFM2-1.2B, ten convolutions and six layers with attention, and of a dense model."""
    shared = build_shared_settings(small, vocab=65_536, hidden=2048)
    layer_types = ["full_attention" if layer in LFM2_ATTENTION_LAYERS else "conv" for layer in range(16)]
    return {
        "hybrid": Lfm2Config(
            **shared,
            layer_types=layer_types[:4] if small else layer_types,
            intermediate_size=128 if small else 12_288,  # two thirds of it are used
            num_hidden_layers=4 if small else 16,
            num_attention_heads=2 if small else 32,
            num_key_value_heads=1 if small else 8,
        ),
        "dense": build_dense_config(shared, num_layers=4 if small else 18, inner=128 if small else 7168, small=small),
    }


def build_shared_settings(small: bool, *, vocab: int, hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": 40_000 if small else vocab,
        "hidden_size": 64 if small else hidden,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    }


def build_dense_config(shared: dict[str, Any], *, num_layers: int, inner: int, small: bool) -> Qwen3Config:
    return Qwen3Config(
        **shared,
        intermediate_size=inner,
        num_hidden_layers=num_layers,
        num_attention_heads=2 if small else 16,
        num_key_value_heads=1 if small else 8,
        head_dim=32 if small else 128,
    )


SHAPES = {"qwen3.5-0.8b": build_qwen3_5_configs, "lfm2-1.2b": build_lfm2_configs}


def build_core(config: Any, directory: Path, small: bool, **settings: Any) -> EngineCore:
    """Write a random model and return an engine for it."""
    device, dtype = ("cpu", "float32") if small else ("cuda", "bfloat16")
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    del model
    options: dict[str, Any] = {"device": device, "dtype": dtype, "max_running_requests": 128, **settings}
    options |= {"kv_cache_tokens": 8000 if small else 200_000, "max_num_batched_tokens": 8192}
    loaded = load_engine_model(directory, dtype=dtype, device=device)
    return EngineCore(loaded, EngineConfig(**options), PolicyVersion("bench"))


def measure_step(core: EngineCore, wave: tuple[int, int, int, int]) -> tuple[float, float]:
    """Return the milliseconds of a decode step, and the share of steps that were CUDA graphs."""
    run_wave(core, *wave, seed=0)  # compiles kernels and captures graphs
    steps, replayed = core.counters.steps, core.counters.replayed_steps
    best = min(run_wave(core, *wave, seed=seed)[0] for seed in range(1, 1 + ROUNDS))
    return best, (core.counters.replayed_steps - replayed) / (core.counters.steps - steps)


def measure_prefill(core: EngineCore, num_prompts: int, length: int) -> float:
    """Return the milliseconds until all of `num_prompts` prompts have their first token."""
    times: list[float] = []
    for seed in range(1 + ROUNDS):  # the first compiles kernels
        prompts = build_prompts(num_prompts, 1, length, 1000 * length + seed)
        requests = [core.create_request(prompt, SamplingParams(max_tokens=1, seed=0)) for prompt in prompts]
        started = time.perf_counter()
        for request in requests:
            core.enqueue(request)
        while core.has_unfinished_requests:
            core.step()
        times.append(1e3 * (time.perf_counter() - started))
    return min(times[1:])


def measure_all(
    name: str, core: EngineCore, wave: tuple[int, int, int, int], prefills: Sequence[tuple[int, int]]
) -> tuple[float, float, list[float]]:
    """Return the milliseconds of a decode step, its share of CUDA graphs, and the milliseconds of each prefill."""
    step, replayed = measure_step(core, wave)
    times = [measure_prefill(core, *prompts) for prompts in prefills]
    print(f"{name}: a decode step {step:.4g} ms, prefills {', '.join(f'{time:.4g}' for time in times)} ms", flush=True)
    return step, replayed, times


@torch.no_grad()
def measure_difference(core: EngineCore) -> float:
    """Return the mean difference of the samples' logprobs from the model's own code.

    The first prompts share a step, which is too long for a graph. Every other prompt comes while others decode; lengths
    repeat, so that graphs are captured and replayed.
    """
    prompts = [
        [300 + (7919 * position + 101 * number) % 30_000 for position in range(length)]
        for length in CHECKED_LENGTHS
        for number in range(CHECKED_REQUESTS)
    ]
    requests = [
        core.create_request(prompt, SamplingParams(max_tokens=40, seed=index)) for index, prompt in enumerate(prompts)
    ]
    for index, request in enumerate(requests):
        core.enqueue(request)
        if index + 1 >= CHECKED_REQUESTS:
            core.step()
    while core.has_unfinished_requests:
        core.step()
    module, differences = core.model.module, list[torch.Tensor]()
    module.set_attn_implementation("sdpa")
    for request in requests:
        ids, start = torch.tensor(request.token_ids, device=core.model.device), len(request.prompt_token_ids)
        scores = module(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1].float().log_softmax(-1)
        logprobs = scores.gather(1, ids[start:, None]).squeeze(1)
        differences.append((logprobs - torch.tensor(request.logprobs, device=ids.device)).abs())
    return torch.cat(differences).mean().item()


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--small", action="store_true", help="small models on a CPU, without targets")
    flags.add_argument("--shape", choices=SHAPES, default="qwen3.5-0.8b", help="whose sizes the hybrid has")
    options = flags.parse_args()
    small, wave = options.small, SMALL_WAVE if options.small else WAVE
    prefills = SMALL_PREFILLS if small else PREFILLS
    disable_tf32_convolutions()
    with tempfile.TemporaryDirectory() as scratch:
        configs = SHAPES[options.shape](small)
        core = build_core(configs["dense"], Path(scratch) / "dense", small)
        dense, _, dense_prefills = measure_all("dense", core, wave, prefills)
        core = build_core(configs["hybrid"], Path(scratch) / "hybrid", small)
        hybrid, replayed, hybrid_prefills = measure_all("hybrid", core, wave, prefills)
        difference = measure_difference(core)
    rows = [
        Row("a decode step of the hybrid", hybrid, None, "ms"),
        Row("  of the dense model", dense, None, "ms"),
        Row("  hybrid over dense", hybrid / dense, None, "x", None if small else MAX_RATIO),
        Row("  steps in graphs", replayed, None, "of 1", None if small else MIN_REPLAYED, at_least=True),
    ]
    for (count, length), milliseconds, dense_milliseconds in zip(prefills, hybrid_prefills, dense_prefills):
        ratio = milliseconds / dense_milliseconds
        rows += [
            Row(f"prefill of {count} x {length} tokens by the hybrid", milliseconds, None, "ms"),
            Row("  by the dense model", dense_milliseconds, None, "ms"),
            Row("  hybrid over dense", ratio, None, "x", None if small else MAX_PREFILL_RATIO),
        ]
    rows += [
        Row("logprobs, mean difference from the model's own code", difference, None, "nats", MAX_MEAN_DIFFERENCE),
    ]
    return finish(f"the engine with a hybrid model of the shape {options.shape}", rows, options)


if __name__ == "__main__":
    raise SystemExit(main())
