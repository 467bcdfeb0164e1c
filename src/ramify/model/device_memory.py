"""Failures to allocate memory of a device.

PyTorch raises torch.OutOfMemoryError only for its own allocations. Triton, cuBLAS and cuDNN allocate beside it, and
raise RuntimeError.
"""

import re

import torch

_SHORTAGE_PATTERN = re.compile(
    r"Triton Error \[CUDA\]: out of memory|CUDA (driver )?error: out of memory"
    r"|CU(BLAS|BLASLT|DNN|SOLVER|SPARSE)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"  # a handle is created when first used
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an operation failed because its device has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _SHORTAGE_PATTERN.search(str(error)) is not None


def describe_shortage(error: BaseException) -> str:
    """Return what could not be allocated, without torch's advice."""
    return str(error).partition(" If reserved but unallocated")[0]
