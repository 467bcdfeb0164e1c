"""Words that users know from other trainers and tools, and what to write instead.

One place for all such hints: an unknown key, a file without `@`, an unknown command or loss is looked up here before a
similar name is suggested. A test checks that every key exists.
"""

from collections.abc import Mapping
from functools import reduce
from pathlib import PurePath

from ramify.core.config.schema import child_options, parse_key

WANDB_SINK = 'monitor.sinks = [{ type = "wandb", project = "NAME" }]'
DATA_HINT = "data is '-d {}' for `ramify sft`, and 'dataset --taskset.path {}' for `ramify rl` and `ramify eval`"

KEY_HINTS: Mapping[str, tuple[str, ...]] = {  # the first key that the command's configuration has
    "adam_beta1": ("trainer.optim.betas",),
    "adam_beta2": ("trainer.optim.betas",),
    "adam_epsilon": ("trainer.optim.eps",),
    "assistant_only_loss": ("data.train_on_roles",),
    "bf16": ("trainer.dtype",),
    "dataset": ("train.0.taskset", "data.path"),
    "dataset_name": ("train.0.taskset", "data.path"),
    "epsilon": ("trainer.loss.options",),
    "epsilon_high": ("trainer.loss.options",),
    "eval_dataset": ("eval.0.taskset", "validation.path"),
    "eval_steps": ("eval.0.interval", "validation.interval"),
    "fp16": ("trainer.dtype",),
    "gradient_accumulation_steps": ("orchestrator.batch_size", "batch_size"),
    "gradient_checkpointing": ("trainer.activation_checkpointing",),
    "kl_coef": ("train.0.algorithm.beta",),
    "learning_rate": ("trainer.optim.lr",),
    "lora_alpha": ("trainer.lora.alpha",),
    "lora_r": ("trainer.lora.rank",),
    "lora_rank": ("trainer.lora.rank",),
    "lora_target_modules": ("trainer.lora.target_modules",),
    "loss_type": ("trainer.loss.id",),
    "lr_scheduler_type": ("trainer.optim.schedule.type",),
    "max_completion_length": ("train.0.sampling.max_tokens",),
    "max_length": ("seq_len",),
    "max_new_tokens": ("train.0.sampling.max_tokens", "sampling.max_tokens"),
    "max_prompt_length": ("seq_len",),
    "max_seq_length": ("seq_len",),
    "model_name": ("model.name",),
    "model_name_or_path": ("model.name",),
    "num_generations": ("orchestrator.group_size",),
    "num_gpus": ("launch.trainer_gpus",),
    "num_iterations": ("orchestrator.max_staleness",),
    "num_train_epochs": ("epochs", "max_steps"),
    "output_dir": ("output",),
    "peft_config": ("trainer.lora.rank",),
    "per_device_train_batch_size": ("orchestrator.batch_size", "batch_size"),
    "report_to": (WANDB_SINK,),
    "reward_funcs": ("train.0.taskset",),
    "rollout_batch_size": ("orchestrator.batch_size",),
    "run_name": ("name",),
    "save_steps": ("checkpoint.interval",),
    "save_total_limit": ("checkpoint.keep_last",),
    "scale_rewards": ("train.0.algorithm.normalize",),
    "steps_per_generation": ("orchestrator.max_staleness",),
    "tensor_parallel_size": ("inference.tensor_parallel",),
    "torch_dtype": ("trainer.dtype",),
    "train_batch_size": ("orchestrator.batch_size", "batch_size"),
    "train_dataset": ("train.0.taskset", "data.path"),
    "use_peft": ("trainer.lora.rank",),
    "use_vllm": ("inference.engine",),
    "vllm_gpu_memory_utilization": ("inference.gpu_memory_utilization",),
    "vllm_mode": ("launch.gpu_placement",),
    "wandb": (WANDB_SINK,),
    "wandb_project": (WANDB_SINK,),
    "warmup_ratio": ("trainer.optim.schedule.warmup_steps",),
}
FILE_HINTS: Mapping[str, str] = {  # by suffix
    ".toml": "a configuration file is '@ {}'",
    **dict.fromkeys((".csv", ".json", ".jsonl", ".parquet", ".arrow"), DATA_HINT),
}
COMMAND_HINTS: Mapping[str, str] = {
    "train": "'ramify rl' trains with reinforcement learning, 'ramify sft' on conversations",
    "grpo": "'ramify rl' trains with GRPO by default",
    "finetune": "'ramify sft' trains on conversations",
    "resume": "run the same 'ramify rl' command again to resume",
    "status": "'ramify why' shows what a run is doing",
    "logs": "'ramify why' shows what a run is doing",
    "dashboard": "'ramify view' shows runs on a page",
    "download": "'ramify model fetch' downloads a model",
    "generate": "'ramify serve' answers requests, 'ramify eval' samples rollouts",
}
ALGORITHM_HINT = "it is an algorithm, which computes advantages: set train.0.algorithm.id; the losses are {}"
LOSS_HINTS: Mapping[str, str] = {
    **dict.fromkeys(("grpo", "dr_grpo", "rloo", "reinforce"), ALGORITHM_HINT),
    "dapo": "set trainer.loss.id = 'ppo' with options = { high = 0.28 }; the losses are {}",
    "ce": "cross entropy is trained by `ramify sft`, or by the algorithm 'sft'; the losses are {}",
    "kl": "a KL penalty is train.0.algorithm.beta; the losses are {}",
}


def find_key_hint(cls: type, name: str) -> str | None:
    """Return the key of the configuration `cls` that users of other trainers call `name`; None if there is none."""
    for hint in KEY_HINTS.get(name, ()):
        if reduce(child_options, parse_key(hint.partition(" = ")[0]), [cls]):
            return hint
    return None


def find_file_hint(word: str) -> str | None:
    """Return how to write an argument that is a file of configuration or data; None for any other word."""
    hint = FILE_HINTS.get(PurePath(word).suffix)
    return hint and hint.replace("{}", word)
