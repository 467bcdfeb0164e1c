"""How new weights reach the engines of a run; restarted engines serve the newest, and a finished run saves them.

The transport is chosen when the run is planned: it changes speed, never results.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from ramify.core.errors import ConfigInvalid, WeightsRefused
from ramify.core.files import create_directory, get_free_bytes, remove_directory
from ramify.core.names import format_count
from ramify.core.watchdog import watch_storage
from ramify.infer.config import EngineConfig
from ramify.launch.capacity import fits
from ramify.launch.demands import ENGINE_PREFIX, TRAINER
from ramify.launch.head import read_local_state
from ramify.launch.memory import count_file_bytes, count_version_bytes, format_size, get_max_versions
from ramify.launch.placement import RunPlacement
from ramify.model.weights_manifest import MANIFEST_FILE, Manifest
from ramify.orchestrate.run_config import RunConfig
from ramify.run.store import storage_call
from ramify.train.memory import ModelSize
from ramify.train.weights_directory import SHM_ROOT, get_weights_directory, lock_directory, remove_stale_directories


def choose_transport(config: RunConfig, placement: RunPlacement) -> str:
    """Return `weights.transport` with `auto` replaced. Raises ConfigInvalid if `ipc` is not possible."""
    transport, engines = config.weights.transport, placement.list_names(ENGINE_PREFIX)
    is_native = isinstance(config.inference, EngineConfig)
    num_ranks = placement.get_demand(TRAINER).num_ranks
    can_share = is_native and num_ranks == 1  # weights of several ranks are sharded
    beside = [name for name in engines if can_share and is_beside_trainer(name, placement)]
    if config.weights.shares_memory and not beside:
        needed = "a native engine that the run starts, on the same GPU as the trainer"
        needed = needed if num_ranks == 1 else f"a trainer with one rank, not {num_ranks}"
        raise ConfigInvalid(f"{transport!r} needs {needed}; use 'auto', 'disk' or 'shm'", key="weights.transport")
    if transport not in ("auto", "ipc") or (transport == "ipc" and len(beside) == len(engines)):
        return transport
    directory = "shm" if _has_room_in_memory(config, placement) else "disk"
    shared = "ipc" if len(beside) == len(engines) else f"ipc+{directory}"
    if transport == "ipc":
        return shared
    if not beside or not placement.get_demand(TRAINER).gpus or config.weights.url is not None:
        return directory
    weights = config.weights.model_copy(update={"transport": shared})
    return shared if fits(config.model_copy(update={"weights": weights}), placement.nodes) else directory


def is_beside_trainer(name: str, placement: RunPlacement) -> bool:
    """Return whether an engine is on the device of the trainer's first rank."""
    (place, *_), (engine_place, *_) = placement.places[TRAINER], placement.places[name]
    return place == engine_place if place.gpus or engine_place.gpus else place.node == engine_place.node


def _has_room_in_memory(config: RunConfig, placement: RunPlacement) -> bool:
    """Return whether all engines reach the shared memory of the head, and it has room for all versions at a time.

    Another head that continues the run does not reach it.
    """
    model = ModelSize.from_name(config.model.name)
    is_reachable = placement.list_names(ENGINE_PREFIX) and len(placement.nodes) == 1 and config.shared_path is None
    if model is None or not is_reachable or config.weights.url is not None or not SHM_ROOT.is_dir():
        return False
    needed = get_max_versions(config) * _count_bytes(config, placement, model)
    free = get_free_bytes(SHM_ROOT) or 0
    # What a killed start of this run has left there is removed before the trainer starts.
    own = count_file_bytes(get_weights_directory(config.path, "shm"))
    weights = config.weights.model_copy(update={"transport": "shm"})
    is_fitting = fits(config.model_copy(update={"weights": weights}), placement.nodes)
    return is_fitting and (placement.head.is_assumed or needed <= free + own)


def _count_bytes(config: RunConfig, placement: RunPlacement, model: ModelSize) -> int:
    return count_version_bytes(config, model, gpu=placement.get_demand(TRAINER).gpus > 0)


