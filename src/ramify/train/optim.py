"""Optimizers and schedules.

An optimizer here is one or two of torch's, stepped together: AdamW for everything, or Muon for the matrices inside the
layers (an update is the direction of a matrix, orthogonalised by Newton–Schulz, scaled to what AdamW's would be) and
AdamW for embeddings, head, norms and biases. AdamW of bfloat16 on one GPU is ours (`ramify.train.adamw`): it clips and
rounds on the way. The schedule is a pure function of the step.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ramify.train.config import OptimConfig, ScheduleConfig
from ramify.train.masters import Masters

ENDS = ("embed", "lm_head", "wte", "wpe")  # parts of the names of matrices that are not hidden ones


class Optimizer:
    """The optimizers of `masters` as one, with the schedule. `fused`: it reads the gradients that they hold as they
    are, clips them and rounds the new weights into the model, which is otherwise the caller's to do."""

    def __init__(self, masters: Masters, config: OptimConfig, steps: int | None) -> None:
        self.config, self.steps = config, steps
        self.fused = masters.fusable and config.type == "adamw"
        named = list(masters.named())
        hidden = [value for name, value in named if config.type == "muon" and is_hidden(name, value)]
        chosen = {id(value) for value in hidden}
        others = [value for _, value in named if id(value) not in chosen]
        self.parts: list[torch.optim.Optimizer] = []
        if hidden:
            self.parts.append(
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
            from ramify.train.adamw import AdamW  # needs Triton, which only a torch for CUDA brings

            self.parts.append(AdamW(groups, masters, **settings))
        elif groups:
            self.parts.append(torch.optim.AdamW(groups, **settings))

    def step(self, step: int, norm: Tensor) -> float:
        """Update the weights as step number `step`, from 0; returns the learning rate. A gradient whose norm is not
        finite changes nothing, and AdamW finds that out on the device: the host need not wait for the norm."""
        rate = self.config.lr * share(self.config.schedule, step, self.steps)
        broken = (~norm.isfinite()).float()
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            if isinstance(part, torch.optim.AdamW):
                setattr(part, "found_inf", broken)  # noqa: B010 - of no declared type
                if self.fused:
                    over = (norm + 1e-6) / (self.config.max_norm or math.inf)
                    setattr(part, "grad_scale", over.clamp(min=1.0))  # noqa: B010
            elif broken:
                continue
            part.step()
        return rate

    def state_dict(self) -> dict[str, Any]:
        return {type(part).__name__: part.state_dict() for part in self.parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            part.load_state_dict(state[type(part).__name__])


def is_hidden(name: str, value: nn.Parameter) -> bool:
    """Whether a parameter is a matrix inside the layers."""
    return value.ndim == 2 and not any(end in name for end in ENDS)


def share(schedule: ScheduleConfig, step: int, steps: int | None) -> float:
    """The share of the learning rate at `step`, from 0, of `steps` in all."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.type == "constant":
        return 1.0
    if steps is None:
        raise ValueError(f"the {schedule.type} schedule needs to know the number of steps")
    after = max(1, steps - schedule.warmup_steps)
    length = schedule.decay_steps or (max(1, steps // 5) if schedule.type == "wsd" else after)
    begin = steps - length if schedule.type == "wsd" else schedule.warmup_steps
    done = min(1.0, max(0.0, (step - begin) / length))
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule.type == "cosine" else 1.0 - done
    return schedule.floor + (1 - schedule.floor) * left
