"""AdamW's moments in 8 bits, with one float32 scale for each block of 128 values.

A code `c` from 0 to `L` stands for `scale * (c / L)**2`, and the scale is the largest value of the block. Because of
the square, steps between codes are finer near 0, where most values are. The first moment has a sign and 127 levels. The
second moment is stored as its square root, with 255 levels, and a value that was not 0 never becomes 0: the next step
would divide by almost nothing.

Embeddings, head, norms and biases keep float32 moments. Moments are rounded between steps; a step computes in float32.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ramify.model.experts import OUTER_MATRIX_NAMES

BLOCK_VALUES = 128
FIRST_LEVELS, SECOND_LEVELS = 127, 255
MIN_SCALE = 1e-30  # blocks of smaller first moments are stored as 0


def is_inside_layers(name: str, value: Tensor) -> bool:
    """Return whether a parameter is a matrix inside the layers, or a stack of matrices, as experts have."""
    return value.ndim >= 2 and not any(part in name for part in OUTER_MATRIX_NAMES)


def allocate_moments(parameter: Tensor) -> dict[str, Tensor]:
    """Return the moments 0 of a parameter in 8 bits, as fields of an optimizer's state."""
    num_blocks, device = -(-parameter.numel() // BLOCK_VALUES), parameter.device
    return {
        "exp_avg_codes": torch.zeros(parameter.shape, dtype=torch.int8, device=device),
        "exp_avg_scales": torch.zeros(num_blocks, device=device),
        "exp_avg_sq_codes": torch.zeros(parameter.shape, dtype=torch.uint8, device=device),
        "exp_avg_sq_scales": torch.zeros(num_blocks, device=device),
    }


def quantize_moments(exp_avg: Tensor, exp_avg_sq: Tensor) -> dict[str, Tensor]:
    """Round moments to 8 bits."""
    first_codes, first_scales = _quantize(exp_avg.abs(), FIRST_LEVELS)
    roots = exp_avg_sq.sqrt()
    second_codes, second_scales = _quantize(roots, SECOND_LEVELS)
    return {
        "exp_avg_codes": (first_codes * exp_avg.sign()).to(torch.int8),
        "exp_avg_scales": first_scales,
        "exp_avg_sq_codes": torch.where(roots > 0, second_codes.clamp(min=1), 0.0).to(torch.uint8),
        "exp_avg_sq_scales": second_scales,
    }


def dequantize_moments(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the moments in float32."""
    first_codes, second_codes = state["exp_avg_codes"].float(), state["exp_avg_sq_codes"].float()
    first = _dequantize(first_codes, state["exp_avg_scales"], FIRST_LEVELS)
    roots = _dequantize(second_codes, state["exp_avg_sq_scales"], SECOND_LEVELS)
    return {"exp_avg": first * first_codes.sign(), "exp_avg_sq": roots * roots}


def _quantize(values: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return codes, as float32 in the shape of the values, which are not negative, and the scales of the blocks."""
    blocks = _split_blocks(values)
    scales = blocks.amax(1)
    inverse_scales = torch.where(scales > MIN_SCALE, 1.0 / scales, 0.0)
    codes = ((blocks * inverse_scales.unsqueeze(1)).sqrt() * levels + 0.5).floor()
    return codes.flatten()[: values.numel()].view(values.shape), scales


def _dequantize(codes: Tensor, scales: Tensor, levels: int) -> Tensor:
    blocks = _split_blocks(codes)
    values = blocks * blocks * (1.0 / levels**2) * scales.unsqueeze(1)
    return values.flatten()[: codes.numel()].view(codes.shape)


def _split_blocks(values: Tensor) -> Tensor:
    """Return the values as rows of one block each; the last block is filled with 0."""
    padding = -values.numel() % BLOCK_VALUES
    return nn.functional.pad(values.flatten(), (0, padding)).view(-1, BLOCK_VALUES)


class QuantizedAdamW(torch.optim.AdamW):
    """AdamW whose state holds the moments in 8 bits between two steps. For a single parameter, to save memory."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the parameter."""
        (parameter,) = (parameter for group in self.param_groups for parameter in group["params"])
        state = self.state[parameter]
        if state:
            moments = dequantize_moments(state)
            self.state[parameter] = {"step": state["step"], **moments}
        super().step()
        state = self.state[parameter]
        if state:
            moments = quantize_moments(state["exp_avg"], state["exp_avg_sq"])
            self.state[parameter] = {"step": state["step"], **moments}
