"""Weights on disk: published atomically, verified before anything changes, applied in place.

A version is a directory of safetensors files with a manifest that names it and holds a checksum of every file. It is
written to a temporary directory and renamed, so a reader sees all of it or nothing. `stage_weights` checks every file
before it reads it, and every tensor by name and shape; only then does `apply_weights` copy the tensors into the running
model. A bad directory therefore changes nothing.

Tensors in a trainer's memory (`ramify.model.shared_weights`) are not staged, but verified after they were copied.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ramify.core.errors import WeightsMissing, WeightsRefused
from ramify.core.files import create_directory, fsync_path, write_and_fsync
from ramify.core.watchdog import watch_storage
from ramify.model.device_copy import use_own_stream
from ramify.model.resolve import is_loaded_as_text
from ramify.model.weights_manifest import (
    Manifest,
    PublishedAdapters,
    check_checksum,
    check_same_tensors,
    compute_checksum,
)
from ramify.trace.version import PolicyVersion

SHARD_BYTES = 2 << 30
ADAPTER_INFIX = ".lora_"  # in the names of an adapter's matrices
CONFIG_FILE = "config.json"
TEXT_FILES = (CONFIG_FILE, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")

CHECKSUM_WORDS = 1 << 22  # words summed at a time
CHECKSUM_FACTOR = 0x5851F42D4C957F2D  # odd, so that the order of the parts matters


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights in memory, ready to be copied into the model whose names and shapes they have.

    `checksum` is set if they are in another process's memory: what was copied is then verified.
    """

    version: PolicyVersion
    tensors: Mapping[str, Tensor]
    checksum: tuple[int, int] | None = None


def publish_weights(
    directory: Path,
    tensors: Mapping[str, Tensor],
    version: PolicyVersion,
    *,
    base_model: Path | None = None,
    adapters: PublishedAdapters | None = None,
) -> Path:
    """Write `tensors` as the directory of a version, by rename. Raises WeightsRefused if it exists.

    If `base_model` is given, its config and tokenizer are copied, so that the directory is a complete model. If only
    the text part of a vision-language model is loaded, its text config is written instead, and files for images are
    left out. If `adapters` is given, the tensors are only adapters; `load_hf_model` merges them into their base model.
    """
    with watch_storage(directory):
        is_published = directory.exists()
    if is_published:
        raise WeightsRefused(f"{directory} exists already; a published version is never written twice")
    with create_directory(directory) as partial_path:
        files: dict[str, str] = {}
        stem = "model" if adapters is None else "adapters"
        shards = _split_shards(tensors)
        for number, shard in enumerate(shards, 1):
            name = f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{number:05}-of-{len(shards):05}.safetensors"
            with watch_storage(directory, sum(tensor.nbytes for tensor in shard.values())):
                write_safetensors(partial_path / name, shard)
            files[name] = compute_checksum(partial_path / name)
        if len(shards) > 1:
            weight_map = {key: name for shard, name in zip(shards, files) for key in shard}
            index = {"metadata": {}, "weight_map": weight_map}
            write_and_fsync(partial_path / f"{stem}.safetensors.index.json", json.dumps(index, indent=2).encode())
        for name in (*TEXT_FILES, *IMAGE_FILES):
            if base_model is not None and (base_model / name).is_file():
                shutil.copyfile(base_model / name, partial_path / name)
        _make_text_model(partial_path)
        _write_dtype_to_config(partial_path / CONFIG_FILE, tensors)
        Manifest(version, files, adapters).write(partial_path)
    return directory


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file with the permissions of any new file; it is on disk when this returns. Raises OSError.

    The library reports an OS error only as text with its number, which is raised as OSError here.
    """
    path.touch()
    mode = path.stat().st_mode & 0o777  # by the umask; the library makes files that only their owner can read
    try:
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:
        if match := re.search(r"os error (\d+)", str(error)):
            number = int(match[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
    path.chmod(mode)
    fsync_path(path)


def _make_text_model(directory: Path) -> None:
    """Leave only what a text model has if only the text part of the vision-language model is loaded."""
    path = directory / CONFIG_FILE
    if not is_loaded_as_text(directory):
        return
    config = json.loads(path.read_text("utf-8"))
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text_config = config["text_config"]
    text_config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    path.write_text(json.dumps(text_config, indent=2), "utf-8")
    for name in IMAGE_FILES:
        (directory / name).unlink(missing_ok=True)


def _write_dtype_to_config(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Set the dtype in the model's config to the one that most of the weights are stored in."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    if not path.is_file() or not sizes:
        return
    config = json.loads(path.read_text("utf-8"))
    dtype = sizes.most_common(1)[0][0]
    for table in (config, *(value for value in config.values() if isinstance(value, dict))):
        table.update({key: dtype for key in ("dtype", "torch_dtype") if key in table})
    if "torch_dtype" not in config:
        config["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2), "utf-8")


def get_untied_tensors(module: Any) -> dict[str, Tensor]:
    """Return the tensors that make up a version of this model.

    They are its adapters if it has some, or else its state dict without tied copies.
    """
    tensors, tied = module.state_dict(), set(getattr(module, "all_tied_weights_keys", None) or ())
    adapters = {name: tensor for name, tensor in tensors.items() if ADAPTER_INFIX in name}
    return adapters or {name: tensor for name, tensor in tensors.items() if name not in tied}


def stage_weights(directory: Path, module: Any) -> StagedWeights:
    """Read and verify a version for this model, which is not changed. Raises WeightsRefused if it does not fit."""
    model_tensors = get_untied_tensors(module)
    tied = set(module.state_dict()) - set(model_tensors)
    manifest, tensors = read_tensors(directory)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if name not in tied}
    check_same_tensors(directory, shapes, {name: list(tensor.shape) for name, tensor in model_tensors.items()})
    return StagedWeights(manifest.version, _stage_tensors(tensors, model_tensors))


def read_tensors(directory: Path) -> tuple[Manifest, dict[str, Tensor]]:
    """Read and verify the tensors of a version. Raises WeightsRefused."""
    manifest = Manifest.read(directory)
    tensors: dict[str, Tensor] = {}
    for name, digest in manifest.files.items():
        tensors.update(_read_verified(directory / name, digest))
    return manifest, tensors


def get_tensors_for(module: Any, source: Any) -> dict[str, Tensor]:
    """Return the tensors of the model `source`, to copy into `module`.

    Raises WeightsRefused unless both have the same names and shapes.
    """
    tensors, targets = get_untied_tensors(source), get_untied_tensors(module)
    shapes, expected = ({name: list(item.shape) for name, item in table.items()} for table in (tensors, targets))
    check_same_tensors(type(source).__name__, shapes, expected)
    return tensors


def _stage_tensors(tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the tensors for their targets, so that `apply_weights` reads no file.

    They go to the device of the targets, on a GPU by a stream of their own, or to pinned memory if the GPU is too full.
    """
    device = next(iter(targets.values())).device
    if device.type != "cuda":
        return {name: tensors[name].to(target.dtype, copy=True) for name, target in targets.items()}
    num_bytes = sum(target.nbytes for target in targets.values())
    if num_bytes > torch.cuda.mem_get_info(device)[0] // 2:  # requests need the rest
        return {name: tensors[name].to(target.dtype).pin_memory() for name, target in targets.items()}
    with use_own_stream(device):
        return {name: tensors[name].to(device=device, dtype=target.dtype) for name, target in targets.items()}


