"""Operators in C for CPUs, and their PyTorch wrappers.

`build_cpu_ops` is the entry point. Every implementation subclasses `ramify.model.kernels.decoder_ops.DecoderOps`, the
plain PyTorch reference, and is used only after its logits were compared with the model's own logits. C sources are
compiled when a model is loaded; if that is impossible, `CLibraryUnavailable` says why and PyTorch does the work.
"""

import torch

from ramify.model.kernels.cpu.c_library import CLibraryUnavailable as CLibraryUnavailable
from ramify.model.kernels.cpu.decoder import CompiledDecoderOps, SmallGemmDecoderOps
from ramify.model.kernels.decoder_ops import DecoderOps, DecoderSizes, DecoderWeights


def build_cpu_ops(sizes: DecoderSizes, weights: DecoderWeights) -> DecoderOps:
    """Return the operators in C for the dtype of a model. Raises CLibraryUnavailable."""
    ops_class = SmallGemmDecoderOps if weights.norm.dtype == torch.bfloat16 else CompiledDecoderOps
    return ops_class(sizes, weights)
