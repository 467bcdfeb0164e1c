"""The least time that a device needs for a step: what it must read and compute, at the device's peaks.

A step reads the weights once (of experts, as many as its tokens can choose), the blocks that its requests hold, each
once even if several requests share it, and the recurrent states, which it also writes. It computes two operations per
weight and token, and the attention of its prefill. Reading and computing overlap, so the longer of both counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ramify.infer.scheduler import ScheduledChunk
from ramify.model.active_parameters import WeightCounts
from ramify.model.device_copy import DevicePeaks, get_device_peaks
from ramify.model.load import LoadedModel
from ramify.model.lora import count_bytes_saved_by_quantization


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a model's steps on a device with known peaks."""

    weights: WeightCounts
    element_bytes: int
    quantization_savings: int  # bytes that are not read, since matrices are held in fewer bits
    block_bytes: int  # keys and values of a block, in all layers
    state_bytes: int  # recurrent states of a request
    flops_per_pair: float  # attention of a query to a key, in all layers
    peaks: DevicePeaks

    @classmethod
    def from_model(cls, model: LoadedModel, block_size: int, peaks: DevicePeaks) -> "StepWork":
        """Read the sizes of a loaded model."""
        shape, num_layers = model.shape, len(model.shape.kv_layers)
        num_heads = model.module.config.get_text_config().num_attention_heads
        return cls(
            weights=WeightCounts.from_model(model.module),
            element_bytes=model.dtype.itemsize,
            quantization_savings=count_bytes_saved_by_quantization(model.module),
            block_bytes=2 * num_layers * shape.num_kv_heads * shape.head_dim * model.dtype.itemsize * block_size,
            state_bytes=sum(spec.nbytes for spec in model.state_specs),
            flops_per_pair=4.0 * num_layers * num_heads * shape.head_dim,
            peaks=peaks,
        )

    def ideal_seconds(self, chunks: Sequence[ScheduledChunk], num_held_blocks: int) -> float:
        """Return the least time for a step."""
        num_tokens, weights = sum([chunk.num_tokens for chunk in chunks]), self.weights
        experts = weights.experts * min(1.0, num_tokens * weights.expert_share)
        num_bytes = (weights.dense + experts + weights.head) * self.element_bytes - self.quantization_savings
        num_bytes += num_held_blocks * self.block_bytes + 2 * len(chunks) * self.state_bytes
        flops = 2.0 * (weights.active * num_tokens + weights.head * len(chunks))
        if num_tokens > len(chunks):  # in a decode step attention is a matter of bytes
            flops += self.flops_per_pair * sum(chunk.num_tokens * (chunk.start + chunk.stop) / 2 for chunk in chunks)
        return max(num_bytes / self.peaks.memory_bytes, flops / self.peaks.flops)


def build_step_work(model: LoadedModel, block_size: int) -> StepWork | None:
    """Return the work of a model's steps; None if its device has no known peaks for its dtype."""
    has_layers = isinstance(getattr(model.module.get_decoder(), "layers", None), nn.ModuleList)
    if model.device.type != "cuda" or model.dtype != torch.bfloat16 or not has_layers:
        return None
    peaks = get_device_peaks(torch.cuda.get_device_name(model.device))
    return StepWork.from_model(model, block_size, peaks) if peaks is not None else None