def apply_weights(module: Any, staged: StagedWeights) -> None:
    """Copy staged weights into the model, in place: every view of a parameter changes with it.

    Raises WeightsMissing if the checksum differs; the model then holds a mixture of versions.
    """
    with torch.no_grad():
        copies = _copy_tensors(get_untied_tensors(module), staged.tensors)
        if staged.checksum is None:
            for _ in copies:
                pass
            return
        try:
            checksum = compute_tensor_checksum(copies)
        except RuntimeError as error:
            raise WeightsMissing(f"{staged.version} could not be copied from the trainer: {error}") from error
        if checksum != staged.checksum:
            raise WeightsMissing(f"the trainer has changed its memory while {staged.version} was copied")


def _copy_tensors(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Copy the sources in the order of their names, and yield what was read of each, in its own dtype."""
    for name in sorted(targets):
        target, source = targets[name], sources[name]
        if target.dtype == source.dtype:
            yield target.copy_(source, non_blocking=True)
        else:
            copied = source.clone()
            target.copy_(copied, non_blocking=True)
            yield copied


def compute_tensor_checksum(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Return the sum of the 8-byte words of tensors and a sum weighted by position, modulo 2^64, on their device."""
    total: Tensor | None = None
    for words in _join_small_tensors(map(_view_as_words, tensors)):
        weights = torch.arange(1, 2 * min(CHECKSUM_WORDS, len(words)) + 1, 2, device=words.device)
        total = torch.zeros(2, dtype=torch.int64, device=words.device) if total is None else total
        for part in words.split(CHECKSUM_WORDS):
            total = total * CHECKSUM_FACTOR + torch.stack([part.sum(), (part * weights[: len(part)]).sum()])
    first, second = (0, 0) if total is None else total.tolist()
    return first, second


def _view_as_words(tensor: Tensor) -> Tensor:
    """Return the 8-byte words of a tensor, padded with zeros."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    if data.nbytes % 8 or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(-data.nbytes % 8)])
    return data.view(torch.int64)


def _join_small_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield these vectors, small ones joined up to `CHECKSUM_WORDS`, because a launch takes longer than their sums."""
    small: list[Tensor] = []
    for tensor in tensors:
        if small and sum(map(len, small)) + len(tensor) > CHECKSUM_WORDS:
            yield torch.cat(small)
            small = []
        if len(tensor) > CHECKSUM_WORDS:
            yield tensor
        else:
            small.append(tensor)
    if small:
        yield torch.cat(small)


def _read_verified(path: Path, digest: str) -> dict[str, Tensor]:
    check_checksum(path, digest)
    try:
        with watch_storage(path):
            num_bytes = path.stat().st_size
        with watch_storage(path, num_bytes):
            return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsRefused(f"{path} is not a safetensors file: {error}") from error


def _split_shards(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards
