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
from ramify.train.batch import Batch
from ramify.train.config import TrainerConfig
from ramify.train.flops import FlopsModel, get_peak_flops
from ramify.train.master_weights import MasterWeights
from ramify.train.metrics import MetricAccumulator, MetricSums, StepMetrics
from ramify.train.model_inputs import ModelInputs, bucket_length, build_model_inputs
from ramify.train.optim import OptimizersContainer
from ramify.train.policy import PolicyModel

STEP_TIMEOUT = 3600.0  # seconds until a GPU has to be done with what it was told
POLL_INTERVAL = 1e-4  # seconds between two looks at whether it is


class Trainer:
    """A policy, its master weights and its optimizer; `gather` adds up the sums of all ranks."""

    def __init__(
        self,
        policy: PolicyModel,
        config: TrainerConfig,
        *,
        total_steps: int | None = None,
        dtype: torch.dtype = torch.float32,
        merge_sums: Callable[[MetricSums], MetricSums] = lambda sums: sums,
    ) -> None:
        self.policy, self.config, self.merge_sums = policy, config, merge_sums
        self.master_weights = MasterWeights(policy, dtype)
        self.optimizer = OptimizersContainer(self.master_weights, config.optim, total_steps)
        self.device = next(policy.parameters()).device
        self.flops_model = FlopsModel.from_model(policy.model)
        self.peak_flops = (
            get_peak_flops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        )

    def step(self, batch: Batch) -> StepMetrics:
        """Forward and backward over the packs, then one update."""
        return self.start_step(batch).wait_for_metrics()

    def start_step(self, batch: Batch) -> "PendingStep":
        """A step of which a GPU has been told all; nobody has waited for it."""
        started = DeviceTimestamp(self.device)
        tally = self.forward_backward(batch)
        norm, rate = self.optimizer_step(batch.step)
        found = norm.to(self.device, torch.float64).reshape(1)  # torch's of no gradients is on the CPU
        numbers = torch.cat([found, tally.flatten_device_values(self.device)]).to("cpu", non_blocking=True)
        return PendingStep(self, tally, rate, numbers, started, DeviceTimestamp(self.device))

    def forward_backward(self, batch: Batch) -> MetricAccumulator:
        """Forward and backward over the packs: leaves their gradients to the masters, and tells what was seen."""
        self.master_weights.zero_grad()  # a step that failed has left some
        tally = MetricAccumulator(batch.step)
        for pack in batch.packs:
            row = self.prepare_inputs(pack)
            seen = self.policy(row, batch.entry_counts)
            seen.loss.backward()
            self.master_weights.accumulate_gradients()
            tally.add(row, seen, self.flops_model.count_flops(pack))
        return tally

    def prepare_inputs(self, pack: Forest) -> ModelInputs:
        """A pack as this trainer's model reads it; rows of a GPU have one of few lengths."""
        length = bucket_length(len(pack), self.config.pack_tokens) if self.device.type == "cuda" else None
        policy = self.policy
        return build_model_inputs(
            pack, layout=policy.layout, device=self.device, sliding_windows=policy.sliding_windows, padded_length=length
        )

    def optimizer_step(self, step: int) -> tuple[Tensor, float]:
        """Clip, step, sync and drop the gradients without waiting for the device (but for Muon): the gradient's norm,
        and the learning rate; where the norm is not finite nothing has changed."""
        if self.optimizer.fused:
            found = self.master_weights.gradient_norm()
            rate = self.optimizer.step(step, found)
        else:
            self.master_weights.upcast_gradients()
            limit = self.config.optim.max_norm
            found = torch.nn.utils.clip_grad_norm_(self.master_weights.parameters(), limit or float("inf"))
            found = found.full_tensor() if isinstance(found, DTensor) else found
            rate = self.optimizer.step(step, found)
            self.master_weights.copy_to_model()
        self.master_weights.zero_grad()
        return found, rate


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was begun."""

    trainer: Trainer
    accumulator: MetricAccumulator
    learning_rate: float
    device_values: Tensor  # the gradient's norm and the tally's, on their way to the host
    started: "DeviceTimestamp"
    ended: "DeviceTimestamp"

    def wait_for_metrics(self) -> StepMetrics:
        """What came of it, when it is done; all ranks must ask in the same order."""
        if not self.ended.wait(STEP_TIMEOUT):
            raise DeadlineExceeded(
                f"{self.trainer.device} did not finish step {self.accumulator.step} within {STEP_TIMEOUT:g} s"
            )
        seconds = self.ended.seconds_since(self.started)
        norm, *numbers = self.device_values.tolist()
        sums = self.trainer.merge_sums(self.accumulator.to_sums(numbers))
        skipped = not math.isfinite(norm)
        return StepMetrics(
            step=self.accumulator.step,
            loss=sum(sums.component_losses.values()),
            grad_norm=norm,
            lr=0.0 if skipped else self.learning_rate,
            skipped=skipped,
            seconds=seconds,
            peak_flops=self.trainer.peak_flops,
            sums=sums,
        )


class DeviceTimestamp:
    """When the host was here; on a GPU, when it gets here."""

    def __init__(self, device: torch.device) -> None:
        self.host_time, self.event = time.perf_counter(), None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def wait(self, timeout: float) -> bool:
        """Whether the GPU is here, or gets here within so many seconds."""
        end = time.monotonic() + timeout
        while self.event is not None and not self.event.query():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_INTERVAL)
        return True

    def seconds_since(self, earlier: "DeviceTimestamp") -> float:
        """Seconds, once it was reached."""
        if self.event is None or earlier.event is None:
            return self.host_time - earlier.host_time
        return earlier.event.elapsed_time(self.event) / 1e3
