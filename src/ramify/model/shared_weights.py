"""Weights in a trainer's memory, from which engines on the same device copy them.

The trainer exports the tensors that it computes with, once, by CUDA IPC; on a CPU they are in a file that both map.
Another small file, the announcement, names the version that the tensors hold, and its checksum. While a version is
announced, the trainer does not change its tensors. Before it does, it waits for a limited time until the engines have
copied them, and withdraws the announcement. An engine copies the tensors between two steps, directly into its own
weights, and then compares the checksum. It holds a lock meanwhile, for which a trainer that has withdrawn the version
waits: an engine may have begun just before. If the trainer's time is up, the checksum differs, and the engine has no
weights until it has loaded the version's directory or a newer version. `docs/design/weights.md` lists the cases.
"""

import contextlib
import fcntl
import math
import os
import re
import select
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ramify.core.errors import WeightsRefused
from ramify.core.files import flock_with_timeout, write_atomically
from ramify.model.weights import StagedWeights, compute_tensor_checksum, get_untied_tensors
from ramify.model.weights_manifest import check_same_tensors
from ramify.run.fencing.token import TOKEN_PATTERN, FencingToken
from ramify.trace.version import PolicyVersion

_FILE_PATTERN = re.compile(rf"(?:announced|shared)-({TOKEN_PATTERN})\.(?:msgpack|bin|lock)")  # with the trainer's token
ALIGNMENT = 64  # bytes between the starts of tensors
COPY_TIMEOUT = 10.0  # seconds that a trainer waits for a copy that has begun
POLL_INTERVAL = 1e-3


