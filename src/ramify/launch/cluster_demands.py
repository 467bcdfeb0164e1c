"""What the processes of a run need of a cluster. Counts and cores that are not configured derive from its nodes.

With GPUs, a quarter of them train and the others sample: sampling takes most of the time of an RL step. A GPU process
gets at most half of the cores of its GPU's share, and an engine or rank without a GPU a third of a node, so that env
servers find room beside it. The first process of a role is needed; the further ones of a derived count are optional.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from ramify.core.errors import ConfigInvalid
from ramify.core.names import suggest
from ramify.infer.config import EngineConfig, ExternalConfig, VLLMConfig
from ramify.launch.devices import MAX_THREADS_WITH_GPU
from ramify.launch.launcher import ClusterNode
from ramify.launch.memory import (
    ASSUMED_GPU_BYTES,
    MAX_MEMORY_FRACTION,
    PROCESS_BASE_BYTES,
    TORCH_BASE_BYTES,
    ModelSize,
    estimate_engine,
    estimate_trainer,
)
from ramify.launch.placement import ProcessDemand, find_unknown_nodes
from ramify.model.image_support import find_rank_problem, is_vision_model
from ramify.orchestrate.address_book import MODEL_PREFIX
from ramify.orchestrate.cluster_config import (
    ClusterConfig,
    EnginePlacementConfig,
    ModelPlacementConfig,
    PlacementConfig,
)
from ramify.orchestrate.config import RunConfig

ORCHESTRATOR = "orchestrator"
TRAINER = "trainer"
ENGINE_PREFIX = "inference/"
ORCHESTRATOR_CORES = 1
MAX_ENV_SERVER_CORES = 4  # of a derived number of cores
MAX_ENV_SERVERS = 16  # of a source, if the number is derived


def build_demands(
    config: RunConfig,
    cluster: ClusterConfig,
    nodes: Sequence[ClusterNode],
    *,
    find_size: Callable[[str], ModelSize | None] = ModelSize.from_name,
    max_derived_cores: int | None = None,
) -> list[ProcessDemand]:
    """Return what every process of the run needs. `find_size` returns the size of a model; None if it is unknown.

    `max_derived_cores` limits the cores of processes for which none are configured.
    Raises ConfigInvalid for a node that the cluster does not have.
    """
    builder = _DemandBuilder(config, cluster, nodes, find_size, max_derived_cores)
    fixed = [builder.build_orchestrator(), builder.build_trainer(), *builder.build_models()]
    num_free_gpus = builder.num_gpus - sum(demand.num_ranks * demand.gpus for demand in fixed)
    demands = [*fixed, *builder.build_engines(num_free_gpus), *builder.build_env_servers()]
    names = [node.name for node in nodes]
    if unknown := find_unknown_nodes(demands, nodes):
        listed = f"nodes: {', '.join(names)}"
        raise ConfigInvalid(
            problems=[
                (f"{role}.nodes", f"the cluster has no node {name!r}; {suggest(name, names, listed)}")
                for role, unknown_names in unknown.items()
                for name in unknown_names
            ]
        )
    return demands


class _DemandBuilder:
    def __init__(
        self,
        config: RunConfig,
        cluster: ClusterConfig,
        nodes: Sequence[ClusterNode],
        find_size: Callable[[str], ModelSize | None],
        max_derived_cores: int | None,
    ) -> None:
        self.config, self.cluster, self.nodes, self.find_size = config, cluster, nodes, find_size
        self.max_derived_cores = max_derived_cores
        self.num_gpus = sum(int(node.num_gpus) for node in nodes)
        self.gpu_memory = min((node.gpu_memory or ASSUMED_GPU_BYTES for node in nodes), default=ASSUMED_GPU_BYTES)
        self.node_memory = min((node.memory for node in nodes if node.memory is not None), default=ASSUMED_GPU_BYTES)

    def build_orchestrator(self) -> ProcessDemand:
        head = tuple(node.name for node in self.nodes if node.is_head)
        cores, memory = ORCHESTRATOR_CORES, 2 * PROCESS_BASE_BYTES
        return ProcessDemand(ORCHESTRATOR, "cluster", cores=cores, memory=memory, allowed_nodes=head)

    def build_trainer(self) -> ProcessDemand:
        placement, size = self.cluster.trainer, self.find_size(self.config.model.name)
        gpus = self._derive_gpus(self.config.trainer.device) if placement.gpus is None else placement.gpus
        room = sum(
            min(int(node.num_gpus), placement.max_per_node or node.num_gpus)
            for node in self._list_allowed_nodes(placement)
        )
        can_shard = bool(gpus) and not is_vision_model(self.config.model.name)
        derived_ranks = max(1, min(self.num_gpus // 4, int(room))) if can_shard else 1
        num_ranks = placement.num_ranks or derived_ranks
        if problem := find_rank_problem(self.config.model.name, num_ranks):
            raise ConfigInvalid(problem, key="cluster.trainer.num_ranks")
        estimate = size and estimate_trainer(self.config, size, gpu=bool(gpus), num_ranks=num_ranks)
        return self._build_demand(TRAINER, "cluster.trainer", placement, gpus, estimate, num_ranks=num_ranks)

    def build_models(self) -> list[ProcessDemand]:
        managed = {name: model for name, model in self.config.all_models.items() if model.is_managed}
        return [
            self._build_engine(
                f"{MODEL_PREFIX}{name}", "cluster.models", self.cluster.models, model.name, model.inference
            )
            for name, model in managed.items()
        ]

    def build_engines(self, num_free_gpus: int) -> list[ProcessDemand]:
        inference, placement, name = self.config.inference, self.cluster.engines, self.config.model.name
        if isinstance(inference, ExternalConfig):
            return []
        first = self._build_engine(f"{ENGINE_PREFIX}0", "cluster.engines", placement, name, inference)
        count = placement.num_replicas or (max(1, num_free_gpus // first.gpus) if first.gpus else 1)
        return _repeat(first, ENGINE_PREFIX, count, is_derived=placement.num_replicas is None)

    def build_env_servers(self) -> list[ProcessDemand]:
        demands, placement = list[ProcessDemand](), self.cluster.env_servers
        derived_count = min(MAX_ENV_SERVERS, len(self._list_allowed_nodes(placement)))
        for kind, sources in (("train", self.config.train), ("eval", self.config.eval)):
            count = 1 if kind == "eval" else placement.num_per_source or derived_count
            for source in sources:
                if source.address is None:
                    prefix = f"env/{kind}/{source.source_name}/"
                    first = self._build_env_server(f"{prefix}0", placement)
                    demands += _repeat(first, prefix, count, is_derived=placement.num_per_source is None)
        return demands

    def _build_env_server(self, name: str, placement: PlacementConfig) -> ProcessDemand:
        smallest = int(min((node.num_cpus for node in self._list_allowed_nodes(placement)), default=1))
        cores = placement.cores or self._limit_cores(min(MAX_ENV_SERVER_CORES, smallest // 4))
        allowed, memory = tuple(placement.nodes), PROCESS_BASE_BYTES * (1 + cores)  # one worker per core
        return ProcessDemand(
            name,
            "cluster.env_servers",
            cores=cores,
            memory=memory,
            allowed_nodes=allowed,
            max_per_node=placement.max_per_node,
        )

    def _build_engine(
        self,
        name: str,
        role: str,
        placement: EnginePlacementConfig | ModelPlacementConfig,
        model_name: str,
        inference: EngineConfig | VLLMConfig,
    ) -> ProcessDemand:
        device, size = inference.device if isinstance(inference, EngineConfig) else "auto", self.find_size(model_name)
        gpus = self._derive_gpus(device) if placement.gpus is None else placement.gpus
        device_memory = self.gpu_memory if gpus else self.node_memory
        estimate = size and estimate_engine(
            inference, self.config.seq_len, size, gpu=bool(gpus), device_memory=device_memory
        )
        return self._build_demand(name, role, placement, gpus, estimate and estimate // max(1, gpus))

    def _build_demand(
        self, name: str, role: str, placement: PlacementConfig, gpus: int, estimate: int | None, num_ranks: int = 1
    ) -> ProcessDemand:
        """Build a demand of a process that computes on its GPUs, with `estimate` bytes each, or in memory."""
        needed = int((estimate or TORCH_BASE_BYTES) / MAX_MEMORY_FRACTION)
        return ProcessDemand(
            name,
            role,
            cores=placement.cores or self._derive_cores(placement, gpus),
            gpus=gpus,
            memory=TORCH_BASE_BYTES if gpus else needed,
            gpu_memory=needed if gpus else 0,
            num_ranks=num_ranks,
            allowed_nodes=tuple(placement.nodes),
            max_per_node=placement.max_per_node,
        )

    def _derive_cores(self, placement: PlacementConfig, gpus: int) -> int:
        nodes = [node for node in self._list_allowed_nodes(placement) if not gpus or node.num_gpus]
        if gpus:
            per_gpu = min((node.num_cpus / node.num_gpus for node in nodes), default=1)
            return self._limit_cores(min(MAX_THREADS_WITH_GPU, int(gpus * per_gpu / 2)))
        return self._limit_cores(int(min((node.num_cpus for node in nodes), default=1)) // 3)

    def _limit_cores(self, cores: int) -> int:
        return max(1, cores if self.max_derived_cores is None else min(cores, self.max_derived_cores))

    def _derive_gpus(self, device: Literal["auto", "cpu", "cuda"]) -> int:
        return int(device == "cuda" or (device == "auto" and self.num_gpus > 0))

    def _list_allowed_nodes(self, placement: PlacementConfig) -> list[ClusterNode]:
        return [node for node in self.nodes if not placement.nodes or {node.name, node.host} & set(placement.nodes)]


def _repeat(first: ProcessDemand, prefix: str, count: int, *, is_derived: bool) -> list[ProcessDemand]:
    """Return `count` demands like the first; if the count is derived, all but the first are optional."""
    numbers = range(1, count)
    return [first, *(dataclasses.replace(first, name=f"{prefix}{n}", is_optional=is_derived) for n in numbers)]
