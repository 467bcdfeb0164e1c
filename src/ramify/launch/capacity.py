"""Whether a run fits its nodes and, if it needs too much memory, with which settings it would.

The settings are found by placing the run again with changed settings, so the advice is right by construction.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from ramify.core.config import Config
from ramify.core.errors import ClusterTooSmall, ConfigInvalid
from ramify.launch.demands import TRAINER, FindSize, build_demands, list_planned_nodes
from ramify.launch.launcher import ClusterNode
from ramify.launch.machine import GIB, uses_gpu
from ramify.launch.memory import estimate_trainer
from ramify.launch.placement import RunPlacement, place_processes
from ramify.orchestrate.run_config import RunConfig
from ramify.train.checkpoint_manifest import CHECKPOINTS_DIR, find_saved_moments
from ramify.train.memory import ModelSize

TRIED_GPUS = (2, 4, 8)  # of a machine, when a run that does not fit looks for one that it does
SMALL_PACK_TOKENS = 4096
SMALL_CACHE_FRACTION = 0.1  # of the GPU's memory, for the KV cache (native) or the engine (vLLM)

ConfigT = TypeVar("ConfigT", bound=Config)
Settings = dict[str, Any]  # values by dotted key


def place_run(config: RunConfig, nodes: Sequence[ClusterNode]) -> RunPlacement:
    """Place the processes of a run.

    Raises ClusterTooSmall with all that does not fit and, if it is for lack of memory, with settings that would fit;
    ConfigInvalid if keys contradict each other.
    """
    if len(nodes) > 1 and config.cluster.shared_directory is None:
        problem = f"the cluster has {len(nodes)} nodes, so a directory that all of them reach is needed"
        raise ConfigInvalid(problem, key="cluster.shared_directory")
    find_size = cache(ModelSize.from_name)
    try:
        return _place(config, nodes, find_size)
    except ClusterTooSmall:
        unlimited = _place(config, nodes, find_size, check_memory=False)
        if problems := _list_shortages(unlimited):
            lines = [f"not enough memory: {problem}" for problem in problems]
            lines += [_format_advice(config, nodes, find_size), *list_gpu_notes(config, nodes)]
            raise ClusterTooSmall("\n".join(lines)) from None
        raise


def _place(
    config: RunConfig, nodes: Sequence[ClusterNode], find_size: FindSize, *, check_memory: bool = True
) -> RunPlacement:
    """Place the processes of a run, with fewer cores where none are configured if it does not fit otherwise.

    Raises ClusterTooSmall with all that does not fit, or ConfigInvalid. Without `check_memory`, memory is unlimited.
    """

    def place_with(max_derived_cores: int | None = None) -> RunPlacement:
        demands, reasons = build_demands(config, nodes, find_size=find_size, max_derived_cores=max_derived_cores)
        unlimited = [dataclasses.replace(demand, memory=0, gpu_memory=0) for demand in demands]
        places = place_processes(demands if check_memory else unlimited, nodes)
        return RunPlacement(tuple(nodes), tuple(d for d in demands if d.name in places), places, tuple(reasons))

    try:
        return place_with()
    except ClusterTooSmall:
        placement = _place_with_fewer_cores(place_with, max((int(node.num_cpus) for node in nodes), default=1))
        if placement is None:
            raise
        return placement


def _place_with_fewer_cores(place: Callable[[int], RunPlacement], max_cores: int) -> RunPlacement | None:
    """Return the placement with the most derived cores that fits, below `max_cores`; None if one core is too many."""
    try:
        best = place(1)
    except ClusterTooSmall:
        return None
    num_fitting, num_too_many = 1, max_cores
    while num_too_many - num_fitting > 1:
        num_cores = (num_fitting + num_too_many) // 2
        try:
            best, num_fitting = place(num_cores), num_cores
        except ClusterTooSmall:
            num_too_many = num_cores
    return best


def _list_shortages(placement: RunPlacement) -> list[str]:
    """Return each GPU and each node that has too little memory."""
    return [
        f"{name} has {memory / GIB:.1f} GiB, the run needs about {needed / GIB:.1f} GiB of it"
        for name, needed, memory in placement.list_memory()
        if memory is not None and needed > memory
    ]


def list_gpu_notes(config: RunConfig, nodes: Sequence[ClusterNode]) -> list[str]:
    """Return a note if the memory of the nodes' GPUs is only assumed."""
    shape = config.cluster.node
    is_known = not config.cluster.is_distributed or "gpu_memory_gib" in shape.model_fields_set
    if is_known or not any(node.num_gpus for node in nodes):
        return []
    assumption = f"each GPU is assumed to have {shape.gpu_memory_gib:g} GiB, which Ray does not report"
    return [f"note: {assumption}; set cluster.node.gpu_memory_gib"]