def describe_weights(config: RunConfig, placement: RunPlacement, model: ModelSize) -> str:
    """Describe how weights reach the engines, and how many bytes that takes per step; "" without engines."""
    engines, transport = placement.list_names(ENGINE_PREFIX), config.weights.transport
    if not engines or TRAINER not in placement.places:
        return ""
    size = _count_bytes(config, placement, model)
    beside = sum(is_beside_trainer(name, placement) for name in engines) if config.weights.shares_memory else 0
    parts = [f"copied from the trainer's memory by {format_count(beside, 'engine')}"] if beside else []
    if others := len(engines) - beside:
        where = "shared memory" if config.weights.is_in_memory else "disk"
        readers = f"read from {where} by {format_count(others, 'engine')}"
        parts.append(f"{readers}, {format_size(others * size)} per step")
    return f"weights: {transport}, {format_size(size)} per version; {'; '.join(parts)}"


SERVED_DIR = "served"
MAX_TRIES = 5  # the trainer may remove a version while it is being linked


def find_newest_weights(directory: Path) -> Path | None:
    """Return the directory of the last published version; None if there is none yet."""
    candidates: list[tuple[int, int, Path]] = []
    with watch_storage(directory):
        for manifest in directory.glob(f"*/{MANIFEST_FILE}"):
            try:
                version = Manifest.read(manifest.parent).version
            except WeightsRefused:
                continue  # the trainer has just removed it
            candidates.append((version.incarnation, version.step, manifest.parent))
    return max(candidates)[2] if candidates else None


def link_newest_weights(config: RunConfig, engine: str = "") -> Path | None:
    """Hard-link the newest weights, so that the trainer cannot remove them while an engine starts.

    `engine` is the name of the engine if there are several, which start at different times.

    Return the new directory; None if there are no weights.
    """
    directory, served_directory = config.weights_directory, get_served_directory(config) / engine
    for _ in range(MAX_TRIES):
        if (newest := find_newest_weights(directory)) is None:
            return None
        try:
            remove_directory(served_directory)
            with create_directory(served_directory / newest.name) as partial_path, watch_storage(newest):
                shutil.copytree(newest, partial_path, copy_function=os.link, dirs_exist_ok=True)
        except OSError:
            continue
        return served_directory / newest.name
    return None


def get_served_directory(config: RunConfig) -> Path:
    """Return the directory of the weights that engines are started with.

    In a shared directory it is named by the term of the head: a head that was replaced may still use its own.
    """
    if config.shared_path is None:
        return config.weights_directory / SERVED_DIR
    return config.weights_directory / f"{SERVED_DIR}-{_read_term(config)}"


def _read_term(config: RunConfig) -> int:
    state = read_local_state(config.path)
    return state.term if state is not None else 0


def _remove_directories(directories: Sequence[Path], print_line: Callable[[str], None]) -> None:
    """Remove directories that the run no longer needs. If that fails, print a line and go on."""
    for directory in directories:
        try:
            remove_directory(directory)
        except OSError as error:
            print_line(f"{directory} was not removed: {error}")


@contextlib.contextmanager
def hold_weights_directory(config: RunConfig, print_line: Callable[[str], None] = print) -> Generator[None]:
    """Lock the weights directory of a run, so that no other run removes it as stale.

    At the end, a directory in shared memory is removed, and so are the weights that engines were started with. The
    weights of earlier heads are removed at the start: a lost head could not do so.
    """
    directory = config.weights_directory
    remove_stale_directories()
    if config.shared_path is not None:
        earlier = [directory / f"{SERVED_DIR}-{term}" for term in range(_read_term(config))]
        _remove_directories(earlier, print_line)
    try:
        with lock_directory(directory):
            yield
    finally:
        _remove_directories([get_served_directory(config)], print_line)
        remove_stale_directories()


def save_final_weights(config: RunConfig) -> None:
    """Copy the newest weights to disk, if they are in shared memory. Raises StorageFull or StorageFailed."""
    published = config.weights_directory
    newest = find_newest_weights(published)
    directory = get_weights_directory(config.path, "disk", config.shared_path)
    if newest is None or newest.parent == directory:
        return
    num_bytes = sum(file.stat().st_size for file in newest.rglob("*"))
    with storage_call(directory, num_bytes):
        _copy_weights(newest, directory)


def _copy_weights(newest: Path, directory: Path) -> None:
    """Copy a version of the weights into `directory`, unless it has them."""
    if not (directory / newest.name).exists():
        for unfinished in directory.glob(f".{newest.name}.*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        with create_directory(directory / newest.name) as partial_path:
            shutil.copytree(newest, partial_path, dirs_exist_ok=True)
