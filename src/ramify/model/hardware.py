"""The peaks of known GPUs, which utilization is measured against. Importable without torch."""

from typing import NamedTuple


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
