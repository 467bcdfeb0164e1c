"""A fused AdamW for one GPU: clipping, the update and the rounding to bfloat16 in one pass over memory.

The kernel reads gradients in bfloat16 or float32 wherever the backward pass left them, scales them, and writes master
weights, moments and the model's rounded weights. A table holds the addresses of the tensors; each program of the kernel
updates one block of one tensor.
"""
# ruff: noqa: ANN001, ANN202, N803 - arguments of kernels are pointers and constants

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from ramify.model.device_copy import copy_to_device
from ramify.train.master_weights import MasterWeights

BLOCK_SIZE, NUM_WARPS = 2048, 8  # few elements per thread, so that many loads are in flight
_foreach_add: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]


@triton.jit
def _block_pointers(table_row, column, start, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Pointers to one block of the tensor whose address is in the table, aligned so that four elements load at once."""
    address = tl.load(table_row + column).to(tl.pointer_type(dtype)) + start
    return tl.multiple_of(address + tl.arange(0, BLOCK), 4 * dtype.primitive_bitwidth // 8)


@triton.jit
def _round_to_bfloat16(values):
    """Round float32 to bfloat16, ties away from zero."""
    high_bits = (values.to(tl.int32, bitcast=True) + 0x8000) >> 16
    high_bits = tl.where(values == values, high_bits, 0x7FC0)
    return high_bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _update_block(
    masters, model_params, exp_avg, exp_avg_sq, gradients, mask, scale, lr, inv_sqrt_correction2, decay,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    p, m, v = tl.load(masters, mask), tl.load(exp_avg, mask), tl.load(exp_avg_sq, mask)
    g = tl.load(gradients, mask).to(tl.float32) * scale
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    p -= decay * p
    p -= lr * m / (tl.sqrt(v) * inv_sqrt_correction2 + EPS)
    tl.store(masters, p, mask)
    tl.store(model_params, _round_to_bfloat16(p), mask)
    tl.store(exp_avg, m, mask)
    tl.store(exp_avg_sq, v, mask)


@triton.jit
def _adamw_kernel(
    BLOCKS, TABLE, LR, INV_SQRT_CORRECTION2, DECAY, SCALE, FOUND_INF,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    entry = BLOCKS + 2 * tl.program_id(0)
    tensor, start = tl.load(entry), tl.load(entry + 1).to(tl.int64) * BLOCK
    row = TABLE + 6 * tensor
    masters = _block_pointers(row, 0, start, BLOCK, tl.float32)
    model_params = _block_pointers(row, 1, start, BLOCK, tl.bfloat16)
    exp_avg = _block_pointers(row, 2, start, BLOCK, tl.float32)
    exp_avg_sq = _block_pointers(row, 3, start, BLOCK, tl.float32)
    gradients = _block_pointers(row, 4, start, BLOCK, GRADIENT)
    scale, lr = tl.load(SCALE), tl.load(LR + tensor)
    correction, decay = tl.load(INV_SQRT_CORRECTION2 + tensor), tl.load(DECAY + tensor)
    remaining = tl.where(tl.load(FOUND_INF) == 0, tl.load(row + 5) - start, 0)
    if remaining >= BLOCK:
        _update_block(
            masters, model_params, exp_avg, exp_avg_sq, gradients, None, scale, lr, correction, decay, BETA1, BETA2, EPS
        )  # fmt: skip
    elif remaining > 0:  # a mask makes the accesses narrow, so only the last block of a tensor has one
        mask = tl.arange(0, BLOCK) < remaining.to(tl.int32)
        _update_block(
            masters, model_params, exp_avg, exp_avg_sq, gradients, mask, scale, lr, correction, decay, BETA1, BETA2, EPS
        )  # fmt: skip


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, with the same state, over master weights and the gradients they hold.

    As in torch, gradients are divided by `grad_scale`, and the step does nothing if `found_inf` is not 0. Both are read
    on the device. In addition, the step rounds the new master weights into the model.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, param_groups: list[dict[str, Any]], master_weights: MasterWeights, **settings: Any) -> None:
        super().__init__(param_groups, **settings)
        self._master_weights, self._model_copies = master_weights, master_weights.model_copies()
        self._block_tables: dict[torch.dtype, tuple[list[int], Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters from their gradients, one fused call per dtype."""
        gradients = self._master_weights.gradients()
        for dtype in {gradient.dtype for gradient in gradients.values()}:
            self._step_dtype({master: grad for master, grad in gradients.items() if grad.dtype == dtype}, dtype)

    def _step_dtype(self, gradients: dict[nn.Parameter, Tensor], dtype: torch.dtype) -> None:
        """Update the weights whose gradients have this dtype."""
        rows: list[tuple[int, ...]] = []
        decays: list[float] = []
        steps: list[Tensor] = []
        for group in self.param_groups:
            for master in group["params"]:
                if (gradient := gradients.get(master)) is None:
                    continue
                if gradient.data_ptr() % 16:  # a view into a larger tensor
                    gradient = gradients[master] = gradient.clone()
                state = self._get_state(master)
                tensors = (master, self._model_copies[master], state["exp_avg"], state["exp_avg_sq"], gradient)
                rows.append((*(tensor.data_ptr() for tensor in tensors), master.numel()))
                decays.append(group["lr"] * group["weight_decay"])
                steps.append(state["step"])
        group, device = self.param_groups[0], steps[0].device
        table, decay = copy_to_device([np.array(rows, np.int64), np.array(decays, np.float32)], device)
        blocks = self._get_block_table([row[-1] for row in rows], dtype, device)
        _foreach_add(steps, [1 - self.found_inf] * len(steps))  # a list: a single number would be read by the host
        count, (beta1, beta2) = torch.stack(steps).double(), group["betas"]
        lr, inv_sqrt_correction2 = group["lr"] / (1 - beta1**count), (1 - beta2**count).rsqrt()
        _adamw_kernel[(len(blocks),)](  # pyright: ignore[reportIndexIssue]
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
            BLOCK=BLOCK_SIZE,
            num_warps=NUM_WARPS,
        )

    def _get_state(self, master: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[master]
        if not state:
            state["step"] = torch.zeros((), device=master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master), torch.zeros_like(master)
        return state

    def _get_block_table(self, sizes: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return [blocks, 2]: the tensor of each block and the block's index in it. Kept from step to step."""
        known_sizes, table = self._block_tables.get(dtype, (None, None))
        if table is None or known_sizes != sizes:
            counts = [triton.cdiv(size, BLOCK_SIZE) for size in sizes]
            tensor_index = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
            block_index = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
            (table,) = copy_to_device([np.stack([tensor_index, block_index], 1)], device)
            self._block_tables[dtype] = sizes, table
        return table
