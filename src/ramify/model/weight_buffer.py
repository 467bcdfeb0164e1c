"""Weights handed over in memory, by a trainer to engines on the same device.

The trainer owns one buffer that holds all tensors of a version. A small file, the announcement, names the version, says
where the buffer is and holds its checksum. An engine maps the buffer (by CUDA IPC, or as a mapped file on a CPU),
copies it into memory of its own, and compares the checksum of the copy. A trainer that dies or fills its buffer again
in the meantime therefore cannot tear the weights of an engine: the copy is refused, and the engine reads the version's
directory instead. Directories follow in the background, not one for each version, but always one for the last: a
version is in the buffer or on disk, or a newer one has replaced it.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ramify.core.errors import WeightsRefused
from ramify.core.files import write_atomically
from ramify.model.device_copy import use_own_stream
from ramify.model.weights import StagedWeights, get_untied_tensors, has_room_for_staging
from ramify.model.weights_manifest import check_same_tensors
from ramify.run.fencing.token import TOKEN_PATTERN, FencingToken
from ramify.trace.version import PolicyVersion

_FILE_PATTERN = re.compile(rf"(?:announced|buffer)-({TOKEN_PATTERN})\.(?:msgpack|bin)")  # with the trainer's token
ALIGNMENT = 64  # bytes between the starts of tensors
CHECKSUM_WORDS = 1 << 22  # that are summed at a time
CHECKSUM_FACTOR = 0x5851F42D4C957F2D  # odd, so that the order of the parts matters


class TensorSlot(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor is in the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor as a view of the buffer."""
        dtype = getattr(torch, self.dtype)
        stop = self.start + math.prod(self.shape) * dtype.itemsize
        return buffer[self.start : stop].view(dtype).view(self.shape)


class FileLocation(msgspec.Struct, frozen=True, tag="file"):
    """A buffer in a file, which readers map into memory."""

    path: str


class CudaLocation(msgspec.Struct, frozen=True, tag="cuda"):
    """A buffer in the memory of a GPU: its UUID, and the IPC handle as torch makes it."""

    gpu_uuid: str
    handle: bytes
    storage_bytes: int
    storage_offset: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class Announcement(msgspec.Struct, frozen=True):
    """A version in a buffer. `directory` is the name of the directory that will hold it too."""

    version: PolicyVersion
    directory: str
    num_bytes: int
    checksum: tuple[int, int]
    slots: list[TensorSlot]
    location: FileLocation | CudaLocation

    @classmethod
    def read(cls, directory: Path) -> "Announcement | None":
        """Return what the trainer of a version's directory announced last; None if nothing. Raises WeightsRefused."""
        path = directory.parent / f"announced-{directory.name.rpartition('-')[0]}.msgpack"
        try:
            return msgspec.msgpack.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise WeightsRefused(f"{path} is not a readable announcement of weights: {error}") from error


class WeightBuffer:
    """The buffer of the trainer `incarnation`, filled with a copy of `tensors` and announced in `weights_directory`.

    The attribute `tensors` has views of the buffer, into which later versions are written.
    """

    def __init__(self, tensors: Mapping[str, Tensor], weights_directory: Path, incarnation: int) -> None:
        weights_directory.mkdir(parents=True, exist_ok=True)
        token = FencingToken.from_number(incarnation)
        self._announcement_path = weights_directory / f"announced-{token}.msgpack"
        self._slots: list[TensorSlot] = []
        size = 0
        for name, tensor in tensors.items():
            self._slots.append(TensorSlot(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size))
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        device = next(iter(tensors.values())).device
        self._bytes, self._location = _allocate_shared(size, device, weights_directory / f"buffer-{token}.bin")
        self.tensors = {slot.name: slot.view(self._bytes) for slot in self._slots}
        self._host_copy: Tensor | None = None
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    def announce(self, version: PolicyVersion, directory: str) -> None:
        """Announce that the buffer holds `version` now. It may be refilled at any time: readers verify the checksum."""
        checksum = compute_buffer_checksum(self._bytes)  # waits for the device
        size = self._bytes.nbytes
        announcement = Announcement(version, directory, size, checksum, self._slots, self._location)
        write_atomically(self._announcement_path, msgspec.msgpack.encode(announcement))

    def copy_to_host(self) -> dict[str, Tensor]:
        """Return a copy of the tensors in host memory, valid until the next call; other work of the device goes on."""
        if self._host_copy is None:
            self._host_copy = torch.empty_like(self._bytes, device="cpu", pin_memory=self._bytes.is_cuda)
        with use_own_stream(self._bytes.device):
            self._host_copy.copy_(self._bytes)
        return {slot.name: slot.view(self._host_copy) for slot in self._slots}


class BufferUnreadable(Exception):
    """A buffer cannot be reached from this process, or no longer holds the announced version; the text says why."""


