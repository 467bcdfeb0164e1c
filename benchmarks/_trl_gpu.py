"""TRL on one GPU, in an interpreter of its own: seconds of a GRPO step, or tokens a second of SFT.

    _trl_gpu.py grpo MODEL_DIR MICRO_BATCH     8 groups of 16, prompts of 368 tokens, 256 new tokens; vLLM if it is here
    _trl_gpu.py sft MODEL_DIR MICRO_BATCH      64 conversations of 1,024 tokens a step

Prints one JSON object. Settings that only cost time are off: checkpointing of activations, saving, reports, progress.
Timed are the steps after the first two. A micro-batch that does not fit into memory ends with TRL's error.
"""

from __future__ import annotations

import json
import logging
import os
import random
import string
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import datasets.fingerprint
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

HAS_VLLM = find_spec("vllm") is not None
VLLM_ENV = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
VLLM_ENV |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # in process it is faster
WARM_STEPS, STEPS, TOKENS = 2, 5, 65_536
PROMPT_CHARS, SEQ_LEN = 336, 1024


class StepTimes(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())
        print(f"step {len(self.ends)} ended at {self.ends[-1]:.1f} s", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        """The mean of the steps after the first ones."""
        return (self.ends[-1] - self.ends[WARM_STEPS - 1]) / (len(self.ends) - WARM_STEPS)


def shared_settings(output: str, micro_batch: int, batch: int) -> dict[str, Any]:
    return {
        "output_dir": output,
        "max_steps": STEPS,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": batch // micro_batch,
        "learning_rate": 1e-5,
        "bf16": True,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "sdpa"},
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
    }


def time_grpo(model: str, micro_batch: int, output: str) -> dict[str, float]:
    rows = [{"prompt": f"{n:08} ".ljust(PROMPT_CHARS, "abcdefg "[n % 8])} for n in range(256)]
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    config = GRPOConfig(
        **shared_settings(output, micro_batch, 128),
        num_generations=16,
        max_completion_length=256,
        temperature=1.0,
        top_k=0,
        beta=0.0,
        **({"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.25} if HAS_VLLM else {}),
    )
    times = StepTimes()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(len(item[0]["content"]) % 2) for item in completions],
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[times],
    )
    trainer.train()
    return {"step_s": times.seconds}


def time_sft(model: str, micro_batch: int, output: str) -> dict[str, float]:
    rng = random.Random(0)
    rows = [{"text": "".join(rng.choices(string.ascii_letters, k=SEQ_LEN))} for _ in range(64 * STEPS)]
    config = SFTConfig(**shared_settings(output, micro_batch, 64), max_length=SEQ_LEN, packing=False)
    times = StepTimes()
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[times],
    )
    trainer.train()
    return {"step_s": times.seconds, "tokens_per_s": TOKENS / times.seconds}


def main() -> None:
    if HAS_VLLM:
        os.environ.update(VLLM_ENV)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    datasets.fingerprint.Hasher.hash = classmethod(lambda _, value: uuid4().hex)  # its own fails where pyarrow differs
    kind, model, micro_batch = sys.argv[1:]
    with tempfile.TemporaryDirectory() as output:
        run = time_grpo if kind == "grpo" else time_sft
        print(json.dumps({"micro_batch": int(micro_batch), "vllm": HAS_VLLM, **run(model, int(micro_batch), output)}))


if __name__ == "__main__":
    main()