class CudaHandle(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor is in the memory of a GPU, as torch describes it for CUDA IPC."""

    stride: tuple[int, ...]
    offset: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the trainer. `start` is its first byte in the mapped file, if it is not on a GPU."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    cuda_handle: CudaHandle | None = None


class Announcement(msgspec.Struct, frozen=True):
    """The version that a trainer's tensors hold. `directory` is the name of the directory that will hold it too.

    `is_current` is false once the version is withdrawn. `location` is the UUID of the GPU or the path of the mapped
    file, and `export_id` identifies the tensors: they are the same in all announcements of a trainer. `pid` is its
    process.
    """

    version: PolicyVersion
    directory: str
    checksum: tuple[int, int]
    is_current: bool
    export_id: str
    location: str
    pid: int
    tensors: list[SharedTensor]

    @classmethod
    def read(cls, directory: Path) -> "Announcement | None":
        """Return what the trainer of a version's directory announced last; None if nothing. Raises WeightsRefused."""
        path = _get_announcement_path(directory)
        try:
            return msgspec.msgpack.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise WeightsRefused(f"{path} is not a readable announcement of weights: {error}") from error


class SharedWeights:
    """The weights of the trainer `incarnation`, for readers that find its announcements in `weights_directory`.

    `tensors` are a version of the weights. Those that are tensors of `module` are shared, not copied: on a CPU, the
    module's tensors move into the mapped file. The others, such as matrices with merged adapters, are kept here.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        module: nn.Module,
        weights_directory: Path,
        incarnation: int,
        *,
        copy_timeout: float = COPY_TIMEOUT,
    ) -> None:
        weights_directory.mkdir(parents=True, exist_ok=True)
        self._copy_timeout = copy_timeout
        token = FencingToken.from_number(incarnation)
        self._announcement_path = weights_directory / f"announced-{token}.msgpack"
        _get_lock_path(self._announcement_path).touch()
        self._announcement: Announcement | None = None
        self._host_tensors: dict[str, Tensor] | None = None
        device = next(iter(tensors.values())).device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._export_id = uuid4().hex
        if device.type == "cuda":
            self._location, self.tensors = _get_gpu_uuid(device), dict(tensors)
            self._shared_tensors = [_share_cuda_tensor(name, tensor) for name, tensor in tensors.items()]
            return
        path = weights_directory / f"shared-{token}.bin"
        self.tensors = _allocate_like(tensors, partial(_map_file, path))
        self._location = str(path.resolve())
        self._shared_tensors = [
            SharedTensor(name, _get_dtype_name(view), tuple(view.shape), int(view.storage_offset()) * view.itemsize)
            for name, view in self.tensors.items()
        ]
        owned = {(tensor.data_ptr(), tensor.shape): tensor for tensor in module.state_dict(keep_vars=True).values()}
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)
            if (owner := owned.get((tensor.data_ptr(), tensor.shape))) is not None:
                owner.data = self.tensors[name]

    @property
    def announced_version(self) -> PolicyVersion | None:
        """The version that is announced now."""
        return self._announcement.version if self._announcement is not None else None

    def copy_unshared_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors of a new version that are not shared. No version may be announced meanwhile."""
        assert self._announcement is None, "withdraw the announced version first"
        for name, tensor in tensors:
            if tensor.data_ptr() != self.tensors[name].data_ptr():
                self.tensors[name].copy_(tensor)

    def announce(self, version: PolicyVersion, directory: str) -> None:
        """Announce that the tensors hold `version`. They must not change until `withdraw` is called."""
        checksum = compute_tensor_checksum(self.tensors[name] for name in sorted(self.tensors))  # waits for the device
        self._announcement = Announcement(
            version, directory, checksum, True, self._export_id, self._location, os.getpid(), self._shared_tensors
        )
        write_atomically(self._announcement_path, msgspec.msgpack.encode(self._announcement))

    def withdraw(self) -> None:
        """Withdraw the announced version, if there is one: the tensors may change when this returns.

        An engine that has begun to copy them has `copy_timeout` seconds to finish.
        """
        if self._announcement is not None:
            withdrawn = msgspec.structs.replace(self._announcement, is_current=False)
            write_atomically(self._announcement_path, msgspec.msgpack.encode(withdrawn))
            self._announcement = None
            with contextlib.suppress(OSError), _get_lock_path(self._announcement_path).open() as file:
                flock_with_timeout(file, fcntl.LOCK_EX, timeout=self._copy_timeout, poll_interval=POLL_INTERVAL)
        self.finish_host_copy()

    def start_host_copy(self) -> Mapping[str, Tensor]:
        """Start to copy the tensors to host memory, while the device goes on; the copy is valid until the next call."""
        if self._host_tensors is None:
            is_pinned = self._stream is not None
            self._host_tensors = _allocate_like(
                self.tensors, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
            )
        if self._stream is None:
            for name, tensor in self.tensors.items():
                self._host_tensors[name].copy_(tensor)
            return self._host_tensors
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for name, tensor in self.tensors.items():
                self._host_tensors[name].copy_(tensor, non_blocking=True)
        return self._host_tensors

    def finish_host_copy(self) -> None:
        """Wait until the copy in host memory is complete, if one was started."""
        if self._stream is not None:
            self._stream.synchronize()


class MemoryUnreadable(Exception):
    """The trainer's memory cannot be reached from this process, or holds another version; the text says why."""


class SharedWeightsReader:
    """An engine's access to the tensors of trainers, which stay mapped until their trainer ends or is replaced.

    A GPU's memory is free again only when no process maps it: the next trainer needs it.
    """

    def __init__(self) -> None:
        self._export_id, self._tensors = "", dict[str, Tensor]()
        self._trainer: ObservedProcess | None = None

    def stage(self, announcement: Announcement, module: Any) -> StagedWeights:
        """Return the tensors of the trainer, to be copied into this model while their version is announced.

        Raises MemoryUnreadable, or WeightsRefused if the version does not fit the model.
        """
        targets = get_untied_tensors(module)
        check_same_tensors(
            Path(announcement.directory),
            {tensor.name: list(tensor.shape) for tensor in announcement.tensors},
            {name: list(target.shape) for name, target in targets.items()},
        )
        check_current(announcement)
        if announcement.export_id != self._export_id:
            self._unmap()
            try:
                self._trainer = ObservedProcess(announcement.pid)
                self._tensors = _map_tensors(announcement, next(iter(targets.values())).device)
            except (OSError, RuntimeError) as error:  # the trainer has ended, or memory cannot be shared with it
                raise MemoryUnreadable(f"the trainer's memory cannot be mapped: {error}") from error
            self._export_id = announcement.export_id
        return StagedWeights(announcement.version, self._tensors, announcement.checksum)

    def unmap_if_trainer_ended(self) -> None:
        """Unmap the tensors of a trainer whose process has ended. What is staged stays mapped until it is copied."""
        if self._trainer is not None and self._trainer.has_ended():
            self._unmap()

    def _unmap(self) -> None:
        self._export_id, self._tensors, self._trainer = "", {}, None


class ObservedProcess:
    """A process of this machine, which `pid` names now."""

    def __init__(self, pid: int) -> None:
        self._poller = select.poll()
        with contextlib.suppress(OSError):  # it has ended, or is in a container of its own
            fd = os.pidfd_open(pid)
            self._poller.register(fd, select.POLLIN)
            weakref.finalize(self, os.close, fd)

    def has_ended(self) -> bool:
        """Return whether the process has ended since; False if that is unknown."""
        return bool(self._poller.poll(0))


def check_current(announcement: Announcement) -> None:
    """Raise MemoryUnreadable if the version is withdrawn."""
    if not announcement.is_current:
        raise MemoryUnreadable("the trainer has withdrawn the version from its memory")


@contextlib.contextmanager
def hold_announced(directory: Path) -> Generator[None]:
    """Prevent the trainer from changing its tensors, which hold the version of `directory`, for up to its timeout.

    Raises MemoryUnreadable unless the tensors hold that version.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks: the checksum shows if the tensors changed
            file = stack.enter_context(_get_lock_path(_get_announcement_path(directory)).open())
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # not blocked while a version is announced
        announcement = Announcement.read(directory)
        if announcement is None or announcement.directory != directory.name:
            raise MemoryUnreadable("the trainer has announced another version")
        check_current(announcement)
        yield


def _get_announcement_path(directory: Path) -> Path:
    """Return the path of what the trainer of a version's directory announced."""
    return directory.parent / f"announced-{directory.name.rpartition('-')[0]}.msgpack"


def _get_lock_path(announcement_path: Path) -> Path:
    return announcement_path.with_suffix(".lock")


def remove_announcements(weights_directory: Path, incarnation: int) -> None:
    """Remove what trainers up to `incarnation` announced: the trainer that calls this has replaced them."""
    for path in weights_directory.glob("*-*.*"):
        match = _FILE_PATTERN.fullmatch(path.name)
        if match and FencingToken.parse(match[1]).number <= incarnation:
            path.unlink(missing_ok=True)


def _allocate_like(tensors: Mapping[str, Tensor], allocate: Callable[[int], Tensor]) -> dict[str, Tensor]:
    """Return tensors with the same shapes and dtypes, which are views of one buffer of bytes."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors.values()]
    parts = allocate(sum(sizes)).split(sizes)
    return {name: _view(part, tensor.dtype, tensor.shape) for part, (name, tensor) in zip(parts, tensors.items())}


def _view(data: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return data[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _map_file(path: Path, size: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _share_cuda_tensor(name: str, tensor: Tensor) -> SharedTensor:
    rebuild_args: tuple[Any, ...] = reduce_tensor(tensor.detach())[1]
    _, _, stride, offset, _, _, _, handle, storage_bytes, storage_offset, _, *ipc_fields = rebuild_args
    cuda_handle = CudaHandle(tuple(stride), offset, handle, storage_bytes, storage_offset, *ipc_fields)
    return SharedTensor(name, _get_dtype_name(tensor), tuple(tensor.shape), cuda_handle=cuda_handle)


def _map_tensors(announcement: Announcement, device: torch.device) -> dict[str, Tensor]:
    """Map the tensors of a trainer into this process. Raises MemoryUnreadable, OSError or RuntimeError."""
    tensors = announcement.tensors
    if tensors[0].cuda_handle is not None:
        if device.type != "cuda" or announcement.location != _get_gpu_uuid(device):
            raise MemoryUnreadable("the trainer's tensors are not in the memory of this engine's device")
        return {tensor.name: _open_cuda_tensor(tensor, device) for tensor in tensors}
    path = Path(announcement.location)
    if not path.is_file():  # otherwise torch would create it
        raise MemoryUnreadable(f"{path} does not exist")
    file_bytes = _map_file(path, path.stat().st_size)
    return {item.name: _view(file_bytes[item.start :], getattr(torch, item.dtype), item.shape) for item in tensors}


def _open_cuda_tensor(tensor: SharedTensor, device: torch.device) -> Tensor:
    handle = tensor.cuda_handle
    assert handle is not None
    return rebuild_cuda_tensor(
        Tensor,
        torch.Size(tensor.shape),
        handle.stride,
        handle.offset,
        torch.storage.TypedStorage,
        getattr(torch, tensor.dtype),
        torch.cuda.current_device() if device.index is None else device.index,
        handle.handle,
        handle.storage_bytes,
        handle.storage_offset,
        False,
        handle.ref_counter_handle,
        handle.ref_counter_offset,
        handle.event_handle,
        handle.event_sync_required,
    )


def _get_dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _get_gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
