"""Optimizers and schedules.

An optimizer here is one or two of torch's, stepped together: AdamW for everything, or Muon for the matrices inside the
layers (an update is the direction of a matrix, orthogonalised by Newton–Schulz, scaled to what AdamW's would be) and
AdamW for embeddings, head, norms and biases. AdamW of bfloat16 on one GPU is ours (`ramify.train.fused_adamw`):
it clips and rounds on the way. The schedule is a pure function of the step.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ramify.train.config import OptimConfig, ScheduleConfig
from ramify.train.master_weights import MasterWeights

NON_HIDDEN_NAMES = ("embed", "lm_head", "wte", "wpe")  # parts of the names of matrices that are not hidden ones


class OptimizersContainer:
    """The optimizers of `masters` as one, with the schedule. `fused`: it reads the gradients that they hold as they
    are, clips them and rounds the new weights into the model, which is otherwise the caller's to do."""

    def __init__(self, master_weights: MasterWeights, config: OptimConfig, total_steps: int | None) -> None:
        self.config, self.total_steps = config, total_steps
        self.fused = master_weights.supports_fused_adamw and config.type == "adamw"
        named = list(master_weights.named_parameters())
        hidden = [value for name, value in named if config.type == "muon" and is_hidden_matrix(name, value)]
        chosen = {id(value) for value in hidden}
        others = [value for _, value in named if id(value) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = []
        if hidden:
            self.optimizers.append(
                torch.optim.Muon(
                    hidden,
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    momentum=config.momentum,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        groups = [
            {"params": [value for value in others if value.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [value for value in others if value.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
        if groups and self.fused:
            from ramify.train.fused_adamw import FusedAdamW  # needs Triton, which only a torch for CUDA brings

            self.optimizers.append(FusedAdamW(groups, master_weights, **settings))
        elif groups:
            self.optimizers.append(torch.optim.AdamW(groups, **settings))

    def step(self, step: int, grad_norm: Tensor) -> float:
        """Update the weights as step number `step`, from 0; returns the learning rate. A gradient whose norm is not
        finite changes nothing, and AdamW finds that out on the device: the host need not wait for the norm."""
        rate = self.config.lr * compute_lr_factor(self.config.schedule, step, self.total_steps)
        broken = (~grad_norm.isfinite()).float()
        for part in self.optimizers:
            for group in part.param_groups:
                group["lr"] = rate
            if isinstance(part, torch.optim.AdamW):
                setattr(part, "found_inf", broken)  # noqa: B010 - of no declared type
                if self.fused:
                    over = (grad_norm + 1e-6) / (self.config.max_norm or math.inf)
                    setattr(part, "grad_scale", over.clamp(min=1.0))  # noqa: B010
            elif broken:
                continue
            part.step()
        return rate

    def state_dict(self) -> dict[str, Any]:
        return {type(part).__name__: part.state_dict() for part in self.optimizers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.optimizers:
            part.load_state_dict(state[type(part).__name__])


def is_hidden_matrix(name: str, value: nn.Parameter) -> bool:
    """Whether a parameter is a matrix inside the layers."""
    return value.ndim == 2 and not any(end in name for end in NON_HIDDEN_NAMES)


def compute_lr_factor(schedule: ScheduleConfig, step: int, total_steps: int | None) -> float:
    """The share of the learning rate at `step`, from 0, of `steps` in all."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.type == "constant":
        return 1.0
    if total_steps is None:
        raise ValueError(f"the {schedule.type} schedule needs to know the number of steps")
    after = max(1, total_steps - schedule.warmup_steps)
    length = schedule.decay_steps or (max(1, total_steps // 5) if schedule.type == "wsd" else after)
    begin = total_steps - length if schedule.type == "wsd" else schedule.warmup_steps
    done = min(1.0, max(0.0, (step - begin) / length))
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule.type == "cosine" else 1.0 - done
    return schedule.floor + (1 - schedule.floor) * left
