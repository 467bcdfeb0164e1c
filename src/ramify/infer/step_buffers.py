"""Memory through which a step's inputs reach the GPU and its results come back, while steps follow each other."""

import numpy as np
import torch
from torch import Tensor

NUM_HOST_COPIES = 3  # a step's inputs are copied while the next step is prepared


class UploadBuffer:
    """Numbers that change from step to step, at a fixed address on the device.

    Host memory is used in turns, because a copy is still under way when the next step is prepared.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._host: list[Tensor] = []
        self._next = 0
        self.device = torch.zeros(0, dtype=torch.int32, device=device)
        self.reserve(capacity)

    def reserve(self, capacity: int) -> bool:
        """Make room for `capacity` numbers; return whether the device memory has moved."""
        if capacity <= len(self.device):
            return False
        capacity = 1 << (capacity - 1).bit_length()
        on_gpu = self.device.device.type == "cuda"
        self._host = [torch.zeros(capacity, dtype=torch.int32, pin_memory=on_gpu) for _ in range(NUM_HOST_COPIES)]
        self.device = torch.zeros(capacity, dtype=torch.int32, device=self.device.device)
        return True

    def upload(self, *arrays: np.ndarray) -> None:
        """Copy arrays of 32-bit or 64-bit numbers to the device, one after the other; the copy is asynchronous."""
        host = self._host[self._next]
        self._next = (self._next + 1) % NUM_HOST_COPIES
        view, end = host.numpy(), 0
        for array in arrays:
            numbers = array.view(np.int32)
            view[end : end + len(numbers)] = numbers
            end += len(numbers)
        self.device[:end].copy_(host[:end], non_blocking=True)


class DownloadBuffer:
    """Host memory for the results of one step: for each row a token and the bits of its logprob."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._host = torch.zeros(max_rows, 2, dtype=torch.int32, pin_memory=self._on_gpu)
        self._event = torch.cuda.Event() if self._on_gpu else None

    def start(self, sampled: Tensor) -> None:
        """Begin to copy `sampled` [rows, 2]."""
        self._host[: len(sampled)].copy_(sampled, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def read(self, num_rows: int) -> tuple[list[int], list[float]]:
        """Wait for the copy; return tokens and logprobs."""
        if self._event is not None:
            self._event.synchronize()
        results = self._host[:num_rows].numpy()
        return results[:, 0].tolist(), results[:, 1].copy().view(np.float32).tolist()
