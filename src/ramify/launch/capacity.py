"""The sizes that a run on GPUs has, whether it fits its nodes and, if it does not, with which settings it would.

Sizes that are `auto` are found by one search: all combinations of packs, recomputed layers and sizes of the KV cache
are tried by placing the run with them, the fastest first. What the user set is kept. Sizes change how fast a run is,
not what it computes; the format of AdamW's moments does, so float32 is preferred. Advice for a run that does not fit is
found by the same search with other settings, so it is right by construction.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ramify.core.config import Config
from ramify.core.errors import ClusterTooSmall, ConfigInvalid
from ramify.infer.config import EngineConfig, ExternalServersConfig, ManagedInferenceConfig, VLLMConfig
from ramify.launch.demands import TRAINER, FindSize, GpuDivision, build_demands, list_planned_nodes
from ramify.launch.launcher import ClusterNode
from ramify.launch.machine import GIB, uses_gpu
from ramify.launch.memory import choose_vllm_fraction, estimate_trainer, format_size, get_engine_limits
from ramify.launch.placement import RunPlacement, place_processes
from ramify.model.resolve import is_fetchable
from ramify.orchestrate.run_config import RunConfig
from ramify.train.checkpoint_manifest import CHECKPOINTS_DIR, find_saved_optimizer
from ramify.train.memory import GUESSED_ORIGIN, MAX_MEMORY_FRACTION, ModelSize, check_recompute_layers
from ramify.train.step_sizes import (
    LAYERS_KEY,
    MOMENTS_KEY,
    PACK_SIZES,
    PACKS_KEY,
    Settings,
    SizeChoice,
    SizeOption,
    choose_sizes,
    explain_step_sizes,
    list_moments,
    list_step_options,
)

MAX_ADVISED_GPUS = 8  # of a machine that is suggested
MIN_SEQ_LEN = 512  # the shortest that is suggested
# How much slower a run is with a part of the KV cache that its requests can need at their full length.
CACHE_COSTS = {1: 1.0, 1 / 2: 1.01, 1 / 4: 1.04, 1 / 8: 1.16, 1 / 16: 1.4, 1 / 32: 2.0, 1 / 64: 3.2, 1 / 128: 5.6}
MIN_RUNNING_REQUESTS, MAX_RUNNING_REQUESTS = 64, 512  # of an engine
MAX_CACHE_SHARING = 4  # running requests for each one that the KV cache can hold at full length
MODEL_REQUESTS = 64  # running requests of another model, which scores or judges
UNPLANNED_KV_FRACTION = 0.4  # of the memory, for an engine of a model whose size is unknown
RUNNING_KEY, BATCHED_KEY = "inference.max_running_requests", "inference.max_num_batched_tokens"
SET_BY_USER = "as configured"
CACHE_KEY, FRACTION_KEY = "inference.kv_cache_tokens", "inference.kv_memory_fraction"
MAX_PACK_OF_SEVERAL_GPUS = 16384  # tokens; memory for larger packs would take GPUs from the engines
VLLM_FRACTION_KEY = "inference.gpu_memory_utilization"

ConfigT = TypeVar("ConfigT", bound=Config)


def place_run(config: RunConfig, nodes: Sequence[ClusterNode], *, user_config: RunConfig | None = None) -> RunPlacement:
    """Place the processes of a run. `user_config` is its configuration before sizes were chosen, for advice.

    Raises ClusterTooSmall with all that does not fit and, if it is for lack of memory, with settings that would fit;
    ConfigInvalid if keys contradict each other.
    """
    if len(nodes) > 1 and config.cluster.shared_directory is None:
        problem = f"the cluster has {len(nodes)} nodes, so a directory that all of them reach is needed"
        raise ConfigInvalid(problem, key="cluster.shared_directory")
    find_size = functools.cache(ModelSize.from_name)
    try:
        return _place(config, nodes, find_size)
    except ClusterTooSmall:
        unlimited = _place(config, nodes, find_size, check_memory=False)
        if problems := _list_shortages(unlimited):
            lines = [f"not enough memory: {problem}" for problem in problems]
            advice = _format_advice(user_config or config, nodes, find_size)
            lines += [advice, *list_assumption_notes(config, nodes, find_size(config.model.name))]
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
        if all(node.allows_sharing for node in nodes):  # cores are shared without a limit
            raise
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


def list_assumption_notes(config: RunConfig, nodes: Sequence[ClusterNode], model: ModelSize | None) -> list[str]:
    """Return a note if the memory of the nodes' GPUs is only assumed, and one if the model is guessed from its name."""
    shape, name, notes = config.cluster.node, config.model.name, list[str]()
    is_known = not config.cluster.is_distributed or "gpu_memory_gib" in shape.model_fields_set
    if not is_known and any(node.num_gpus for node in nodes):
        assumption = f"each GPU is assumed to have {shape.gpu_memory_gib:g} GiB, which Ray does not report"
        notes.append(f"note: {assumption}; set cluster.node.gpu_memory_gib")
    if model is not None and model.is_guessed:
        advice = f"; 'ramify model fetch {name}' makes it exact" if is_fetchable(name) else ""
        notes.append(
            f"note: the size of {name} is {GUESSED_ORIGIN}, so its memory can be off by a tenth or more{advice}"
        )
    return notes