def plan_moments(config: RunConfig, nodes: Sequence[ClusterNode], *, fresh: bool = False) -> RunConfig:
    """Return the configuration with the format of AdamW's moments, if that is `auto` and the trainer has a GPU.

    A run with checkpoints continues in their format, unless it starts over (`fresh`). Otherwise it is float32, unless
    the run fits only with 8 bits.
    """
    optim, num_gpus = config.trainer.optim, sum(node.num_gpus for node in nodes)
    if optim.moments != "auto" or optim.type != "adamw" or not uses_gpu(config.trainer.device, num_gpus):
        return config
    find_size, compact = cache(ModelSize.from_name), config.trainer.with_moments("8bit")
    moments = None if fresh else find_saved_moments((config.shared_path or config.path) / CHECKPOINTS_DIR)
    if moments is None and not fits(config, nodes, find_size):
        moments = "8bit" if fits(config.model_copy(update={"trainer": compact}), nodes, find_size) else None
    return config.model_copy(update={"trainer": config.trainer.with_moments(moments or "float32")})


def fits(config: RunConfig, nodes: Sequence[ClusterNode], find_size: FindSize = ModelSize.from_name) -> bool:
    """Return whether a run fits the nodes."""
    try:
        _place(config, nodes, find_size)
    except ConfigInvalid:
        return False
    return True


def find_long_path_warning(config: RunConfig, placement: RunPlacement) -> str | None:
    """Return which device is too small for a path of `seq_len` tokens, which is never split; None if none is.

    Such a run is not refused, because its paths may all be shorter.
    """
    model, demand = ModelSize.from_name(config.model.name), placement.get_demand(TRAINER)
    if model is None or config.seq_len <= config.trainer.max_pack_tokens:
        return None
    long_packs = _with_value(config, ["trainer", "pack_tokens"], config.seq_len)
    needed = estimate_trainer(long_packs, model, gpu=demand.gpus > 0, num_ranks=demand.num_ranks)
    larger = dataclasses.replace(demand, **{"gpu_memory" if demand.gpus else "memory": needed})
    demands = tuple(larger if other is demand else other for other in placement.demands)
    shortages = _list_shortages(dataclasses.replace(placement, demands=demands))
    if not shortages:
        return None
    advice = "set a smaller seq_len, or more trainer.recompute_layers"
    return f"a path of seq_len = {config.seq_len} tokens, trained in one piece, may not fit: {shortages[0]}; {advice}"


def _format_advice(config: RunConfig, nodes: Sequence[ClusterNode], find_size: FindSize) -> str:
    """Return the flags with which the run would fit: on the same nodes, with LoRA, and on a machine with more GPUs."""
    node, options, alternatives = nodes[0], list[Settings](), list[str]()

    def add_option(settings: Settings | None, where: str = "") -> bool:
        """Add an alternative, and return whether it fits. One that an earlier one is a part of is left out."""
        if settings is not None and not any(option.items() <= settings.items() for option in options):
            options.append(settings)
            flags = " ".join(_format_flag(key, value) for key, value in settings.items())
            alternatives.append(f"{flags or 'these settings'}{where}")
        return settings is not None

    add_option(_find_fitting_settings(config, nodes, find_size, {}))
    if not config.trainer.lora.enabled:
        add_option(_find_fitting_settings(config, nodes, find_size, {"trainer.lora.enabled": True}))
    for num_gpus in TRIED_GPUS if node.allows_sharing and node.num_gpus else ():
        more = [dataclasses.replace(node, num_gpus=num_gpus)]
        where = f" on {num_gpus} GPUs (--assume-gpus {num_gpus}x{node.gpu_memory / GIB:g})"
        if num_gpus > node.num_gpus and add_option(_find_fitting_settings(config, more, find_size, {}), where):
            break
    if not node.num_gpus and config.trainer.device == "auto":
        alternatives.append("GPUs (`--dry-run --assume-gpus 8x80` plans for eight GPUs of 80 GiB each)")
    if not alternatives:
        alternatives = ["a smaller model", "vLLM engines of several GPUs (inference.tensor_parallel)", "larger GPUs"]
    return f"it would fit with {', or with '.join(alternatives)}"


