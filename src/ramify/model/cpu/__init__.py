"""Operators in C for CPUs, and their PyTorch wrappers.

`build_cpu_ops` is the entry point. Every implementation subclasses `ramify.model.decoder_ops.DecoderOps`, the plain
PyTorch reference, and is used only after its logits were compared with those of the model itself. C sources are
compiled when a model is loaded; if that is impossible, `CLibraryUnavailable` says why and PyTorch does the work.
"""

import torch

from ramify.model.cpu.c_library import CLibraryUnavailable as CLibraryUnavailable
from ramify.model.cpu.decoder import build_compiled_ops
from ramify.model.cpu.small_gemm import build_small_gemm_ops
from ramify.model.decoder_ops import DecoderOps, DecoderSizes, DecoderWeights


def build_cpu_ops(sizes: DecoderSizes, weights: DecoderWeights) -> DecoderOps:
    """Return the operators in C for the dtype of a model. Raises CLibraryUnavailable."""
    build = build_small_gemm_ops if weights.norm.dtype == torch.bfloat16 else build_compiled_ops
    return build(sizes, weights)