# -- sizes -------------------------------------------------------------------------------------------------------------


def plan_sizes(config: RunConfig, nodes: Sequence[ClusterNode], *, fresh: bool = False) -> tuple[RunConfig, list[str]]:
    """Return the configuration with a value for each size of processes on GPUs that is `auto`, and the reasons.

    A run with checkpoints continues with their format of AdamW's moments, unless it starts over (`fresh`). If no sizes
    fit, the smallest are returned. Raises ConfigInvalid if keys contradict each other or the checkpoints.
    """
    find_size, planned, reasons = functools.cache(ModelSize.from_name), config, dict[str, str]()
    if (model := find_size(config.model.name)) is not None and not model.is_guessed:
        check_recompute_layers(config.trainer, model.num_layers)
    saved = None if fresh else find_saved_optimizer((config.shared_path or config.path) / CHECKPOINTS_DIR)
    if saved is not None:
        saved.check_matches(config.trainer.optim)
        if None not in _list_run_moments(config, nodes):
            planned = _with_settings(config, {MOMENTS_KEY: saved.moments})
            reasons[MOMENTS_KEY] = "as in the run's checkpoints"
    choice, user_config = _find_sizes(planned, nodes, find_size), planned
    planned = _with_settings(planned, choice.option.settings)
    if choice.option.settings:
        reasons = _explain_sizes(user_config, choice, GpuDivision(planned, nodes, find_size)) | reasons
    return planned, [f"{key} = {_get_value(planned, key)}: {reason}" for key, reason in reasons.items()]


def _find_sizes(config: RunConfig, nodes: Sequence[ClusterNode], find_size: FindSize) -> SizeChoice:
    """Return the fastest sizes that fit; if none fit, the smallest sizes."""
    options = (
        (moments, _list_options(config, nodes, find_size, moments)) for moments in _list_run_moments(config, nodes)
    )
    return choose_sizes(
        options,
        lambda settings: fits(_with_settings(config, settings), nodes, find_size),
        lambda settings: _measure_gpu_need(_with_settings(config, settings), nodes, find_size),
    )


def _measure_gpu_need(config: RunConfig, nodes: Sequence[ClusterNode], find_size: FindSize) -> int:
    """Return the bytes that a run needs of the GPU with the most processes; 0 without GPUs."""
    placement = _place(config, nodes, find_size, check_memory=False)
    return max((needed for name, needed, _ in placement.list_memory() if name.startswith("GPU")), default=0)


def _list_run_moments(config: RunConfig, nodes: Sequence[ClusterNode]) -> list[str | None]:
    """Return the formats of AdamW's moments to choose from, preferred first; [None] if the format is fixed."""
    on_gpu = uses_gpu(config.trainer.device, sum(node.num_gpus for node in nodes))
    num_ranks = config.launch.trainer_gpus or config.cluster.trainer.num_ranks or 1
    return list_moments(config.trainer, num_ranks) if on_gpu else [None]


