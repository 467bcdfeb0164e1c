"""Weights on disk: published whole or not at all, verified before anything changes, applied in place.

A version is a directory of safetensors files with a manifest that names it and holds a checksum of every file. It is
written beside its place and renamed into it, so a reader sees all of it or nothing. `stage` checks every file before it
reads it; only when every tensor is there, with the right shape, does `apply` copy them into the running model. A bad
directory therefore changes nothing.
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ramify.errors import WeightsRefused
from ramify.model.manifest import Manifest, check_checksum, compute_checksum, fsync_file, write_and_fsync
from ramify.model.version import PolicyVersion

SHARD_BYTES = 2 << 30
CONFIG_FILE = "config.json"
MODEL_FILES = (CONFIG_FILE, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Verified weights in memory, ready to be copied into the model they were verified for."""

    version: PolicyVersion
    tensors: Mapping[str, Tensor]


def publish_weights(
    directory: Path, tensors: Mapping[str, Tensor], version: PolicyVersion, *, base_model: Path | None = None
) -> Path:
    """Write `tensors` as `directory`, by rename. With `base`, its config and tokenizer come along: a whole model."""
    if directory.exists():
        raise WeightsRefused(f"{directory} exists already; a published version is never written twice")
    unfinished = directory.parent / f".{directory.name}.{os.getpid()}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        files: dict[str, str] = {}
        shards = list(_split_shards(tensors))
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            write_safetensors(unfinished / name, shard)
            files[name] = compute_checksum(unfinished / name)
        if len(shards) > 1:
            where = {key: name for shard, name in zip(shards, files) for key in shard}
            index = {"metadata": {}, "weight_map": where}
            write_and_fsync(unfinished / "model.safetensors.index.json", json.dumps(index, indent=2).encode())
        for name in MODEL_FILES:
            if base_model is not None and (base_model / name).is_file():
                shutil.copyfile(base_model / name, unfinished / name)
        _write_dtype_to_config(unfinished / CONFIG_FILE, tensors)
        Manifest(version, files).write(unfinished)
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return directory


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file with the permissions of any new file; it is on disk when this returns.

    Raises OSError: the library knows which one it met, but only mentions its number.
    """
    path.touch()
    mode = path.stat().st_mode & 0o777  # what the umask gives; the library's files can only be read by their owner
    try:
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:
        if found := re.search(r"os error (\d+)", str(error)):
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(path)) from error
        raise
    path.chmod(mode)
    fsync_file(path)


def _write_dtype_to_config(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the dtype that most of the weights are stored in into the model's config."""
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
    """The tensors that make up a version of this model: its state, tied copies left out."""
    tied = set(getattr(module, "all_tied_weights_keys", None) or ())
    return {name: tensor for name, tensor in module.state_dict().items() if name not in tied}


def stage_weights(directory: Path, module: Any) -> StagedWeights:
    """Read and verify `directory` for this model; WeightsRefused, and nothing has changed, if it does not fit."""
    manifest = Manifest.read(directory)
    wanted = get_untied_tensors(module)
    tied = set(module.state_dict()) - set(wanted)
    found: dict[str, Tensor] = {}
    for name, digest in manifest.files.items():
        found.update(_read_verified(directory / name, digest))
    missing = sorted(set(wanted) - set(found))
    unknown = sorted(set(found) - set(wanted) - tied)
    if missing or unknown:
        said = [
            f"{len(names)} {what} ({', '.join(names[:3])})"
            for what, names in _label_mismatches(missing, unknown)
            if names
        ]
        raise WeightsRefused(f"{directory} does not fit the model: {'; '.join(said)}")
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            shapes = f"has shape {list(found[name].shape)}, the model {list(tensor.shape)}"
            raise WeightsRefused(f"{directory} does not fit the model: {name} {shapes}")
    return StagedWeights(
        manifest.version, {name: _copy_to_staging_memory(found[name], tensor) for name, tensor in wanted.items()}
    )


def _copy_to_staging_memory(loaded: Tensor, target: Tensor) -> Tensor:
    """A copy in memory, so that `apply` waits for no page of a file; pinned if it is to go to a GPU."""
    if target.device.type == "cuda":
        return loaded.to(target.dtype).pin_memory()
    return loaded.to(target.dtype, copy=True)


def apply_weights(module: Any, staged: StagedWeights) -> None:
    """Copy staged weights into the model, in place: every view of a parameter sees them."""
    with torch.no_grad():
        for name, tensor in get_untied_tensors(module).items():
            tensor.copy_(staged.tensors[name], non_blocking=True)


def _label_mismatches(missing: list[str], unknown: list[str]) -> list[tuple[str, list[str]]]:
    return [("tensors missing", missing), ("unknown tensors", unknown)]


def _read_verified(path: Path, digest: str) -> dict[str, Tensor]:
    check_checksum(path, digest)
    try:
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