class WeightBufferReader:
    """An engine's access to the buffers of trainers; the mapping of the last one is kept."""

    def __init__(self) -> None:
        self._location: FileLocation | CudaLocation | None = None
        self._mapped: Tensor | None = None

    def stage(self, announcement: Announcement, module: Any) -> StagedWeights:
        """Copy and verify the announced version for this model, which is not changed.

        Raises BufferUnreadable, or WeightsRefused if the version does not fit the model.
        """
        targets = get_untied_tensors(module)
        check_same_tensors(
            Path(announcement.directory),
            {slot.name: list(slot.shape) for slot in announcement.slots},
            {name: list(target.shape) for name, target in targets.items()},
        )
        device = next(iter(targets.values())).device
        mapped = self._map(announcement, device)
        with use_own_stream(device):
            copied = _copy_mapped_buffer(mapped, device)
            if compute_buffer_checksum(copied) != announcement.checksum:
                raise BufferUnreadable("the trainer has changed its buffer")
            tensors = {slot.name: slot.view(copied).to(targets[slot.name].dtype) for slot in announcement.slots}
        return StagedWeights(announcement.version, tensors)

    def _map(self, announcement: Announcement, device: torch.device) -> Tensor:
        location = announcement.location
        if location == self._location and isinstance(location, CudaLocation) and self._mapped is not None:
            return self._mapped
        self._location = self._mapped = None  # unmaps the buffer of a trainer that was replaced
        try:
            mapped = _map_buffer(location, announcement.num_bytes, device)
        except (OSError, RuntimeError) as error:  # the trainer has ended, or memory cannot be shared with it
            raise BufferUnreadable(f"the buffer cannot be mapped: {error}") from error
        if mapped is None:
            raise BufferUnreadable("the buffer is not in the memory of this engine's device")
        self._location, self._mapped = location, mapped
        return mapped


def withdraw_announcements(weights_directory: Path, incarnation: int) -> None:
    """Remove what trainers up to `incarnation` announced: the trainer that calls this has replaced them."""
    for path in weights_directory.glob("*-*.*"):
        match = _FILE_PATTERN.fullmatch(path.name)
        if match and FencingToken.parse(match[1]).number <= incarnation:
            path.unlink(missing_ok=True)


def compute_buffer_checksum(data: Tensor) -> tuple[int, int]:
    """Return the sum of the 8-byte words of a buffer and a sum weighted by position, modulo 2^64, on its device."""
    words = data.view(torch.int64)
    weights = torch.arange(1, 2 * min(CHECKSUM_WORDS, len(words)), 2, device=data.device)
    total = torch.zeros(2, dtype=torch.int64, device=data.device)
    for part in words.split(CHECKSUM_WORDS):
        total = total * CHECKSUM_FACTOR + torch.stack([part.sum(), (part * weights[: len(part)]).sum()])
    first, second = total.tolist()
    return first, second


def _allocate_shared(size: int, device: torch.device, path: Path) -> tuple[Tensor, FileLocation | CudaLocation]:
    if device.type != "cuda":
        data = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return data, FileLocation(str(path.resolve()))
    data = torch.zeros(size, dtype=torch.uint8, device=device)
    rebuild_args: tuple[Any, ...] = reduce_tensor(data)[1]
    handle, storage_bytes, storage_offset, _, *ipc_fields = rebuild_args[7:]
    return data, CudaLocation(_get_gpu_uuid(device), handle, storage_bytes, storage_offset, *ipc_fields)


def _map_buffer(location: FileLocation | CudaLocation, size: int, device: torch.device) -> Tensor | None:
    """Map a buffer into this process; None if it is not in the memory of the device."""
    if isinstance(location, FileLocation):
        exists = Path(location.path).is_file()  # otherwise torch would create it
        return torch.from_file(location.path, shared=True, size=size, dtype=torch.uint8) if exists else None
    if device.type == "cuda" and location.gpu_uuid == _get_gpu_uuid(device):
        return _open_cuda_buffer(location, size, device)
    return None


def _open_cuda_buffer(location: CudaLocation, size: int, device: torch.device) -> Tensor:
    return rebuild_cuda_tensor(
        Tensor,
        torch.Size([size]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        torch.cuda.current_device() if device.index is None else device.index,
        location.handle,
        location.storage_bytes,
        location.storage_offset,
        False,
        location.ref_counter_handle,
        location.ref_counter_offset,
        location.event_handle,
        location.event_sync_required,
    )


def _copy_mapped_buffer(mapped: Tensor, device: torch.device) -> Tensor:
    """Copy a mapped buffer into this process: on its device, or in pinned memory if a GPU is too full."""
    if device.type != "cuda" or has_room_for_staging(mapped.nbytes, device):
        return mapped.clone()
    return torch.empty(mapped.shape, dtype=mapped.dtype, pin_memory=True).copy_(mapped)


def _get_gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