def _list_options(
    config: RunConfig, nodes: Sequence[ClusterNode], find_size: FindSize, moments: str | None
) -> list[SizeOption]:
    """Return all sizes to choose from, the fastest first and the smallest last."""
    model, division = find_size(config.model.name), GpuDivision(config, nodes, find_size)
    steps = [SizeOption({} if moments is None else {MOMENTS_KEY: moments})]
    if model is not None and division.gpus_per_rank:
        max_pack = PACK_SIZES[0] if sum(node.num_gpus for node in nodes) == 1 else MAX_PACK_OF_SEVERAL_GPUS
        steps = list_step_options(config.trainer, model, config.seq_len, moments, max_pack=max_pack)
    by_cost = [(_list_engine_settings(config, division, share), cost) for share, cost in CACHE_COSTS.items()]
    engines = [(engine_settings, cost) for engine_settings, cost in by_cost if engine_settings is not None]
    options = [
        SizeOption(step.settings | engine_settings, step.cost * cost)
        for step, (engine_settings, cost) in itertools.product(steps, engines)
    ]
    return sorted(options, key=lambda option: option.cost)


def _list_engine_settings(config: RunConfig, division: GpuDivision, share: float) -> Settings | None:
    """Return the sizes of engines on GPUs, with a share of the KV cache that their requests can need.

    None if a GPU is too small for vLLM with this share, unless it is the smallest: then vLLM gets all of its GPU.
    """
    orchestrator, find_size = config.orchestrator, division.find_size
    slots = orchestrator.admission_limits.slots * orchestrator.group_size
    in_flight = min(orchestrator.max_concurrency or slots, 2 * orchestrator.batch_size)  # one batch waits for training
    num_requests = math.ceil(in_flight / max(1, division.num_engines))
    num_requests = min(max(num_requests, MIN_RUNNING_REQUESTS), MAX_RUNNING_REQUESTS)

    def choose(inference: ManagedInferenceConfig, model_name: str, num_requests: int, max_len: int) -> Settings | None:
        if not (num_gpus := division.count_gpus(inference)):
            return {}
        if is_auto := inference.max_running_requests in ("auto", None):
            inference = inference.model_copy(update={"max_running_requests": num_requests})
        limits = get_engine_limits(inference, gpu=True)
        num_requests = min(limits.max_running_requests, limits.max_num_batched_tokens)
        num_running = min(num_requests, max(MIN_RUNNING_REQUESTS, math.ceil(MAX_CACHE_SHARING * share * num_requests)))
        sizes: Settings = {"max_running_requests": num_running if is_auto else num_requests}
        num_tokens = math.ceil(share * num_requests) * (inference.max_model_len or max_len)
        model = find_size(model_name)
        if isinstance(inference, VLLMConfig):
            if inference.gpu_memory_utilization == "auto" and model is not None:
                inference = inference.model_copy(update=sizes)
                fraction = choose_vllm_fraction(
                    inference, model, num_tokens, num_gpus=num_gpus, device_memory=division.gpu_memory
                )
                if fraction is None and share > min(CACHE_COSTS):
                    return None
                sizes["gpu_memory_utilization"] = fraction or MAX_MEMORY_FRACTION
            return sizes
        sizes["max_num_batched_tokens"] = limits.max_num_batched_tokens
        if inference.kv_cache_tokens is None and inference.kv_memory_fraction == "auto":
            is_known = model is not None
            sizes |= {"kv_cache_tokens": num_tokens} if is_known else {"kv_memory_fraction": UNPLANNED_KV_FRACTION}
        return sizes

    models = dict(config.all_models)
    for name, model in models.items():
        if model.is_managed:
            sizes = choose(model.inference, model.name, MODEL_REQUESTS, config.seq_len + 1)
            if sizes is None:
                return None
            models[name] = model.model_copy(update={"inference": model.inference.model_copy(update=sizes)})
    settings: Settings = {"models": models} if models else {}
    if not isinstance(config.inference, ExternalServersConfig):
        sizes = choose(config.inference, config.model.name, num_requests, config.seq_len)
        if sizes is None:
            return None
        settings |= {f"inference.{name}": value for name, value in sizes.items()}
    return settings


