"""Where the processes of a run go on the nodes of a cluster: checked before anything starts; `--dry-run` prints it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ramify.core.errors import ClusterTooSmall, ConfigInvalid
from ramify.launch.cluster_demands import build_demands
from ramify.launch.devices import GIB
from ramify.launch.launcher import ClusterNode
from ramify.launch.memory import ModelSize
from ramify.launch.placement import ProcessDemand, list_by_node, place_processes
from ramify.orchestrate.config import RunConfig


@dataclass(frozen=True, slots=True)
class ClusterPlacement:
    """The nodes, what the processes need of them, and the node of each process."""

    nodes: tuple[ClusterNode, ...]
    demands: tuple[ProcessDemand, ...]
    """Only of processes that have a place."""
    node_names: Mapping[str, tuple[str, ...]]
    """The node of each rank, by process."""

    @property
    def head(self) -> ClusterNode:
        """The node with the supervisor and the orchestrator."""
        return next(node for node in self.nodes if node.is_head)

    def format_lines(self) -> list[str]:
        """Return who runs where as lines of text, node by node."""
        needs, lines = {demand.name: demand.describe() for demand in self.demands}, list[str]()
        for node_name, processes in list_by_node(self.node_names, self.nodes).items():
            node = next(node for node in self.nodes if node.name == node_name)
            label = f"{node.name} ({node.host}, head)" if node.is_head else f"{node.name} ({node.host})"
            memory = "" if node.memory is None else f", {node.memory / GIB:.0f} GiB"
            lines += ["", f"{label}: {node.num_gpus:g} GPUs, {node.num_cpus:g} cores{memory}"]
            lines += [f"  {process}: {needs[process.partition(' rank ')[0]]}" for process in processes] or ["  nothing"]
        return lines


def place_run(config: RunConfig, nodes: Sequence[ClusterNode]) -> ClusterPlacement:
    """Place the processes of a run, with fewer cores where none are configured if it does not fit otherwise.

    Raises ClusterTooSmall with all that does not fit, or ConfigInvalid.
    """
    if len(nodes) > 1 and config.cluster.shared_directory is None:
        problem = f"the cluster has {len(nodes)} nodes, so a directory that all of them reach is needed"
        raise ConfigInvalid(problem, key="cluster.shared_directory")
    find_size = cache(ModelSize.from_name)

    def place(max_derived_cores: int | None = None) -> ClusterPlacement:
        demands = build_demands(config, config.cluster, nodes, find_size=find_size, max_derived_cores=max_derived_cores)
        node_names = place_processes(demands, nodes)
        placed_demands = tuple(demand for demand in demands if demand.name in node_names)
        return ClusterPlacement(tuple(nodes), placed_demands, node_names)

    try:
        return place()
    except ClusterTooSmall:
        placement = _place_with_fewer_cores(place, max((int(node.num_cpus) for node in nodes), default=1))
        if placement is None:
            raise
        return placement


def _place_with_fewer_cores(place: Callable[[int], ClusterPlacement], max_cores: int) -> ClusterPlacement | None:
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


def check_allocation(config: RunConfig) -> None:
    """Check that the run fits the nodes that a job allocates. Raises ClusterTooSmall with all that does not fit.

    Nodes that the configuration names are not checked: their names are known only when the job has started.
    """
    cluster = config.cluster
    update = {
        role: getattr(cluster, role).model_copy(update={"nodes": []})
        for role in ("engines", "models", "env_servers", "trainer")
    }
    place_run(config.model_copy(update={"cluster": cluster.model_copy(update=update)}), list_planned_nodes(config))


def build_allocation_warning(config: RunConfig) -> str | None:
    """Return a warning that a job allocates default nodes; None if the configuration has `[cluster.node]`."""
    node = config.cluster.node
    if "node" in config.cluster.model_fields_set:
        return None
    resources = f"{node.cores} cores, {node.gpus} GPUs and {node.memory_gib:g} GiB of memory"
    return f"warning: [cluster.node] is not set, so each node is allocated {resources}; set it to what a job can get"


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
            gpu_memory=int(shape.gpu_memory_gib * GIB),
            is_head=number == 0,
        )
        for number in range(cluster.num_nodes or 1)
    ]
