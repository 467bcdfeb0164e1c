"""Optimizers and learning rate schedules.

`adamw` is AdamW for everything. `muon` is Muon for the matrices inside the layers (the update is the orthogonalized
momentum, scaled to the size of AdamW's) and AdamW for embeddings, head, norms and biases. In bfloat16 on one GPU AdamW
is `fused_adamw`, which also clips and rounds. The schedule is a pure function of the step.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ramify.train.config import OptimConfig, ScheduleConfig
from ramify.train.master_weights import MasterWeights
from ramify.train.quantized_moments import QuantizedAdamW, is_inside_layers


class OptimizersContainer:
    """The torch optimizers of all weights, which step together, and their schedule.

    If `fused`, `step` also clips the gradients; otherwise the caller does. `total_steps` is the length of the run,
    which all schedules but `constant` need.
    """

    def __init__(self, master_weights: MasterWeights, config: OptimConfig, total_steps: int | None) -> None:
        self.master_weights, self.config, self.total_steps = master_weights, config, total_steps
        self.fused = master_weights.supports_fused_adamw and config.type == "adamw"
        self.optimizers: list[torch.optim.Optimizer] = []
        parameters = dict(master_weights.named_parameters())
        quantized = config.moments == "8bit"
        if (master_weights.is_split or quantized) and not self.fused:
            for name, parameter in parameters.items():  # one by one, so that only one is converted to float32
                self._add_optimizers({name: parameter})
        else:
            self._add_optimizers(parameters)

    def _add_optimizers(self, parameters: dict[str, nn.Parameter]) -> None:
        """Add the optimizers of some parameters: Muon for those inside the layers if it is used, AdamW for the rest."""
        config = self.config
        hidden = [item for name, item in parameters.items() if config.type == "muon" and is_hidden_matrix(name, item)]
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
        others = [item for item in parameters.values() if all(item is not matrix for matrix in hidden)]
        if not others:
            return
        groups = [
            {"params": [item for item in others if item.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [item for item in others if item.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": True}
        quantized = [
            item for name, item in parameters.items() if config.moments == "8bit" and is_inside_layers(name, item)
        ]
        if self.fused:
            from ramify.train.fused_adamw import FusedAdamW  # needs Triton, which only a torch for CUDA brings

            self.optimizers.append(FusedAdamW(groups, self.master_weights, quantized, **settings))
        else:
            self.optimizers.append((QuantizedAdamW if quantized else torch.optim.AdamW)(groups, **settings))

    def step(self, step: int, grad_norm: Tensor) -> float:
        """Update the weights in step `step`, counted from 0; returns the learning rate.

        If `grad_norm` is not finite, nothing changes. AdamW checks that on the device, so the host need not wait.
        """
        lr = self.config.lr * compute_lr_factor(self.config.schedule, step, self.total_steps)
        found_inf = (~grad_norm.isfinite()).float()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            if isinstance(optimizer, torch.optim.AdamW) or not found_inf:
                self._step(optimizer, grad_norm, found_inf)
        return lr

    def try_update(self, grad_norm: Tensor) -> None:
        """Run an update that changes no weight, with the allocations and kernels of a real one.

        Call it inside `fresh_state`, which restores the moments.
        """
        for optimizer in self.optimizers:
            self._step(optimizer, grad_norm, torch.ones_like(grad_norm), keep=isinstance(optimizer, torch.optim.AdamW))

    def _step(self, optimizer: torch.optim.Optimizer, grad_norm: Tensor, found_inf: Tensor, keep: bool = True) -> None:
        """Step one optimizer. AdamW changes nothing if `found_inf` is 1; Muon's changes of weights can be dropped."""
        if isinstance(optimizer, torch.optim.AdamW):
            setattr(optimizer, "found_inf", found_inf)  # noqa: B010 - torch does not declare it
        if self.fused:
            clip_divisor = (grad_norm + 1e-6) / (self.config.max_grad_norm or math.inf)
            setattr(optimizer, "grad_scale", clip_divisor.clamp(min=1.0))  # noqa: B010
            optimizer.step()
            return
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        with self.master_weights.joined(parameters, keep=keep):
            optimizer.step()

    @contextmanager
    def fresh_state(self) -> Iterator[None]:
        """Run the block with optimizers that have no moments yet; afterwards they have their former ones again."""
        states = [dict(optimizer.state) for optimizer in self.optimizers]
        try:
            for optimizer in self.optimizers:
                optimizer.state.clear()
            yield
        finally:
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.state.clear()
                optimizer.state.update(state)


def is_hidden_matrix(name: str, value: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix inside the layers."""
    return value.ndim == 2 and is_inside_layers(name, value)


def compute_lr_factor(schedule: ScheduleConfig, step: int, total_steps: int | None) -> float:
    """Return the learning rate in step `step`, counted from 0, as a fraction of the maximum."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.type == "constant":
        return 1.0
    if total_steps is None:
        raise ValueError(f"the {schedule.type} schedule needs the total number of steps")
    is_wsd = schedule.type == "wsd"
    default_decay = max(1, total_steps // 5 if is_wsd else total_steps - schedule.warmup_steps)
    decay_steps = schedule.decay_steps or default_decay
    decay_start = total_steps - decay_steps if is_wsd else schedule.warmup_steps
    progress = min(1.0, max(0.0, (step - decay_start) / decay_steps))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.type == "cosine" else 1.0 - progress
    return schedule.min_lr_factor + (1 - schedule.min_lr_factor) * remaining
