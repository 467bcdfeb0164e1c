"""Generation with transformers alone, measured in a process of its own; prints one JSON object.

    _transformers.py MODEL_DIR DTYPE THREADS DEVICE

Standard input is a JSON list of [prompts, new_tokens]; each is measured with static-batch `generate` and, on a CPU,
with transformers' own continuous batching (once: it claims its cache anew each time), with sampling at temperature 1,
on the prompts the server gets.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

import torch
from _check import median
from transformers import AutoModelForCausalLM, GenerationConfig


def static(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Tokens per second of one padded-free batch: all prompts have one length."""
    ids = torch.tensor(prompts, device=model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
    return (found.shape[1] - ids.shape[1]) * len(prompts) / (time.perf_counter() - started)


def continuous(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    config = GenerationConfig(
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=True, eos_token_id=-1, pad_token_id=0
    )
    started = time.perf_counter()
    found = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    tokens = sum(len(output.generated_tokens) for output in found.values())
    return tokens / (time.perf_counter() - started)


def main() -> None:
    warnings.simplefilter("ignore")
    directory, dtype, threads, device = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(device).eval()
    rows: list[dict[str, float | None]] = []
    for prompts, new_tokens in json.load(sys.stdin):
        static(model, prompts, 4)
        row: dict[str, float | None] = {"static": median(lambda p=prompts, n=new_tokens: static(model, p, n))}
        rows.append(row)
        if device != "cpu":
            continue
        try:
            row["continuous"] = continuous(model, prompts, new_tokens)
        except Exception as error:  # noqa: BLE001 - a competitor that fails is a missing number, told on stderr
            print(f"continuous batching failed: {type(error).__name__}: {error}", file=sys.stderr)
            row["continuous"] = None
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
