"""Arrays onto a device without waiting for it.

A copy from ordinary memory waits until the device has done all it was told before; one from pinned memory takes its
turn behind that. So the host can make the next row while the device still computes this one. Each copy costs a tenth of
a millisecond whatever its size, and a row is two dozen arrays: they go together.
"""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; compiled code wants 16
_PADDING = np.zeros(ALIGNMENT, np.uint8)
_TORCH_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64")}


def copy_to_device(arrays: Iterable[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on `device`; on a CPU they may share the arrays' memory."""
    if device.type != "cuda":  # some are read-only views of bytes
        return [torch.from_numpy(np.require(each, requirements=["C", "W"])) for each in arrays]
    here = list(arrays)
    parts = [part for each in here for part in (each.ravel().view(np.uint8), _PADDING[: -each.nbytes % ALIGNMENT])]
    sizes = [len(part) for part in parts]
    parcel = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    np.concatenate(parts, out=parcel.numpy())
    there = parcel.to(device, non_blocking=True).split(sizes)[::2]
    return [part.view(_TORCH_DTYPES[each.dtype]).view(each.shape) for part, each in zip(there, here)]
