"""A fused AdamW for one GPU: clipping, the update and the rounding to bfloat16 in one pass over memory.

The kernel reads gradients in bfloat16 or float32 wherever the backward pass left them, scales them, joins the two
halves of the master weights, and writes the halves of the new ones and the moments, in float32 or in 8 bits. A table
holds the addresses of the tensors; each program of the kernel updates one block of one tensor.
"""
# ruff: noqa: ANN001, ANN202, N803 - arguments of kernels are pointers and constants

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ramify.model.device_copy import copy_to_device
from ramify.train.master_weights import MasterWeights
from ramify.train.quantized_moments import BLOCK_VALUES, FIRST_LEVELS, MIN_SCALE, SECOND_LEVELS, allocate_moments

BLOCK_SIZE, NUM_WARPS = 2048, 8  # few elements per thread, so that many loads are in flight
FLOAT32_FIELDS = ("exp_avg", "exp_avg_sq", "exp_avg", "exp_avg_sq")  # twice: there are no scales
QUANTIZED_FIELDS = ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "exp_avg_sq_scales")
COLUMNS = 8  # of the table of tensors
_foreach_add: Any = torch._foreach_add_


@triton.jit
def _block_pointers(table_row, column, start, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Pointers to one block of the tensor whose address is in the table, aligned so that four elements load at once."""
    address = tl.load(table_row + column).to(tl.pointer_type(dtype)) + start
    return tl.multiple_of(address + tl.arange(0, BLOCK), 4 * dtype.primitive_bitwidth // 8)


@triton.jit
def _scale_pointers(table_row, column, start, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Pointers to the scales of the groups of values in one block."""
    return tl.load(table_row + column).to(tl.pointer_type(tl.float32)) + start // GROUP + tl.arange(0, BLOCK // GROUP)


@triton.jit
def _join_float32(values, remainders):
    """The float32 whose upper half is rounded to bfloat16 and whose lower half is a signed remainder."""
    bits = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16) + remainders.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _store_split(values, model_params, remainders, mask):
    """Store float32 as bfloat16, rounded with ties away from zero, and the remainder."""
    bits = tl.where(values == values, values.to(tl.int32, bitcast=True), 0x7FC00000)
    tl.store(model_params, ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask)
    tl.store(remainders, bits.to(tl.int16), mask)


