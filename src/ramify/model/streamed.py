"""Products of a few rows in bfloat16 on a CPU, at the speed of memory.

With one request at once a decode step reads every weight for one row: only the way they come from memory matters, and
torch's product, made for many rows, takes them at half the speed or less. This one is C for processors that multiply
bfloat16 (AVX512-BF16), on the threads that torch has already. All else is torch, and so are more rows.
"""

from pathlib import Path

import torch
from torch import Tensor

from ramify.model.native import Unavailable, borrowed, library, processor, typed
from ramify.model.operators import Model, Operators, Sizes

FEW = 4  # rows; with twice as many torch is as fast
LANES = 32  # rows of a matrix are multiples of this


class Streamed(Operators):
    """Torch's operators with products of few rows in C."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, "torch, compiled for few rows")
        self._parallel = borrowed("GOMP_parallel")
        self._product = typed(library(Path(__file__).with_name("streamed.c"), f"FEW={FEW}").product, "pippppiii")

    def product(self, rows: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
        count, width = rows.shape
        if not 0 < count <= FEW:  # none where a chunk of a prompt is computed and nothing sampled
            return super().product(rows, weight, onto)
        rows, out = rows.contiguous(), rows.new_empty(count, weight.shape[1])
        pointers = rows.data_ptr(), weight.data_ptr(), None if onto is None else onto.data_ptr(), out.data_ptr()
        self._product(self._parallel, torch.get_num_threads(), *pointers, count, width, out.shape[1])
        return out


def streamed(sizes: Sizes, model: Model) -> Streamed:
    """The operators for this model, or Unavailable, with the reason."""
    weight = model.norm
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        raise Unavailable(f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}")
    if not any("avx512_bf16" in line for line in processor()):
        raise Unavailable("no AVX512-BF16")
    if any(width % LANES for width in (sizes.hidden, sizes.heads * sizes.head_dim, sizes.inner)):
        raise Unavailable(f"a width is no multiple of {LANES}")
    return Streamed(sizes)
