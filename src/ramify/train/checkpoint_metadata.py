"""The metadata of a checkpoint: which tensors it holds and where, as torch's distributed checkpointing wrote it.

Torch stores it as a pickle, and an ordinary unpickler calls whatever a pickle names. The unpickler here allows only the
classes that this metadata consists of, and refuses every other name before anything is called.
"""

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ramify.core.errors import CheckpointRefused
from ramify.train.checkpoint_manifest import convert_read_errors

METADATA_FILE = ".metadata"


class MetadataReader(FileSystemReader):
    """Torch's reader of tensors, with metadata that `read_metadata` has read in place of torch's unpickler."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata = read_metadata(path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that was read before."""
        return self.metadata


def read_metadata(directory: Path) -> Metadata:
    """Read the metadata of a checkpoint. Raises CheckpointRefused, and no code of the file runs."""
    path = directory / METADATA_FILE
    with convert_read_errors(path):
        data = path.read_bytes()
    try:
        content = _MetadataUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged bytes can raise anything here
        raise CheckpointRefused(f"{path} is damaged: {error}") from error
    if not _is_valid(content):
        raise CheckpointRefused(f"{path} is damaged: it does not describe tensors and their storage")
    return content


def _is_valid(content: Any) -> bool:
    if not isinstance(content, Metadata):
        return False
    tensors: Any = content.state_dict_metadata
    storage: Any = content.storage_data
    return (
        isinstance(tensors, dict)
        and all(isinstance(name, str) and isinstance(entry, TensorStorageMetadata) for name, entry in tensors.items())
        and isinstance(storage, dict)
        and all(isinstance(index, MetadataIndex) and _is_storage_info(info) for index, info in storage.items())
    )


def _is_storage_info(info: Any) -> bool:
    return isinstance(info, StorageInfo) and info.relative_path == PurePosixPath(info.relative_path).name


class _MetadataUnpickler(pickle.Unpickler):
    """Loads the classes in `_ALLOWED` and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not part of a checkpoint's metadata")
        return _ALLOWED[module, name]


def _get_strided_layout(name: str) -> torch.layout:
    """Return torch.strided, the only layout that is saved. Replaces a function of torch that looks up any layout."""
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"expected tensors of layout torch.strided, found {name}")
    return torch.strided


StorageInfo: Any = filesystem._StorageInfo
_MEMORY_FORMAT: Any = metadata._MEM_FORMAT_ENCODING
_CLASSES = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata.ChunkStorageMetadata,
    _MEMORY_FORMAT,
    StorageInfo,
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(cls.__module__, cls.__qualname__): cls for cls in _CLASSES},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_strided_layout,
    # The directory that it was saved in, for information only. Its class has moved within the standard library.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}
