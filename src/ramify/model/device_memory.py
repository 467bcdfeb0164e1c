"""Free memory of a device, and failures to allocate it.

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


def get_free_bytes(device: torch.device) -> int:
    """Return how many bytes of a GPU PyTorch can still allocate, within the limit of this process; 0 if it cannot tell.

    `device` must have an index. Memory that is free in small pieces counts, too.
    """
    if torch.cuda.get_allocator_backend() != "native":  # cudaMallocAsync does not report the limit of the process
        return 0
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, limit - reserved) + reserved - torch.cuda.memory_allocated(device)
