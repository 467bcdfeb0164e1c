"""How new weights reach the engines of a run, decided when the run is planned: it changes speed, never results."""

from ramify.core.errors import ClusterTooSmall, ConfigInvalid
from ramify.core.files import get_free_bytes
from ramify.core.names import format_count
from ramify.infer.config import EngineConfig
from ramify.launch.capacity import place_run
from ramify.launch.disk import format_size, get_max_versions
from ramify.launch.memory import ModelSize, count_weight_bytes
from ramify.launch.placement import RunPlacement
from ramify.launch.requirements import ENGINE_PREFIX, TRAINER
from ramify.orchestrate.config import RunConfig
from ramify.train.weights_directory import SHM_ROOT


def choose_transport(config: RunConfig, placement: RunPlacement) -> str:
    """Return `weights.transport` with `auto` replaced. Raises ConfigInvalid if `ipc` is not possible."""
    transport, engines = config.weights.transport, placement.list_names(ENGINE_PREFIX)
    is_native = isinstance(config.inference, EngineConfig)
    beside = [name for name in engines if is_native and is_beside_trainer(name, placement)]
    if config.weights.shares_memory and not beside:
        needed = "a native engine that the run starts, on the same GPU as the trainer"
        raise ConfigInvalid(f"{transport!r} needs {needed}; use 'auto', 'disk' or 'shm'", key="weights.transport")
    if transport not in ("auto", "ipc") or (transport == "ipc" and len(beside) == len(engines)):
        return transport
    directory = "shm" if _has_room_in_memory(config, placement) else "disk"
    with_buffer = "ipc" if len(beside) == len(engines) else f"ipc+{directory}"
    if transport == "ipc":
        return with_buffer
    if not beside or not placement.get_demand(TRAINER).gpus:
        return directory
    return with_buffer if _fits(config, placement, with_buffer) else directory


def is_beside_trainer(name: str, placement: RunPlacement) -> bool:
    """Return whether an engine can copy weights from the memory of the trainer's first rank."""
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
    return placement.head.is_assumed or needed <= (get_free_bytes(SHM_ROOT) or 0)


def _fits(config: RunConfig, placement: RunPlacement, transport: str) -> bool:
    """Return whether the GPUs have room for the buffer that engines copy from."""
    weights = config.weights.model_copy(update={"transport": transport})
    try:
        place_run(config.model_copy(update={"weights": weights}), placement.nodes)
    except ClusterTooSmall:
        return False
    return True


def _count_bytes(config: RunConfig, placement: RunPlacement, model: ModelSize) -> int:
    return count_weight_bytes(config, model, gpu=placement.get_demand(TRAINER).gpus > 0)


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
