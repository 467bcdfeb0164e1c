"""Products of a few rows in bfloat16 on a CPU, at the speed of memory.

With one request at once a decode step reads every weight for one row: only the way they come from memory matters, and
torch's product, made for many rows, takes them at half the speed or less. This one is C for processors that multiply
bfloat16 (AVX512-BF16), on the threads that torch has already. All else is torch, and so are more rows.
"""

from pathlib import Path

import torch
from torch import Tensor

from ramify.model.native import (
    CLibraryUnavailable,
    declare_arguments,
    find_torch_symbol,
    load_c_library,
    read_cpu_features,
)
from ramify.model.operators import DecoderOps, DecoderSizes, DecoderWeights

MAX_ROWS = 4  # rows; with twice as many torch is as fast
WIDTH_MULTIPLE = 32  # rows of a matrix are multiples of this


class SmallGemmDecoderOps(DecoderOps):
    """Torch's operators with products of few rows in C."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__(sizes, "torch, compiled for few rows")
        self._gomp_parallel = find_torch_symbol("GOMP_parallel")
        self._c_matmul = declare_arguments(
            load_c_library(Path(__file__).with_name("streamed.c"), f"FEW={MAX_ROWS}").product, "pippppiii"
        )

    def matmul(self, rows: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
        count, width = rows.shape
        if not 0 < count <= MAX_ROWS:  # none where a chunk of a prompt is computed and nothing sampled
            return super().matmul(rows, weight, addend)
        rows, out = rows.contiguous(), rows.new_empty(count, weight.shape[1])
        pointers = rows.data_ptr(), weight.data_ptr(), None if addend is None else addend.data_ptr(), out.data_ptr()
        self._c_matmul(self._gomp_parallel, torch.get_num_threads(), *pointers, count, width, out.shape[1])
        return out


def build_small_gemm_ops(sizes: DecoderSizes, weights: DecoderWeights) -> SmallGemmDecoderOps:
    """The operators for this model, or Unavailable, with the reason."""
    weight = weights.norm
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        raise CLibraryUnavailable(f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}")
    if not any("avx512_bf16" in line for line in read_cpu_features()):
        raise CLibraryUnavailable("no AVX512-BF16")
    if any(width % WIDTH_MULTIPLE for width in (sizes.hidden, sizes.heads * sizes.head_dim, sizes.inner)):
        raise CLibraryUnavailable(f"a width is no multiple of {WIDTH_MULTIPLE}")
    return SmallGemmDecoderOps(sizes)
