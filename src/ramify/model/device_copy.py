"""Copying arrays to a device without waiting for it.

A copy from ordinary memory waits until the device has finished all earlier work; a copy from pinned memory is queued
behind it, so the host can prepare the next pack while the device still computes this one. Each copy costs a tenth of a
millisecond whatever its size, and a pack has two dozen arrays, so they are copied together.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class DevicePeaks(NamedTuple):
    """What a device does per second at most: dense operations in bfloat16, and bytes from its memory."""

    flops: float
    memory_bytes: float


DEVICE_PEAKS = {
    "H200": DevicePeaks(989e12, 4.8e12),
    "H100": DevicePeaks(989e12, 3.35e12),
    "A100": DevicePeaks(312e12, 2.04e12),
}


def get_device_peaks(device_name: str) -> DevicePeaks | None:
    """Return the peaks of a device by its name; None if it is unknown."""
    return next((peaks for name, peaks in DEVICE_PEAKS.items() if name in device_name), None)


ALIGNMENT = 64  # bytes; compiled code needs 16
_PADDING = np.zeros(ALIGNMENT, np.uint8)
_TORCH_DTYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64")}


def copy_to_device(arrays: Iterable[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on `device`; on a CPU they may share the arrays' memory.

    One transfer brings all to a GPU. There each is copied to memory of its own, because torch.compile would specialize
    code on their offsets in a shared buffer.
    """
    if device.type != "cuda":  # some are read-only views of bytes
        return [torch.from_numpy(np.require(array, requirements=["C", "W"])) for array in arrays]
    host_arrays = list(arrays)
    parts = [
        part for array in host_arrays for part in (array.ravel().view(np.uint8), _PADDING[: -array.nbytes % ALIGNMENT])
    ]
    sizes = [len(part) for part in parts]
    staging = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    np.concatenate(parts, out=staging.numpy())
    device_bytes = staging.to(device, non_blocking=True).split(sizes)[::2]
    views = zip(device_bytes, host_arrays)
    return [data.view(_TORCH_DTYPES[array.dtype]).view(array.shape).clone() for data, array in views]


@contextlib.contextmanager
def use_own_stream(device: torch.device) -> Iterator[None]:
    """Run work on a stream of its own, without waiting for other work of a GPU; it is done when this returns."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