@triton.jit
def _dequantize(codes, scales, BLOCK: tl.constexpr, GROUP: tl.constexpr, LEVELS: tl.constexpr):
    """The absolute values of some codes."""
    squares = tl.reshape(codes * codes * (1.0 / (LEVELS * LEVELS)), (BLOCK // GROUP, GROUP))
    return tl.reshape(squares * scales[:, None], (BLOCK,))


@triton.jit
def _quantize(
    values, BLOCK: tl.constexpr, GROUP: tl.constexpr, LEVELS: tl.constexpr, MIN_SCALE: tl.constexpr,
):  # fmt: skip
    """Codes of values that are not negative, and the scales of their groups."""
    groups = tl.reshape(values, (BLOCK // GROUP, GROUP))
    scales = tl.max(groups, 1)
    is_stored = scales > MIN_SCALE
    inverse_scales = tl.where(is_stored, tl.div_rn(1.0, tl.where(is_stored, scales, 1.0)), 0.0)
    codes = tl.floor(tl.sqrt_rn(groups * inverse_scales[:, None]) * LEVELS + 0.5)
    return tl.reshape(codes, (BLOCK,)), scales


@triton.jit
def _update_block(
    row, start, remaining, scale, lr, inv_sqrt_correction2, decay,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, GRADIENT: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, LEVELS1: tl.constexpr, LEVELS2: tl.constexpr, MIN_SCALE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    mask = tl.arange(0, BLOCK) < remaining if MASKED else None
    other = 0.0 if MASKED else None
    model_params = _block_pointers(row, 0, start, BLOCK, tl.bfloat16)
    remainders = _block_pointers(row, 1, start, BLOCK, tl.int16)
    p = _join_float32(tl.load(model_params, mask), tl.load(remainders, mask))
    g = tl.load(_block_pointers(row, 6, start, BLOCK, GRADIENT), mask, other).to(tl.float32) * scale
    if QUANTIZED:
        exp_avg = _block_pointers(row, 2, start, BLOCK, tl.int8)
        exp_avg_sq = _block_pointers(row, 3, start, BLOCK, tl.uint8)
        exp_avg_scales = _scale_pointers(row, 4, start, BLOCK, GROUP)
        exp_avg_sq_scales = _scale_pointers(row, 5, start, BLOCK, GROUP)
        group_mask = tl.arange(0, BLOCK // GROUP) * GROUP < remaining if MASKED else None
        m_codes = tl.load(exp_avg, mask, 0 if MASKED else None).to(tl.float32)
        r_codes = tl.load(exp_avg_sq, mask, 0 if MASKED else None).to(tl.float32)
        m = _dequantize(m_codes, tl.load(exp_avg_scales, group_mask, other), BLOCK, GROUP, LEVELS1)
        m = tl.where(m_codes < 0, -m, m)
        r = _dequantize(r_codes, tl.load(exp_avg_sq_scales, group_mask, other), BLOCK, GROUP, LEVELS2)
        v = r * r
    else:
        exp_avg = _block_pointers(row, 2, start, BLOCK, tl.float32)
        exp_avg_sq = _block_pointers(row, 3, start, BLOCK, tl.float32)
        m, v = tl.load(exp_avg, mask, other), tl.load(exp_avg_sq, mask, other)
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    p -= decay * p
    p -= lr * m / (tl.sqrt(v) * inv_sqrt_correction2 + EPS)
    _store_split(p, model_params, remainders, mask)
    if QUANTIZED:
        m_codes, m_scales = _quantize(tl.abs(m), BLOCK, GROUP, LEVELS1, MIN_SCALE)
        r = tl.sqrt_rn(v)
        r_codes, r_scales = _quantize(r, BLOCK, GROUP, LEVELS2, MIN_SCALE)
        r_codes = tl.where(r > 0, tl.maximum(r_codes, 1.0), 0.0)
        tl.store(exp_avg, tl.where(m < 0, -m_codes, m_codes).to(tl.int8), mask)
        tl.store(exp_avg_sq, r_codes.to(tl.uint8), mask)
        tl.store(exp_avg_scales, m_scales, group_mask)  # pyrefly: ignore[unbound-name]
        tl.store(exp_avg_sq_scales, r_scales, group_mask)  # pyrefly: ignore[unbound-name]
    else:
        tl.store(exp_avg, m, mask)
        tl.store(exp_avg_sq, v, mask)


@triton.jit
def _adamw_kernel(
    BLOCKS, TABLE, LR, INV_SQRT_CORRECTION2, DECAY, SCALE, FOUND_INF,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, GRADIENT: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    LEVELS1: tl.constexpr, LEVELS2: tl.constexpr, MIN_SCALE: tl.constexpr,
):  # fmt: skip
    entry = BLOCKS + 2 * tl.program_id(0)
    tensor, start = tl.load(entry), tl.load(entry + 1).to(tl.int64) * BLOCK
    row = TABLE + COLUMNS * tensor
    scale, lr = tl.load(SCALE), tl.load(LR + tensor)
    correction, decay = tl.load(INV_SQRT_CORRECTION2 + tensor), tl.load(DECAY + tensor)
    remaining = tl.where(tl.load(FOUND_INF) == 0, tl.load(row + COLUMNS - 1) - start, 0)
    if remaining >= BLOCK:
        _update_block(
            row, start, BLOCK, scale, lr, correction, decay, BETA1, BETA2, EPS, GRADIENT, QUANTIZED,
            BLOCK, GROUP, LEVELS1, LEVELS2, MIN_SCALE, False,
        )  # fmt: skip
    elif remaining > 0:  # a mask makes the accesses narrow, so only the last block of a tensor has one
        _update_block(
            row, start, remaining.to(tl.int32), scale, lr, correction, decay, BETA1, BETA2, EPS, GRADIENT, QUANTIZED,
            BLOCK, GROUP, LEVELS1, LEVELS2, MIN_SCALE, True,
        )  # fmt: skip


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW over split master weights and the gradients they hold.

    Its state is torch's, except that the `quantized` parameters have their moments in 8 bits. As in torch, gradients
    are divided by `grad_scale`, and the step does nothing if `found_inf` is not 0. Both are read on the device.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        master_weights: MasterWeights,
        quantized: Sequence[nn.Parameter],
        **settings: Any,
    ) -> None:
        super().__init__(param_groups, **settings)
        self._master_weights, self._quantized = master_weights, set(quantized)
        self._block_tables: dict[tuple[torch.dtype, bool], tuple[list[int], Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters from their gradients, one fused call per dtype of gradients and format of moments."""
        calls: dict[tuple[torch.dtype, bool], dict[nn.Parameter, Tensor]] = {}
        for parameter, gradient in self._master_weights.gradients().items():
            calls.setdefault((gradient.dtype, parameter in self._quantized), {})[parameter] = gradient
        for (dtype, is_quantized), gradients in calls.items():
            self._step_part(gradients, dtype, is_quantized)

    def _step_part(self, gradients: dict[nn.Parameter, Tensor], dtype: torch.dtype, is_quantized: bool) -> None:
        """Update the weights whose gradients have this dtype and whose moments have this format."""
        rows: list[tuple[int, ...]] = []
        decays: list[float] = []
        steps: list[Tensor] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := gradients.get(parameter)) is None:
                    continue
                if gradient.data_ptr() % 16:  # a view into a larger tensor
                    gradient = gradients[parameter] = gradient.clone()
                state = self._get_state(parameter)
                remainder = self._master_weights.get_remainder(parameter)
                assert remainder is not None
                moments = [state[name] for name in (QUANTIZED_FIELDS if is_quantized else FLOAT32_FIELDS)]
                addresses = [tensor.data_ptr() for tensor in (parameter, remainder, *moments, gradient)]
                rows.append((*addresses, parameter.numel()))
                decays.append(group["lr"] * group["weight_decay"])
                steps.append(state["step"])
        group, device = self.param_groups[0], steps[0].device
        table, decay = copy_to_device([np.array(rows, np.int64), np.array(decays, np.float32)], device)
        blocks = self._get_block_table([row[-1] for row in rows], (dtype, is_quantized), device)
        _foreach_add(steps, [1 - self.found_inf] * len(steps))  # a list: a single number would be read by the host
        count, (beta1, beta2) = torch.stack(steps).double(), group["betas"]
        lr, inv_sqrt_correction2 = group["lr"] / (1 - beta1**count), (1 - beta2**count).rsqrt()
        _adamw_kernel[(len(blocks),)](
            blocks,
            table,
            lr.float(),
            inv_sqrt_correction2.float(),
            decay,
            self.grad_scale.reciprocal(),
            self.found_inf,
            BETA1=beta1,
            BETA2=beta2,
            EPS=group["eps"],
            GRADIENT=tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
            QUANTIZED=is_quantized,
            BLOCK=BLOCK_SIZE,
            COLUMNS=COLUMNS,
            GROUP=BLOCK_VALUES,
            LEVELS1=FIRST_LEVELS,
            LEVELS2=SECOND_LEVELS,
            MIN_SCALE=MIN_SCALE,
            num_warps=NUM_WARPS,
        )

    def _get_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            if parameter in self._quantized:
                state.update(allocate_moments(parameter))
            else:
                zeros = torch.zeros_like(parameter, dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = zeros, zeros.clone()
        return state

    def _get_block_table(self, sizes: list[int], key: tuple[torch.dtype, bool], device: torch.device) -> Tensor:
        """Return [blocks, 2]: the tensor of each block and the block's index in it. Kept from step to step."""
        known_sizes, table = self._block_tables.get(key, (None, None))
        if table is None or known_sizes != sizes:
            counts = [triton.cdiv(size, BLOCK_SIZE) for size in sizes]
            tensor_index = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
            block_index = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
            (table,) = copy_to_device([np.stack([tensor_index, block_index], 1)], device)
            self._block_tables[key] = sizes, table
        return table