def _explain_sizes(user_config: RunConfig, choice: SizeChoice, division: GpuDivision) -> dict[str, str]:
    """Return why each size of the planned run that is divided like this has its value, by key."""
    settings, inference, model_name = choice.option.settings, division.config.inference, user_config.model.name
    num_requests, batch_size = settings.get(RUNNING_KEY, 1), user_config.orchestrator.batch_size
    max_len = getattr(inference, "max_model_len", None) or user_config.seq_len
    cache_share = settings.get(CACHE_KEY, 0) / (num_requests * max_len)
    reasons = {
        **explain_step_sizes(choice, division.find_size(model_name)),
        RUNNING_KEY: f"at most two batches of {batch_size} for all engines, and what the cache can hold",
        BATCHED_KEY: "a longer prefill in one step is not faster",
        CACHE_KEY: f"{cache_share:.0%} of what {num_requests} requests of full length can need",
        FRACTION_KEY: "the size of the model is unknown",
    }
    if isinstance(inference, VLLMConfig) and (use := division.estimate_engine(inference, model_name)) is not None:
        reasons[VLLM_FRACTION_KEY] = f"weights, buffers and a KV cache of {format_size(use.kv_cache)}"
    names = type(inference).model_fields
    keys = [key for key in reasons if not key.startswith("inference.") or key.removeprefix("inference.") in names]
    is_set = {key: _get_value(user_config, key) not in ("auto", None) for key in keys}
    return {key: SET_BY_USER if is_set[key] else reasons[key] for key in keys if is_set[key] or key in settings}


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
    use = estimate_trainer(long_packs, model, gpu=demand.gpus > 0, num_ranks=demand.num_ranks)
    larger = dataclasses.replace(demand, memory_use=use, memory=demand.memory if demand.gpus else use.with_headroom)
    demands = tuple(larger if other is demand else other for other in placement.demands)
    shortages = _list_shortages(dataclasses.replace(placement, demands=demands))
    if not shortages:
        return None
    advice = "set a smaller seq_len, or more trainer.recompute_layers"
    return f"a path of seq_len = {config.seq_len} tokens, trained in one piece, may not fit: {shortages[0]}; {advice}"


# -- advice ------------------------------------------------------------------------------------------------------------


def _format_advice(config: RunConfig, nodes: Sequence[ClusterNode], find_size: FindSize) -> str:
    """Return the flags with which the run would fit: on the same nodes, also with LoRA, or on a machine with more GPUs.

    On one machine, other divisions of its GPUs are tried too. Of each combination, only flags that it needs are listed.
    """
    node, alternatives, fitting = nodes[0], list[str](), list[Settings]()

    def find_smallest_need(settings: Settings, on: Sequence[ClusterNode]) -> int | None:
        """Return how much memory of a GPU the run needs at least with these settings; None if it does not fit."""
        changed = _with_settings(config, settings)
        with contextlib.suppress(ConfigInvalid):
            for moments in _list_run_moments(changed, on):
                smallest = _with_settings(changed, _list_options(changed, on, find_size, moments)[-1].settings)
                if fits(smallest, on, find_size):
                    return _measure_gpu_need(smallest, on, find_size)
        return None

    def add_option(settings: Settings, where: str = "", on: Sequence[ClusterNode] = nodes) -> bool:
        """Add an alternative, unless an earlier one is a part of it, and return whether it fits."""
        is_covered = any(earlier.items() <= settings.items() for earlier in fitting)
        if is_covered or (needed := find_smallest_need(settings, on)) is None:
            return False
        for key in reversed(list(settings)):
            reduced = {other: value for other, value in settings.items() if other != key}
            if reduced and (reduced_need := find_smallest_need(reduced, on)) is not None:
                settings, needed = reduced, reduced_need
        fitting.append(settings)
        flags = " ".join(_format_flag(key, value) for key, value in settings.items()) or "these settings"
        alternatives.append(f"{flags}{where}" + (f" (at least {needed / GIB:.1f} GiB of a GPU)" if needed else ""))
        return True

    savings = _list_savings(config)
    if not any(add_option({key: value}) for key, value in savings.items()) and len(savings) > 1:
        add_option(savings)
    lora = {**savings, "trainer.lora.enabled": True}
    adapter_options = [] if config.trainer.lora.enabled else [lora]
    adapter_options += [{**lora, "model.quantize": "4bit"}] if config.model.quantize is None else []
    any(add_option(settings) for settings in adapter_options)
    lengths = (config.seq_len >> shift for shift in range(1, 8))
    any(add_option({**savings, "seq_len": length}) for length in lengths if length >= MIN_SEQ_LEN)
    division_fits = any(add_option(division) for division in _list_divisions(config, node, savings))

    def add_larger_machine(num_gpus: int, *, with_changes: bool) -> bool:
        """Add a machine like this one with more GPUs if the run fits it, unchanged or with a change."""
        machine, options = dataclasses.replace(node, num_gpus=num_gpus), [Settings()]
        if with_changes:
            divisions = [] if division_fits else _list_divisions(config, machine, savings)
            options += [*divisions, savings, *adapter_options]
        where = f" on {num_gpus} GPUs (--assume-gpus {num_gpus}x{node.gpu_memory / GIB:g})"
        return any(add_option(settings, where, [machine]) for settings in options)

    if node.allows_sharing and node.num_gpus:
        larger = range(int(node.num_gpus) + 1, MAX_ADVISED_GPUS + 1)
        any(add_larger_machine(num_gpus, with_changes=True) for num_gpus in larger)
        any(add_larger_machine(num_gpus, with_changes=False) for num_gpus in larger)
    if not node.num_gpus and config.trainer.device == "auto":
        alternatives.append("GPUs (`--dry-run --assume-gpus 8x80` plans for eight GPUs of 80 GiB each)")
    if not alternatives:
        alternatives = ["a smaller model", "larger GPUs"]
        if node.num_gpus > 1:
            alternatives.insert(1, "vLLM engines of several GPUs (inference.tensor_parallel)")
    return f"it would fit with {', or with '.join(alternatives)}"


