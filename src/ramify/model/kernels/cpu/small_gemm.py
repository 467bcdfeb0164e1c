"""Products of a few bfloat16 rows in C (`small_gemm.c`), at the speed of memory.

With one request at a time a decode step reads every weight for one row, so only memory bandwidth matters; torch's
product, made for many rows, reaches half of it or less. The C code needs AVX512-BF16 and uses torch's own threads. All
other operators, and products of more rows, are PyTorch.
"""

from pathlib import Path

import torch
from torch import Tensor

from ramify.model.kernels.cpu.c_library import (
    CLibraryUnavailable,
    declare_arguments,
    find_torch_symbol,
    load_c_library,
    read_cpu_features,
)
from ramify.model.kernels.cpu.decoder import check_placement
from ramify.model.kernels.decoder_ops import DecoderOps, DecoderSizes, DecoderWeights

MAX_ROWS = 4  # with twice as many rows torch is as fast
WIDTH_MULTIPLE = 32  # widths of matrices must be multiples of this


class SmallGemmDecoderOps(DecoderOps):
    """PyTorch operators with products of at most `MAX_ROWS` bfloat16 rows in C. Raises CLibraryUnavailable."""

    def __init__(self, sizes: DecoderSizes, weights: DecoderWeights) -> None:
        check_placement(weights, torch.bfloat16)
        if not any("avx512_bf16" in line for line in read_cpu_features()):
            raise CLibraryUnavailable("no AVX512-BF16")
        if any(width % WIDTH_MULTIPLE for width in (sizes.hidden, sizes.heads * sizes.head_dim, sizes.inner)):
            raise CLibraryUnavailable(f"a width is no multiple of {WIDTH_MULTIPLE}")
        super().__init__(sizes, "torch, compiled for few rows")
        self._gomp_parallel = find_torch_symbol("GOMP_parallel")
        library = load_c_library(Path(__file__).with_name("small_gemm.c"), f"MAX_ROWS={MAX_ROWS}")
        self._c_matmul = declare_arguments(library.matmul, "pippppiii")

    def matmul(self, rows: Tensor, weight: Tensor, addend: Tensor | None = None) -> Tensor:
        """Multiply a few rows with a weight in C; other sizes are left to the base class."""
        count, width = rows.shape
        if not 0 < count <= MAX_ROWS:  # 0 if a chunk of a prompt is computed and nothing is sampled
            return super().matmul(rows, weight, addend)
        rows, out = rows.contiguous(), rows.new_empty(count, weight.shape[1])
        addresses = rows.data_ptr(), weight.data_ptr(), None if addend is None else addend.data_ptr(), out.data_ptr()
        self._c_matmul(self._gomp_parallel, torch.get_num_threads(), *addresses, count, width, out.shape[1])
        return out
