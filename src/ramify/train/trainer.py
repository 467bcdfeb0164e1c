"""One optimizer step: packs in, new weights and metrics out.

A batch has packs and N_c, the number of entries of each component in the whole batch. Gradients of packs are summed, so
the result depends neither on how the batch was packed nor on how many ranks share the packs. The host runs ahead of the
GPU: `start_step` launches the work and `wait_for_metrics` waits for it. Starting the next step before waiting keeps the
GPU busy.
"""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.core.errors import DeadlineExceeded, ModelUnsupported
from ramify.model.device_copy import get_device_peaks
from ramify.model.device_memory import describe_shortage, is_out_of_memory
from ramify.model.pack_layout import PackLayout
from ramify.trace import Forest
from ramify.train.activation_limits import ActivationBudget, ActivationLimits
from ramify.train.batch import Batch
from ramify.train.config import TrainerConfig
from ramify.train.distributed import gather_full_tensor
from ramify.train.master_weights import MasterWeights
from ramify.train.metrics import FlopsModel, MetricAccumulator, MetricSums, StepMetrics
from ramify.train.model_inputs import LoadImage, ModelInputs, StepImages, build_model_inputs
from ramify.train.optim import OptimizersContainer
from ramify.train.policy_model import PolicyModel, PolicyOutput
from ramify.train.token_stats import TokenStatsWriter

STEP_TIMEOUT = 3600.0  # seconds for a GPU to finish a step
POLL_INTERVAL = 1e-4  # seconds between two checks of whether it has