def _list_divisions(config: RunConfig, node: ClusterNode, savings: Settings) -> list[Settings]:
    """Return settings for other divisions of a machine's GPUs, each with `savings`; none if the user set a division."""
    launch, num_gpus = config.launch, int(node.num_gpus)
    num_ranks = launch.trainer_gpus or config.cluster.trainer.num_ranks
    if not node.allows_sharing or launch.gpu_placement != "auto" or num_ranks is not None or num_gpus < 2:
        return []
    # Moments in 8 bits need a single rank.
    multi_rank_savings = {key: value for key, value in savings.items() if key != MOMENTS_KEY}
    divisions = [{**multi_rank_savings, "launch.trainer_gpus": count} for count in range(2, num_gpus)]
    return [*divisions, {**savings, "launch.gpu_placement": "colocated"}]


def _list_savings(config: RunConfig) -> Settings:
    """Return values that take less memory than what the user set."""
    inference, trainer = config.inference, config.trainer
    num_ranks = config.launch.trainer_gpus or config.cluster.trainer.num_ranks or 1
    savings: Settings = {}
    if trainer.pack_tokens != "auto":
        savings[PACKS_KEY] = "auto"
    if trainer.recompute_layers != "auto":
        savings[LAYERS_KEY] = "auto"
    if isinstance(inference, EngineConfig) and inference.kv_memory_fraction != "auto":
        savings[FRACTION_KEY] = "auto"
    if isinstance(inference, VLLMConfig) and inference.gpu_memory_utilization != "auto":
        savings[VLLM_FRACTION_KEY] = "auto"
    if trainer.optim.type == "adamw" and trainer.optim.moments == "float32" and num_ranks == 1:
        savings[MOMENTS_KEY] = "8bit"
    return savings


def _format_flag(key: str, value: Any) -> str:
    return f"--{key} {value if isinstance(value, str) else json.dumps(value)}"


def _with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """Return a copy of the configuration with other values."""
    for key, value in settings.items():
        config = _with_value(config, key.split("."), value)
    return config


def _get_value(section: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), section)


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
    # Without a shared directory, checkpoints are on the disk of the job's head, not on this machine.
    ignores_checkpoints = config.shared_path is None
    place_run(plan_sizes(config, nodes, fresh=ignores_checkpoints)[0], nodes, user_config=config)


def build_allocation_warning(config: RunConfig) -> str | None:
    """Return a warning that a job allocates default nodes; None if the configuration has `[cluster.node]`."""
    node = config.cluster.node
    if "node" in config.cluster.model_fields_set:
        return None
    resources = f"{node.cores} cores, {node.gpus} GPUs and {node.memory_gib:g} GiB of memory"
    return f"warning: [cluster.node] is not set, so each node is allocated {resources}; set it to what a job can get"
