"""One training step of TRL's GRPO on given samples, measured in an interpreter of its own; prints one JSON object.

    _trl.py MODEL_DIR THREADS COUNT PROMPT_LOW PROMPT_HIGH REPLY_LOW REPLY_HIGH VOCABULARY

Timed is `GRPOTrainer._compute_loss` on padded micro-batches, backward, clipping and AdamW; sampling is left out.
The fastest of several micro-batch sizes counts.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
from _check import median
from _samples import LOGPROB, Example, examples, micro_batches
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SIZES = (4, 8, 16)


def inputs(made: list[Example], tokens: int) -> dict[str, Any]:
    """Prompts padded on the left, replies on the right, as TRL has them."""
    left, right = max(len(each.prompt) for each in made), max(len(each.reply) for each in made)
    shape = {"prompt": (len(made), left), "completion": (len(made), right)}
    found = {
        f"{name}_{kind}": torch.zeros(size, dtype=torch.long)
        for name, size in shape.items()
        for kind in ("ids", "mask")
    }
    for row, each in enumerate(made):
        found["prompt_ids"][row, left - len(each.prompt) :] = torch.tensor(each.prompt)
        found["prompt_mask"][row, left - len(each.prompt) :] = 1
        found["completion_ids"][row, : len(each.reply)] = torch.tensor(each.reply)
        found["completion_mask"][row, : len(each.reply)] = 1
    return {
        **found,
        "advantages": torch.tensor([each.advantage for each in made]),
        "old_per_token_logps": torch.full((len(made), right), LOGPROB),
        "num_items_in_batch": torch.tensor(tokens),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    directory, threads, *numbers = sys.argv[1:]
    count, low, high, reply_low, reply_high, vocabulary = map(int, numbers)
    torch.set_num_threads(int(threads))
    made = examples(count, (low, high), (reply_low, reply_high), vocabulary)
    tokens = sum(len(each.reply) for each in made)
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            loss_type="dapo",
            report_to=[],
            per_device_train_batch_size=8,
            num_generations=8,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            model=directory,
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
            processing_class=AutoTokenizer.from_pretrained(directory),
        )
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        optimizer = trainer.create_optimizer()

        def step(size: int) -> float:
            started = time.perf_counter()
            optimizer.zero_grad()
            for part in micro_batches(made, size):
                trainer._compute_loss(trainer.model, inputs(part, tokens)).backward()
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            optimizer.step()
            return time.perf_counter() - started

        found: dict[str, float] = {}
        for size in SIZES:
            step(size)
            found[str(size)] = median(lambda size=size: step(size))
    print(json.dumps({"seconds": min(found.values()), "sizes": found}))


if __name__ == "__main__":
    main()
