"""One optimizer step: packs in, new weights and metrics out.

A batch brings its packs and N_c, the entries each component has in the whole batch. Gradients of packs are summed, so
the result does not depend on how the batch was cut, nor on how many ranks share the packs.
"""

import math
import time
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from ramify.trace import Forest
from ramify.train.batches import Batch
from ramify.train.config import TrainerConfig
from ramify.train.flops import Cost, peak
from ramify.train.masters import Masters
from ramify.train.metrics import StepMetrics, Sums, Tally
from ramify.train.optim import Optimizer
from ramify.train.policy import Policy
from ramify.train.rows import Row, bucket, row_of


class Trainer:
    """A policy, its master weights and its optimizer; `gather` adds up the sums of all ranks."""

    def __init__(
        self,
        policy: Policy,
        config: TrainerConfig,
        *,
        steps: int | None = None,
        dtype: torch.dtype = torch.float32,
        gather: Callable[[Sums], Sums] = lambda sums: sums,
    ) -> None:
        self.policy, self.config, self.gather = policy, config, gather
        self.masters = Masters(policy, dtype)
        self.optimizer = Optimizer(self.masters.named(), config.optim, steps)
        self.device = next(policy.parameters()).device
        self.cost = Cost.of(policy.model)
        self.peak = peak(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None

    def step(self, batch: Batch) -> StepMetrics:
        """Forward and backward over the packs, then one update."""
        started = time.perf_counter()
        tally = Tally(batch.step)
        for pack in batch.packs:
            row = self.row(pack)
            seen = self.policy(row, batch.counts)
            seen.loss.backward()
            self.masters.collect()
            tally.add(row, seen, self.cost.flops(pack))
        norm, rate, skipped = self.update(batch.step)
        sums = self.gather(tally.sums())
        return StepMetrics(
            step=batch.step,
            loss=sum(sums.terms.values()),
            grad_norm=norm,
            lr=rate,
            skipped=skipped,
            seconds=time.perf_counter() - started,
            peak_flops=self.peak,
            sums=sums,
        )

    def row(self, pack: Forest) -> Row:
        """A pack as this trainer's model reads it; rows of a GPU have one of few lengths."""
        length = bucket(len(pack), self.config.pack_tokens) if self.device.type == "cuda" else None
        policy = self.policy
        return row_of(pack, layout=policy.layout, device=self.device, windows=policy.windows, length=length)

    def update(self, step: int) -> tuple[float, float, bool]:
        """Clip, step, sync and drop the gradients, all before the first wait for the device: the gradient's norm, the
        learning rate, and whether the step was skipped."""
        limit = self.config.optim.max_norm
        found = torch.nn.utils.clip_grad_norm_(self.masters.parameters(), limit or float("inf"))
        found = found.full_tensor() if isinstance(found, DTensor) else found
        rate = self.optimizer.step(step, found)
        self.masters.sync()
        self.masters.zero_grad()
        norm = float(found)
        skipped = not math.isfinite(norm)
        return norm, 0.0 if skipped else rate, skipped
