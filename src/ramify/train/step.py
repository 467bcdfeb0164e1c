"""One optimizer step: packs in, new weights and metrics out.

A batch brings its packs and N_c, the entries each component has in the whole batch. Gradients of packs are summed, so
the result does not depend on how the batch was cut, nor on how many ranks share the packs. A GPU works on while the
host goes ahead, so a step is begun, and its metrics are asked for when it is done: whoever begins the next one first
leaves no gap between the two.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ramify.errors import DeadlineExceeded
from ramify.trace import Forest
from ramify.train.batches import Batch
from ramify.train.config import TrainerConfig
from ramify.train.flops import Cost, peak
from ramify.train.masters import Masters
from ramify.train.metrics import StepMetrics, Sums, Tally
from ramify.train.optim import Optimizer
from ramify.train.policy import Policy
from ramify.train.rows import Row, bucket, row_of

DEADLINE = 3600.0  # seconds until a GPU has to be done with what it was told
LOOK = 1e-4  # seconds between two looks at whether it is


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
        self.optimizer = Optimizer(self.masters, config.optim, steps)
        self.device = next(policy.parameters()).device
        self.cost = Cost.of(policy.model)
        self.peak = peak(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None

    def step(self, batch: Batch) -> StepMetrics:
        """Forward and backward over the packs, then one update."""
        return self.begin(batch).metrics()

    def begin(self, batch: Batch) -> "Running":
        """A step of which a GPU has been told all; nobody has waited for it."""
        started = Moment(self.device)
        tally = self.differentiate(batch)
        norm, rate = self.update(batch.step)
        found = norm.to(self.device, torch.float64).reshape(1)  # torch's of no gradients is on the CPU
        numbers = torch.cat([found, tally.numbers(self.device)]).to("cpu", non_blocking=True)
        return Running(self, tally, rate, numbers, started, Moment(self.device))

    def differentiate(self, batch: Batch) -> Tally:
        """Forward and backward over the packs: leaves their gradients to the masters, and tells what was seen."""
        self.masters.zero_grad()  # a step that failed has left some
        tally = Tally(batch.step)
        for pack in batch.packs:
            row = self.row(pack)
            seen = self.policy(row, batch.counts)
            seen.loss.backward()
            self.masters.collect()
            tally.add(row, seen, self.cost.flops(pack))
        return tally

    def row(self, pack: Forest) -> Row:
        """A pack as this trainer's model reads it; rows of a GPU have one of few lengths."""
        length = bucket(len(pack), self.config.pack_tokens) if self.device.type == "cuda" else None
        policy = self.policy
        return row_of(pack, layout=policy.layout, device=self.device, windows=policy.windows, length=length)

    def update(self, step: int) -> tuple[Tensor, float]:
        """Clip, step, sync and drop the gradients without waiting for the device (but for Muon): the gradient's norm,
        and the learning rate; where the norm is not finite nothing has changed."""
        if self.optimizer.fused:
            found = self.masters.norm()
            rate = self.optimizer.step(step, found)
        else:
            self.masters.settle()
            limit = self.config.optim.max_norm
            found = torch.nn.utils.clip_grad_norm_(self.masters.parameters(), limit or float("inf"))
            found = found.full_tensor() if isinstance(found, DTensor) else found
            rate = self.optimizer.step(step, found)
            self.masters.sync()
        self.masters.zero_grad()
        return found, rate


@dataclass(frozen=True, slots=True)
class Running:
    """A step that was begun."""

    trainer: Trainer
    tally: Tally
    rate: float
    numbers: Tensor  # the gradient's norm and the tally's, on their way to the host
    started: "Moment"
    ended: "Moment"

    def metrics(self) -> StepMetrics:
        """What came of it, when it is done; all ranks must ask in the same order."""
        if not self.ended.reached(DEADLINE):
            raise DeadlineExceeded(f"{self.trainer.device} did not finish step {self.tally.step} within {DEADLINE:g} s")
        seconds = self.ended.since(self.started)
        norm, *numbers = self.numbers.tolist()
        sums = self.trainer.gather(self.tally.sums(numbers))
        skipped = not math.isfinite(norm)
        return StepMetrics(
            step=self.tally.step,
            loss=sum(sums.terms.values()),
            grad_norm=norm,
            lr=0.0 if skipped else self.rate,
            skipped=skipped,
            seconds=seconds,
            peak_flops=self.trainer.peak,
            sums=sums,
        )


class Moment:
    """When the host was here; on a GPU, when it gets here."""

    def __init__(self, device: torch.device) -> None:
        self.at, self.event = time.perf_counter(), None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def reached(self, deadline: float) -> bool:
        """Whether the GPU is here, or gets here within so many seconds."""
        end = time.monotonic() + deadline
        while self.event is not None and not self.event.query():
            if time.monotonic() > end:
                return False
            time.sleep(LOOK)
        return True

    def since(self, earlier: "Moment") -> float:
        """Seconds, once it was reached."""
        if self.event is None or earlier.event is None:
            return self.at - earlier.at
        return earlier.event.elapsed_time(self.event) / 1e3
