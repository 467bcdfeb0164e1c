"""Arrays onto a device without waiting for it.

A copy from ordinary memory waits until the device has done all it was told before; one from pinned memory takes its
turn behind that. So the host can make the next row while the device still computes this one.
"""

import numpy as np
import torch
from torch import Tensor


def put(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on `device`; on a CPU it may share the array's memory."""
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))  # columns may be views of bytes
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