def _find_fitting_settings(
    config: RunConfig, nodes: Sequence[ClusterNode], find_size: FindSize, settings: Settings
) -> Settings | None:
    """Return the settings, and as few others as it takes, with which the run fits on the nodes; None if none do."""

    def fits_with(settings: Settings) -> bool:
        changed = config
        for key, value in settings.items():
            changed = _with_value(changed, key.split("."), value)
        return fits(changed, nodes, find_size)

    savings = _list_savings(config)
    fitting = {**settings, **savings}
    if not fits_with(fitting):
        return None
    for key in savings:
        fewer = {other: value for other, value in fitting.items() if other != key}
        fitting = fewer if fits_with(fewer) else fitting
    return fitting


def _list_savings(config: RunConfig) -> Settings:
    """Return settings that take less memory than the run's own; the last one costs the least speed."""
    engine_key = {"native": "kv_memory_fraction", "vllm": "gpu_memory_utilization"}.get(config.inference.engine)
    savings: Settings = {}
    fraction = getattr(config.inference, engine_key) if engine_key else 0.0
    if fraction == "auto" or fraction > SMALL_CACHE_FRACTION:
        savings[f"inference.{engine_key}"] = SMALL_CACHE_FRACTION
    num_ranks = config.launch.trainer_gpus or config.cluster.trainer.num_ranks or 1
    if config.trainer.optim.type == "adamw" and config.trainer.optim.moments != "8bit" and num_ranks == 1:
        savings["trainer.optim.moments"] = "8bit"
    model = ModelSize.from_name(config.model.name)
    if model is not None and config.trainer.num_recomputed_layers < model.num_layers:
        savings["trainer.recompute_layers"] = model.num_layers
    if config.trainer.max_pack_tokens > SMALL_PACK_TOKENS:
        savings["trainer.pack_tokens"] = SMALL_PACK_TOKENS
    return savings


def _format_flag(key: str, value: Any) -> str:
    return f"--{key} {value if isinstance(value, str) else json.dumps(value)}"


def _with_value(section: ConfigT, path: Sequence[str], value: Any) -> ConfigT:
    """Return a copy of the section with another value of the key at `path`."""
    name, *rest = path
    return section.model_copy(update={name: _with_value(getattr(section, name), rest, value) if rest else value})


def check_allocation(config: RunConfig) -> None:
    """Check that the run fits the nodes that a job allocates. Raises ClusterTooSmall with all that does not fit.

    Nodes that the configuration names are not checked: their names are known only when the job has started.
    """
    cluster = config.cluster
    update = {
        role: getattr(cluster, role).model_copy(update={"nodes": []})
        for role in ("engines", "models", "env_servers", "trainer")
    }
    config, nodes = config.model_copy(update={"cluster": cluster.model_copy(update=update)}), list_planned_nodes(config)
    place_run(plan_moments(config, nodes), nodes)


def build_allocation_warning(config: RunConfig) -> str | None:
    """Return a warning that a job allocates default nodes; None if the configuration has `[cluster.node]`."""
    node = config.cluster.node
    if "node" in config.cluster.model_fields_set:
        return None
    resources = f"{node.cores} cores, {node.gpus} GPUs and {node.memory_gib:g} GiB of memory"
    return f"warning: [cluster.node] is not set, so each node is allocated {resources}; set it to what a job can get"
