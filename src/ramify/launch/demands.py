"""What the processes of a run need of their nodes. Counts and cores that are not configured derive from the nodes.

A machine is a cluster of one node, so there is one set of rules. All GPUs are used. The trainer gets the fewest ranks
whose GPUs hold its state, at least one per eight GPUs, and at most half of the GPUs; engines of other models get what
they need, and the policy's engines the rest. GPUs that are too few for one more engine go to the trainer, and so do all
that the engines leave if their number is configured. On a single machine with too few GPUs for one process each,
processes share them.

Without GPUs, engines and ranks share the cores of a machine: oversubscribed threads are slower than fewer threads (on
two cores, 2 + 2 threads are 2.4 times slower than 1 + 1). Where cores are reserved, each gets a third of a node, so
that env servers find room beside it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ramify.core.errors import ConfigInvalid
from ramify.core.names import format_count, suggest
from ramify.infer.config import EngineAdaptersConfig, EngineConfig, ExternalServersConfig, VLLMConfig
from ramify.launch.launcher import ASSUMED_GPU_BYTES, ClusterNode
from ramify.launch.machine import GIB, Device, uses_gpu
from ramify.launch.memory import (
    PROCESS_BASE_BYTES,
    count_copy_bytes,
    count_version_bytes,
    estimate_engine,
    estimate_trainer,
    get_max_versions,
)
from ramify.launch.placement import ProcessDemand
from ramify.launch.process_configs import build_engine_adapters
from ramify.model.image_support import find_rank_problem, is_vision_model
from ramify.orchestrate.address_book import MODEL_PREFIX
from ramify.orchestrate.cluster_config import PlacementConfig
from ramify.orchestrate.run_config import RunConfig
from ramify.train.memory import TORCH_BASE_BYTES, MemoryUse, ModelSize

ORCHESTRATOR, TRAINER = "orchestrator", "trainer"
ENGINE_PREFIX, ENV_PREFIX = "inference/", "env/"
TRAINER_GROUP = "trainer"  # the GPU group of a trainer that shares GPUs with engines
MAX_ENV_SERVER_CORES = 4  # of a derived number of cores
MAX_ENV_SERVERS = 16  # of a source, if the number is derived
MAX_THREADS_WITH_GPU = 8  # CPU threads of a process that computes on a GPU
GPUS_PER_RANK = 8  # one of so many GPUs trains, at least

FindSize = Callable[[str], ModelSize | None]


def build_demands(
    config: RunConfig,
    nodes: Sequence[ClusterNode],
    *,
    find_size: FindSize = ModelSize.from_name,
    max_derived_cores: int | None = None,
) -> tuple[list[ProcessDemand], list[str]]:
    """Return what every process of the run needs, and why the GPUs are divided like this.

    `find_size` returns the size of a model; None if it is unknown. `max_derived_cores` limits the cores of processes
    for which none are configured. Raises ConfigInvalid for GPUs or a node that the cluster does not have.
    """
    division = GpuDivision(config, nodes, find_size)
    builder = _DemandBuilder(config, nodes, division, max_derived_cores)
    demands = [builder.build_trainer(), *builder.build_models(), *builder.build_engines()]
    orchestrator, *env_servers = build_service_demands(config, nodes, max_derived_cores=max_derived_cores)
    demands = [orchestrator, *demands, *env_servers]
    if problems := _find_unknown_nodes(demands, nodes):
        raise ConfigInvalid(problems=problems)
    return demands, division.reasons


def build_service_demands(
    config: RunConfig, nodes: Sequence[ClusterNode], *, max_derived_cores: int | None = None
) -> list[ProcessDemand]:
    """Return what the orchestrator and the env servers need."""
    head = tuple(node.name for node in nodes if node.is_head)
    memory = 2 * PROCESS_BASE_BYTES
    demands = [ProcessDemand(ORCHESTRATOR, "cluster", cores=1, memory=memory, allowed_nodes=head)]
    placement = config.cluster.env_servers
    allowed_nodes = list_allowed_nodes(placement, nodes)
    smallest = min((1 if node.allows_sharing else int(node.num_cpus) // 4 for node in allowed_nodes), default=1)
    cores = placement.cores or _limit_cores(min(MAX_ENV_SERVER_CORES, smallest), max_derived_cores)
    for kind, sources in (("train", config.train), ("eval", config.eval)):
        count = 1 if kind == "eval" else placement.num_per_source or min(MAX_ENV_SERVERS, len(allowed_nodes))
        for source in sources:
            if source.address is None:
                prefix = f"{ENV_PREFIX}{kind}/{source.source_name}/"
                first = ProcessDemand(
                    f"{prefix}0",
                    "cluster.env_servers",
                    cores=cores,
                    memory=PROCESS_BASE_BYTES * (1 + cores),  # one worker per core
                    allowed_nodes=tuple(placement.nodes),
                    max_per_node=placement.max_per_node,
                )
                demands += _repeat(first, prefix, count, is_derived=placement.num_per_source is None)
    return demands


def _find_unknown_nodes(demands: Sequence[ProcessDemand], nodes: Sequence[ClusterNode]) -> list[tuple[str, str]]:
    """Return a problem for each allowed node that the cluster does not have."""
    names = [node.name for node in nodes]
    known, listed = {*names, *(node.host for node in nodes)}, f"nodes: {', '.join(names)}"
    allowed = {demand.role: demand.allowed_nodes for demand in demands if demand.name != ORCHESTRATOR}
    return [
        (f"{role}.nodes", f"the cluster has no node {name!r}; {suggest(name, names, listed)}")
        for role, allowed_names in allowed.items()
        for name in allowed_names
        if name not in known
    ]


class GpuDivision:
    """How the GPUs of a run are divided. Raises ConfigInvalid if they are too few, or if keys contradict each other.

    Attributes:
        gpus_per_engine: GPUs of each engine of the policy; 0 on the CPU, and if the run starts none.
        gpus_per_rank: GPUs of each rank, 0 or 1.
        is_shared: whether trainer and engines share GPUs.
        do_models_share: whether the engines of other models share the GPUs of other processes.
        reasons: why the GPUs are divided like this, one line for each role.
    """

    def __init__(self, config: RunConfig, nodes: Sequence[ClusterNode], find_size: FindSize) -> None:
        self.config, self.nodes, self.find_size, self.reasons = config, nodes, find_size, list[str]()
        self.num_gpus = sum(int(node.num_gpus) for node in nodes)
        self.gpu_memory = min((node.gpu_memory for node in nodes if node.num_gpus), default=ASSUMED_GPU_BYTES)
        self.managed_models = {name: model for name, model in config.all_models.items() if model.is_managed}
        self.model_gpus = sum(self.count_gpus(model.inference) for model in self.managed_models.values())
        inference = config.inference
        self.gpus_per_engine = 0 if isinstance(inference, ExternalServersConfig) else self.count_gpus(inference)
        self.gpus_per_rank = int(uses_gpu(config.trainer.device, self.num_gpus))
        self.is_shared = self.do_models_share = False
        self._choose_sharing()
        self.num_ranks, self.num_engines = self._choose_counts()

    def count_gpus(self, inference: EngineConfig | VLLMConfig) -> int:
        """Return the GPUs of one engine."""
        device: Device = inference.device if isinstance(inference, EngineConfig) else "auto"
        per_engine = inference.tensor_parallel if isinstance(inference, VLLMConfig) else 1
        return per_engine if uses_gpu(device, self.num_gpus) else 0

    def _choose_sharing(self) -> None:
        placement, num_needed = self.config.launch.gpu_placement, self.gpus_per_engine + self.gpus_per_rank
        both_on_gpu = bool(self.gpus_per_engine and self.gpus_per_rank)
        if placement != "auto" and not both_on_gpu:
            component = "engine" if self.gpus_per_rank else "trainer"
            problem = f"{placement!r} requires both engine and trainer on GPUs; the {component} has none"
            raise ConfigInvalid(problem, key="launch.gpu_placement")
        allows_sharing = all(node.allows_sharing for node in self.nodes)
        if both_on_gpu and allows_sharing:
            self.is_shared = placement == "colocated" or (placement == "auto" and self.num_gpus < num_needed)
        least = max(self.gpus_per_engine, self.gpus_per_rank) if self.is_shared else num_needed
        self.do_models_share = allows_sharing and self.num_gpus - self.model_gpus < least
        if allows_sharing and self.num_gpus < least:
            key = "launch.gpu_placement" if placement == "split" else "inference.tensor_parallel"
            key = key if self.gpus_per_engine > 1 or placement == "split" else "launch"
            if not self.num_gpus:  # so a device is set to cuda
                key = "trainer.device" if self.gpus_per_rank else "inference.device"
            raise ConfigInvalid(f"the run needs {format_count(least, 'GPU')}, found {self.num_gpus}", key=key)

    def _choose_counts(self) -> tuple[int, int]:
        """Return the number of ranks and of engines, and record why."""
        launch, cluster = self.config.launch, self.config.cluster
        num_free = self.num_gpus - (0 if self.do_models_share else self.model_gpus)
        num_engines = cluster.engines.num_replicas
        if launch.inference_gpus is not None:
            num_engines = self._count_engines(launch.inference_gpus)
        num_ranks = self._get_configured_ranks()
        if num_ranks is None:
            num_ranks = self._derive_ranks(num_free, num_engines) if self.gpus_per_rank else 1
        if isinstance(self.config.inference, ExternalServersConfig):
            return num_ranks, 0
        is_configured = num_engines is not None
        if num_engines is None:
            num_left = num_free - (0 if self.is_shared else num_ranks * self.gpus_per_rank)
            num_engines = max(1, num_left // self.gpus_per_engine) if self.gpus_per_engine else 1
        if self.num_gpus:
            self._explain_engines(num_engines, num_ranks, is_configured=is_configured)
        return num_ranks, num_engines

    def _get_configured_ranks(self) -> int | None:
        num_gpus, num_ranks = self.config.launch.trainer_gpus, self.config.cluster.trainer.num_ranks
        if num_gpus is not None and not self.gpus_per_rank:
            problem = f"{num_gpus} requires a trainer on GPUs; it runs on the CPU"
            device = f"trainer.device is {self.config.trainer.device!r}"
            raise ConfigInvalid(f"{problem} ({device}); set cluster.trainer.num_ranks", key="launch.trainer_gpus")
        key = "cluster.trainer.num_ranks" if num_gpus is None else "launch.trainer_gpus"
        if (count := num_gpus or num_ranks) is None:
            return None
        if problem := find_rank_problem(self.config.model.name, count):
            raise ConfigInvalid(problem, key=key)
        self.config.trainer.optim.check_ranks(count)
        self.reasons.append(f"trainer: {format_count(count, 'rank')}, as {key} says")
        return count

    def _count_engines(self, inference_gpus: int) -> int:
        """Return the number of engines on `launch.inference_gpus`."""
        if not self.gpus_per_engine or inference_gpus % self.gpus_per_engine:
            expected = f"a multiple of {self.gpus_per_engine}, the GPUs of each engine (inference.tensor_parallel)"
            expected = expected if self.gpus_per_engine else "engines on GPUs; the run starts none"
            raise ConfigInvalid(f"expected {expected}, got {inference_gpus}", key="launch.inference_gpus")
        return inference_gpus // self.gpus_per_engine

    def _derive_ranks(self, num_free: int, num_engines: int | None) -> int:
        """Return the number of ranks of a trainer on GPUs, and record why; `num_engines` is None if it is not set."""
        limit, limit_name = num_free, f"all {num_free}"
        if self.gpus_per_engine and not self.is_shared:
            limit, limit_name = num_free // 2, "half"
            if num_engines is not None:
                limit, limit_name = num_free - num_engines * self.gpus_per_engine, "all that engines leave"
        placement, nodes = self.config.cluster.trainer, list_allowed_nodes(self.config.cluster.trainer, self.nodes)
        limit = min(limit, sum(int(min(n.num_gpus, placement.max_per_node or n.num_gpus)) for n in nodes))
        limit = max(1, limit)
        if limit > 1 and (reason := self._find_single_rank_reason()):
            self.reasons.append(f"trainer: 1 GPU, because {reason}")
            return 1
        fewest, why = self._find_fewest_ranks(limit)
        num_ranks = max(fewest, min(limit, self.num_gpus // GPUS_PER_RANK))
        if num_ranks > fewest:
            why = f"one of {GPUS_PER_RANK} GPUs"
        if not self.is_shared and (not self.gpus_per_engine or num_engines is not None):
            num_ranks, why = limit, limit_name
        elif (
            self.gpus_per_engine > 1 and not self.is_shared and (spare := (num_free - num_ranks) % self.gpus_per_engine)
        ):
            num_more = min(spare, limit - num_ranks)
            num_ranks += num_more
            why += f", and {num_more} more, too few for an engine of {self.gpus_per_engine}" if num_more else ""
        self.reasons.append(f"trainer: {num_ranks} of {format_count(self.num_gpus, 'GPU')}: {why}")
        return num_ranks

    def _find_single_rank_reason(self) -> str | None:
        """Return why the trainer has one rank on any number of GPUs; None if it may have several."""
        if is_vision_model(self.config.model.name):
            return "a vision-language model is trained by one rank"
        if self.config.trainer.optim.moments == "8bit":
            return "moments in 8 bits need a trainer of one rank"
        return "a quantized base needs a trainer of one rank" if self.config.model.quantize is not None else None

    def _find_fewest_ranks(self, limit: int) -> tuple[int, str]:
        """Return the fewest ranks that hold the trainer's state, at most `limit`, and the numbers behind it."""
        size = self.find_size(self.config.model.name)
        if size is None:
            return 1, "the size of the model is unknown"
        room, sizes = self.gpu_memory, dict[int, int]()
        if self.is_shared and not isinstance(inference := self.config.inference, ExternalServersConfig):
            engine = self.estimate_engine(inference, self.config.model.name, build_engine_adapters(self.config))
            room -= engine.with_headroom if engine is not None else 0
        for num_ranks in range(1, limit + 1):
            sizes[num_ranks] = estimate_trainer(self.config, size, gpu=True, num_ranks=num_ranks).with_headroom
            if sizes[num_ranks] <= room:
                break
        fewest = max(sizes)
        parts = [f"{sizes[number] / GIB:.1f} GiB on {number}" for number in sorted({max(1, fewest - 1), fewest})]
        result = "the fewest that hold its state" if sizes[fewest] <= room else "the most that it gets"
        return fewest, f"{result} ({', '.join(parts)}; there are {room / GIB:.1f} GiB)"

    def estimate_engine(
        self, inference: EngineConfig | VLLMConfig, model_name: str, adapters: EngineAdaptersConfig | None = None
    ) -> MemoryUse | None:
        """Return what an engine needs of each GPU, or of the memory; None if the model's size is unknown."""
        if (size := self.find_size(model_name)) is None:
            return None
        num_gpus, memory = self.count_gpus(inference), (node.memory for node in self.nodes if node.memory is not None)
        device_memory = self.gpu_memory if num_gpus else min(memory, default=ASSUMED_GPU_BYTES)
        return estimate_engine(
            inference,
            self.config.seq_len,
            size,
            num_gpus=num_gpus,
            device_memory=device_memory,
            adapters=adapters,
        )

    def _explain_engines(self, num_engines: int, num_ranks: int, *, is_configured: bool) -> None:
        each = " each" if num_engines > 1 else ""
        size = f" of {format_count(self.gpus_per_engine, 'GPU')}{each}" if self.gpus_per_engine else ""
        why = "as configured" if is_configured else "on the GPUs that are left"
        if self.is_shared and not is_configured:
            is_chosen = self.config.launch.gpu_placement == "colocated"
            where = (
                "on all GPUs, also beside the trainer"
                if num_engines * self.gpus_per_engine > num_ranks
                else "beside the trainer"
            )
            why = f"{where}, {'as configured' if is_chosen else 'because there are too few GPUs'}"
        why = why if self.gpus_per_engine else "on the CPU"
        self.reasons.append(f"inference: {format_count(num_engines, 'engine')}{size}, {why}")
        if self.managed_models:
            where = "shared GPUs" if self.do_models_share else "GPUs of their own"
            names = ", ".join(self.managed_models)
            self.reasons.append(f"models: {names}, on {where if self.model_gpus else 'the CPU'}")