class Trainer:
    """A policy with its master weights and its optimizer.

    `total_steps` is the length of the run, for schedules that need it; the policy computes in `dtype`, and moves to
    `device` if that is given; `merge_sums` adds up the metric sums of all `num_ranks` ranks; `load_image` returns the
    processed image of a media entry. `token_stats`, if given, gets logprob and entropy of every trained token.
    `activations` is by default what `config` allows. `before_update` is called in every step before the weights change:
    engines may be copying them.
    """

    def __init__(
        self,
        policy: PolicyModel,
        config: TrainerConfig,
        *,
        total_steps: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        merge_sums: Callable[[MetricSums], MetricSums] = lambda sums: sums,
        num_ranks: int = 1,
        load_image: LoadImage | None = None,
        token_stats: TokenStatsWriter | None = None,
        activations: ActivationBudget | None = None,
    ) -> None:
        self.policy, self.config, self.merge_sums = policy, config, merge_sums
        self.load_image, self.token_stats = load_image, token_stats
        self.before_update: Callable[[], None] = lambda: None
        self.activations = activations or ActivationBudget(policy, ActivationLimits.from_config(config))
        self.master_weights = MasterWeights(policy, dtype, device)
        self.optimizer = OptimizersContainer(self.master_weights, config.optim, total_steps)
        self.device = next(policy.parameters()).device
        self.flops_model = FlopsModel.from_model(policy.model)
        is_cuda = self.device.type == "cuda"
        peaks = get_device_peaks(torch.cuda.get_device_name(self.device)) if is_cuda else None
        self.peak_flops = num_ranks * peaks.flops if peaks is not None else None

    def step(self, batch: Batch) -> StepMetrics:
        """Run one step and wait for it: forward and backward over the packs, then one update."""
        return self.start_step(batch).wait_for_metrics()

    def start_step(self, batch: Batch) -> "PendingStep":
        """Launch one step without waiting for the device."""
        started = DeviceTimestamp(self.device)
        accumulator = self.forward_backward(batch)
        waiting_since = time.perf_counter()
        self.before_update()
        wait_seconds = time.perf_counter() - waiting_since
        grad_norm, learning_rate = self.optimizer_step(batch.step)
        grad_norm = grad_norm.to(self.device, torch.float64).reshape(1)  # torch's norm of no gradients is on the CPU
        device_values = torch.cat([grad_norm, accumulator.flatten_device_values(self.device)])
        device_values = device_values.to("cpu", non_blocking=True)
        ended = DeviceTimestamp(self.device)
        return PendingStep(self, accumulator, learning_rate, wait_seconds, device_values, started, ended)

    def forward_backward(self, batch: Batch) -> MetricAccumulator:
        """Run forward and backward over the packs, leaving their summed gradients with the master weights.

        If the device has no room, all of it runs again with less (`activation_limits`). Raises what
        `ActivationBudget.lower` raises.
        """
        with self.activations.report_lowered():
            while True:
                limited_batch = self.activations.limit_packs(batch)
                try:
                    return self._run_packs(limited_batch)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    reason = describe_shortage(error)
                # The exception is gone here, and with it the activations that its traceback refers to.
                self.activations.lower(limited_batch, reason)
                self.free_memory()

    def free_memory(self) -> None:
        """Drop the gradients, and give memory that is not in use back to the device."""
        self.master_weights.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _run_packs(self, batch: Batch) -> MetricAccumulator:
        self.master_weights.zero_grad(num_packs=len(batch.packs))  # a failed attempt may have left some
        if self.token_stats is not None:
            self.token_stats.clear()
        accumulator = MetricAccumulator(batch.step)
        if self.policy.has_recurrence or self.policy.layout is PackLayout.CHAINS:
            accumulator.add_unique_tokens(sum(pack.unique_tokens for pack in batch.packs))
        images = self.encode_images(batch.packs)
        for pack in batch.packs:
            inputs = self.prepare_inputs(pack, images)
            output: PolicyOutput = self.policy(inputs, batch.entry_counts)
            output.loss.backward()
            accumulator.add(inputs, output, self.flops_model.count_flops(pack))
            if self.token_stats is not None:
                self.token_stats.add_pack(pack, output.logprob, output.entropy)
        if images is not None:
            images.backward()
            accumulator.add_images(len(images), images.count_flops())
        return accumulator

    def encode_images(self, packs: Sequence[Forest]) -> StepImages | None:
        """Encode each image of these packs once; returns None if they hold none. Raises ModelUnsupported."""
        media = [span.media for pack in packs for span in pack.media]
        if not media:
            return None
        if self.policy.tower is None or self.load_image is None:
            raise ModelUnsupported("the batch holds images, and the model reads none: train a vision-language model")
        return StepImages(self.policy.tower, media, self.load_image)

    def prepare_inputs(self, pack: Forest, images: StepImages | None = None) -> ModelInputs:
        """Build the model's inputs for a pack.

        `images` are the step's images, encoded; by default the images of the pack are encoded here.
        """
        if images is None:
            images = self.encode_images([pack])
        return build_model_inputs(
            pack, layout=self.policy.layout, device=self.device, attention=self.policy.attention, images=images
        )

    def optimizer_step(self, step: int) -> tuple[Tensor, float]:
        """Clip the gradients, update the weights and drop the gradients; returns gradient norm and learning rate.

        If the norm is not finite, nothing changes. Only Muon waits for the device.
        """
        grad_norm = self._clip_gradients()
        learning_rate = self.optimizer.step(step, grad_norm)
        self.master_weights.zero_grad()
        return grad_norm, learning_rate

    def try_optimizer_step(self) -> None:
        """Do what `optimizer_step` does without changing a weight.

        Call it inside `OptimizersContainer.fresh_state`, which restores the moments.
        """
        self.optimizer.try_update(self._clip_gradients())
        self.master_weights.zero_grad()

    def _clip_gradients(self) -> Tensor:
        """Return the norm of the gradients, which are clipped here unless the fused update does that."""
        if self.optimizer.fused:
            return self.master_weights.gradient_norm()
        max_grad_norm = self.config.optim.max_grad_norm or math.inf
        return gather_full_tensor(self.master_weights.clip_gradients(max_grad_norm))


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was launched and may still run on the device."""

    trainer: Trainer
    accumulator: MetricAccumulator
    learning_rate: float
    wait_seconds: float
    device_values: Tensor  # the gradient norm and the accumulator's device values, being copied to the host
    started: "DeviceTimestamp"
    ended: "DeviceTimestamp"

    def wait_for_metrics(self) -> StepMetrics:
        """Wait for the device and return the metrics. All ranks must call it in the same order.

        Raises DeadlineExceeded after STEP_TIMEOUT.
        """
        step = self.accumulator.step
        if not self.ended.wait(STEP_TIMEOUT):
            raise DeadlineExceeded(f"{self.trainer.device} did not finish step {step} within {STEP_TIMEOUT:g} s")
        seconds = self.ended.seconds_since(self.started)
        grad_norm, *device_values = self.device_values.tolist()
        sums = self.trainer.merge_sums(self.accumulator.to_sums(device_values))
        skipped = not math.isfinite(grad_norm)
        return StepMetrics(
            step=step,
            loss=sum(sums.component_losses.values()),
            grad_norm=grad_norm,
            lr=0.0 if skipped else self.learning_rate,
            skipped=skipped,
            seconds=seconds,
            wait_seconds=self.wait_seconds,
            peak_flops=self.trainer.peak_flops,
            sums=sums,
        )


class DeviceTimestamp:
    """The time at which the host was here; on a GPU, the time at which the device gets here."""

    def __init__(self, device: torch.device) -> None:
        self.host_time, self.event = time.perf_counter(), None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def wait(self, timeout: float) -> bool:
        """Wait until the device gets here; returns False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.event is not None and not self.event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_INTERVAL)
        return True

    def seconds_since(self, earlier: "DeviceTimestamp") -> float:
        """Return the seconds since an earlier timestamp; call `wait` first."""
        if self.event is None or earlier.event is None:
            return self.host_time - earlier.host_time
        return earlier.event.elapsed_time(self.event) / 1e3
