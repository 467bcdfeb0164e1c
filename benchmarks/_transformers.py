"""Generation with transformers in a process of its own, one measurement for each line of input.

    _transformers.py MODEL_DIR DTYPE THREADS DEVICE

A line of standard input is ["static" or "continuous", prompts, new_tokens]: static-batch `generate`, or transformers'
own continuous batching, with sampling at temperature 1. The output is a line with tokens per second, or null if
generation failed.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def static(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Return the tokens per second of one batch without padding: all prompts have one length."""
    ids = torch.tensor(prompts, device=model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
    return (output.shape[1] - ids.shape[1]) * len(prompts) / (time.perf_counter() - started)


def continuous(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Return the tokens per second of continuous batching."""
    config = GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=True, eos_token_id=-1, pad_token_id=0
    )
    started = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    tokens = sum(len(output.generated_tokens) for output in outputs.values())
    return tokens / (time.perf_counter() - started)


def main() -> None:
    warnings.simplefilter("ignore")
    directory, dtype, threads, device = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device).eval()
    for line in sys.stdin:
        kind, prompts, new_tokens = json.loads(line)
        speed: float | None = None
        try:
            speed = (static if kind == "static" else continuous)(model, prompts, new_tokens)
        except Exception as error:  # noqa: BLE001 - a failure is a missing number, reported on stderr
            print(f"{kind} generation failed: {type(error).__name__}: {error}", file=sys.stderr)
        print(json.dumps(speed), flush=True)


if __name__ == "__main__":
    main()