@dataclass(frozen=True, slots=True)
class _DemandBuilder:
    """Builds the demands of the processes that compute: trainer and engines."""

    config: RunConfig
    nodes: Sequence[ClusterNode]
    division: GpuDivision
    max_derived_cores: int | None

    def build_trainer(self) -> ProcessDemand:
        placement, division = self.config.cluster.trainer, self.division
        size, gpus, num_ranks = division.find_size(self.config.model.name), division.gpus_per_rank, division.num_ranks
        estimate = estimate_trainer(self.config, size, gpu=bool(gpus), num_ranks=num_ranks) if size else None
        host_bytes = count_copy_bytes(self.config, size, gpu=True) if size and gpus else 0
        if size and self.config.weights.is_in_memory:
            weight_bytes = count_version_bytes(self.config, size, gpu=bool(gpus))
            host_bytes += get_max_versions(self.config) * weight_bytes // num_ranks
        group = TRAINER_GROUP if division.is_shared else ""
        demand = self._build_demand(TRAINER, "cluster.trainer", placement, gpus, estimate, group=group)
        count_key = "launch.trainer_gpus" if self.config.launch.trainer_gpus is not None else ""
        memory = demand.memory + host_bytes
        return dataclasses.replace(demand, num_ranks=num_ranks, memory=memory, count_key=count_key)

    def build_models(self) -> list[ProcessDemand]:
        return [
            self._build_engine(
                f"{MODEL_PREFIX}{name}",
                "cluster.models",
                self.config.cluster.models,
                model.name,
                model.inference,
                group=f"{MODEL_PREFIX}{name}" if self.division.do_models_share else "",
            )
            for name, model in self.division.managed_models.items()
        ]

    def build_engines(self) -> list[ProcessDemand]:
        inference, placement, name = self.config.inference, self.config.cluster.engines, self.config.model.name
        if isinstance(inference, ExternalServersConfig):
            return []
        adapters = build_engine_adapters(self.config)
        first = self._build_engine(
            f"{ENGINE_PREFIX}0", "cluster.engines", placement, name, inference, adapters=adapters
        )
        is_derived = placement.num_replicas is None and self.config.launch.inference_gpus is None
        if self.config.launch.inference_gpus is not None:
            first = dataclasses.replace(first, count_key="launch.inference_gpus")
        return _repeat(first, ENGINE_PREFIX, self.division.num_engines, is_derived=is_derived)

    def _build_engine(
        self,
        name: str,
        role: str,
        placement: PlacementConfig,
        model_name: str,
        inference: EngineConfig | VLLMConfig,
        *,
        group: str = "",
        adapters: EngineAdaptersConfig | None = None,
    ) -> ProcessDemand:
        gpus = self.division.count_gpus(inference)
        estimate = self.division.estimate_engine(inference, model_name, adapters)
        return self._build_demand(name, role, placement, gpus, estimate, group=group)

    def _build_demand(
        self,
        name: str,
        role: str,
        placement: PlacementConfig,
        gpus: int,
        estimate: MemoryUse | None,
        *,
        group: str = "",
    ) -> ProcessDemand:
        """Build a demand of a process that computes on its GPUs, with an `estimate` for each, or in memory."""
        estimate = estimate or MemoryUse(workspace=TORCH_BASE_BYTES)
        return ProcessDemand(
            name,
            role,
            cores=placement.cores or self._derive_cores(placement, gpus),
            gpus=gpus,
            memory=TORCH_BASE_BYTES if gpus else estimate.with_headroom,
            gpu_memory=estimate.with_headroom if gpus else 0,
            memory_use=estimate,
            gpu_group=group,
            allowed_nodes=tuple(placement.nodes),
            max_per_node=placement.max_per_node,
        )

    def _derive_cores(self, placement: PlacementConfig, gpus: int) -> int:
        nodes = [n for n in list_allowed_nodes(placement, self.nodes) if not gpus or n.num_gpus]
        if gpus:
            per_gpu = min((node.num_cpus / node.num_gpus for node in nodes), default=1)
            return _limit_cores(min(MAX_THREADS_WITH_GPU, int(gpus * per_gpu / 2)), self.max_derived_cores)
        return _limit_cores(min((self._share_cores(node) for node in nodes), default=1), self.max_derived_cores)

    def _share_cores(self, node: ClusterNode) -> int:
        """Return the cores of an engine or a rank that computes on the CPU of a node."""
        division, cores = self.division, int(node.num_cpus)
        if not node.allows_sharing:
            return cores // 3
        num_sharing = division.num_engines + division.num_ranks + len(division.managed_models)
        return cores // num_sharing if num_sharing > 1 else cores - 1


def _limit_cores(cores: int, max_cores: int | None) -> int:
    return max(1, cores if max_cores is None else min(cores, max_cores))


def list_allowed_nodes(placement: PlacementConfig, nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Return the nodes that may run the processes of a role."""
    return [node for node in nodes if not placement.nodes or {node.name, node.host} & set(placement.nodes)]


def _repeat(first: ProcessDemand, prefix: str, count: int, *, is_derived: bool) -> list[ProcessDemand]:
    """Return `count` demands like the first; if the count is derived, all but the first are optional."""
    numbers = range(1, count)
    return [first, *(dataclasses.replace(first, name=f"{prefix}{n}", is_optional=is_derived) for n in numbers)]


def list_planned_nodes(config: RunConfig) -> list[ClusterNode]:
    """Return the nodes that `[cluster]` describes; the first is the head."""
    cluster, shape = config.cluster, config.cluster.node
    return [
        ClusterNode(
            f"node-{number}",
            f"node-{number}",
            shape.cores,
            shape.gpus,
            memory=int(shape.memory_gib * GIB),
            gpu_memory=shape.gpu_bytes,
            is_head=number == 0,
            is_assumed=True,
        )
        for number in range(cluster.num_nodes or 1)
    ]
