"""TRL's GRPOTrainer on reverse-text up to a reward, in an interpreter of its own; prints one JSON object.

    _trl_grpo.py SETTINGS_JSON

The settings come from `rl_cpu.Trl`: the tasks, the seed, when the process was started (Unix seconds) and after how many
seconds it stops. Settings that only cost time are off (gradient checkpointing, saving, reports, progress bars); the
whole batch is one forward and backward unless `micro` says less. A reward counts from the moment it is known, before
its step is trained. Sampling is plain: the whole distribution, until the model ends its turn.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import warnings
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from _reversing import similarity
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):
    """Says how long sampling and scoring took."""

    sampling = 0.0

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        started = time.time()
        try:
            return super()._generate_and_score_completions(*args, **kwargs)
        finally:
            self.sampling += time.time() - started


class Rewards(TrainerCallback):
    """The reward function, and the end of the run once the mean of the last steps is enough, or time is up."""

    __name__ = "similarity"

    def __init__(self, target: float, window: int, started: float, limit: float) -> None:
        self.target, self.window, self.started, self.limit = target, window, started, limit
        self.means: list[float] = []
        self.reached: float | None = None
        self.begun = 0.0

    def __call__(self, completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        found = [similarity(each[0]["content"], wanted) for each, wanted in zip(completions, answer)]
        self.means.append(sum(found) / len(found))
        last = self.means[-self.window :]
        passed = time.time() - self.started
        if self.reached is None and passed <= self.limit and sum(last) / self.window >= self.target:
            self.reached = passed
        return found

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begun = time.time() - self.started

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        over = self.reached is not None or time.time() - self.started > self.limit
        control.should_training_stop = control.should_training_stop or over


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    told: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(told["threads"])
    rewards = Rewards(told["target"], told["window"], told["started"], told["limit"])
    rows = [
        {
            "prompt": [{"role": "system", "content": told["system"]}, {"role": "user", "content": text}],
            "answer": text[::-1],
        }
        for text in told["texts"]
    ]
    micro = told["micro"] or told["batch_size"]
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            seed=told["seed"],
            max_steps=told["max_steps"],
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=told["batch_size"] // micro,
            num_generations=told["group_size"],
            max_completion_length=told["max_tokens"],
            temperature=told["temperature"],
            top_p=1.0,
            top_k=0,
            learning_rate=told["lr"],
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=told["warmup_steps"],
            adam_beta1=told["betas"][0],
            adam_beta2=told["betas"][1],
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = Timed(
            model=told["model"],
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(told["model"]),
            callbacks=[rewards],
        )
        trainer.train()
    looped = (rewards.reached or time.time() - told["started"]) - rewards.begun
    found = {
        "seconds": rewards.reached,
        "startup": rewards.begun,
        "sampling": trainer.sampling,
        "training": max(0.0, looped - trainer.sampling),
        "steps": len(rewards.means),
        "rewards": rewards.means,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
