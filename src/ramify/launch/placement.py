"""Placement: which node runs which process. Pure functions; the same demands and nodes give the same placement.

Demands are placed in two rounds, each in the given order: first those that the run needs, then the optional ones, as
far as they fit. A gang is placed as a whole or not at all, on few nodes, because its ranks exchange gradients. Servers
are spread, because a lost node should not take all of them with it. The head comes last where nothing else decides,
because the orchestrator is on it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ramify.core.errors import ClusterTooSmall
from ramify.core.names import format_count
from ramify.launch.devices import GIB
from ramify.launch.launcher import ClusterNode

MAX_LISTED = 4  # processes in a line of an error


@dataclass(frozen=True, slots=True)
class ProcessDemand:
    """What a process needs of its node; `cores`, `gpus` and the sizes are those of each rank."""

    name: str
    """Name of the process, unique in the run."""
    role: str
    """The key of its settings, such as `cluster.engines`: processes with the same role are counted together."""
    cores: int
    gpus: int = 0
    memory: int = 0
    """Bytes of the node's memory."""
    gpu_memory: int = 0
    """Bytes of the memory of each GPU."""
    num_ranks: int = 1
    """More than one: a gang, whose ranks are all placed or none."""
    allowed_nodes: tuple[str, ...] = ()
    """Names or addresses; empty: any node."""
    max_per_node: int | None = None
    is_optional: bool = False
    """Whether the run starts without it if it does not fit."""

    @property
    def group(self) -> str:
        """The processes that do the same work, such as the env servers of one source: the name without its number."""
        return self.name.rpartition("/")[0] or self.name

    def describe(self) -> str:
        """Return what one rank needs, as text."""
        sizes = {"memory": self.memory, "GPU memory per GPU": self.gpu_memory}
        counts = {"GPU": self.gpus, "core": self.cores}
        amounts = [format_count(number, noun) for noun, number in counts.items() if number]
        return ", ".join([*amounts, *(f"{size / GIB:.1f} GiB of {name}" for name, size in sizes.items() if size)])


@dataclass(slots=True)
class FreeNode:
    """What is left of a node while processes are placed."""

    node: ClusterNode
    cores: int
    gpus: int
    memory: float
    num_by_role: Counter[str] = field(default_factory=Counter[str])
    num_by_group: Counter[str] = field(default_factory=Counter[str])

    @classmethod
    def from_node(cls, node: ClusterNode) -> "FreeNode":
        """Return the whole of a node."""
        return cls(node, int(node.num_cpus), int(node.num_gpus), float("inf") if node.memory is None else node.memory)

    def count_fitting(self, demand: ProcessDemand) -> int:
        """Return how many ranks of a demand fit."""
        node = self.node
        if demand.allowed_nodes and not {node.name, node.host} & set(demand.allowed_nodes):
            return 0
        if node.gpu_memory is not None and demand.gpu_memory > node.gpu_memory:
            return 0
        limits: list[float] = [demand.num_ranks, self.cores // demand.cores]
        limits += [self.gpus // demand.gpus] if demand.gpus else []
        limits += [self.memory // demand.memory] if demand.memory else []
        if demand.max_per_node is not None:
            limits.append(demand.max_per_node - self.num_by_role[demand.role])
        return max(0, int(min(limits)))

    def reserve(self, demand: ProcessDemand, num_ranks: int) -> None:
        """Reserve the room of some ranks."""
        self.cores -= num_ranks * demand.cores
        self.gpus -= num_ranks * demand.gpus
        self.memory -= num_ranks * demand.memory
        self.num_by_role[demand.role] += num_ranks
        self.num_by_group[demand.group] += num_ranks


def place_processes(demands: Sequence[ProcessDemand], nodes: Sequence[ClusterNode]) -> dict[str, tuple[str, ...]]:
    """Return the name of the node of each rank, by process. Optional processes that do not fit are left out.

    Raises ClusterTooSmall with everything that does not fit.
    """
    free_nodes = [FreeNode.from_node(node) for node in sorted(nodes, key=lambda node: node.is_head)]
    placed: dict[str, tuple[str, ...]] = {}
    refused: dict[str, list[tuple[ProcessDemand, int]]] = {}
    for is_optional in (False, True):
        for demand in demands:
            if demand.is_optional is not is_optional:
                continue
            node_names = place_process(demand, free_nodes)
            if len(node_names) == demand.num_ranks:
                placed[demand.name] = node_names
            elif not is_optional:
                refused.setdefault(demand.role, []).append((demand, len(node_names)))
        if refused:
            counts = Counter(demand.role for demand in demands if not demand.is_optional)
            lines = [_describe_shortage(role, refused[role], counts[role], free_nodes) for role in refused]
            raise ClusterTooSmall("\n".join(["the run does not fit the cluster:", *(f"  {line}" for line in lines)]))
    return {demand.name: placed[demand.name] for demand in demands if demand.name in placed}


def place_process(demand: ProcessDemand, free_nodes: Sequence[FreeNode]) -> tuple[str, ...]:
    """Return the nodes of as many ranks as fit, and reserve their room if all do."""
    if demand.num_ranks == 1:
        order = sorted(free_nodes, key=lambda free: _get_server_sort_key(free, demand))
    else:
        order = sorted(free_nodes, key=lambda free: -free.count_fitting(demand))
    ranks_by_node: list[tuple[FreeNode, int]] = []
    num_missing = demand.num_ranks
    for free in order:
        if num_missing and (num_ranks := min(num_missing, free.count_fitting(demand))):
            ranks_by_node.append((free, num_ranks))
            num_missing -= num_ranks
    if not num_missing:
        for free, num_ranks in ranks_by_node:
            free.reserve(demand, num_ranks)
    return tuple(free.node.name for free, num_ranks in ranks_by_node for _ in range(num_ranks))


def find_unknown_nodes(demands: Sequence[ProcessDemand], nodes: Sequence[ClusterNode]) -> dict[str, list[str]]:
    """Return, by role, the allowed nodes that the cluster does not have."""
    known = {node.name for node in nodes} | {node.host for node in nodes}
    allowed = {demand.role: demand.allowed_nodes for demand in demands}
    unknown = {role: [name for name in names if name not in known] for role, names in allowed.items()}
    return {role: names for role, names in unknown.items() if names}


def _get_server_sort_key(free: FreeNode, demand: ProcessDemand) -> tuple[int, ...]:
    """Return a key by which the best node for a server sorts first."""
    gpus = -free.gpus if demand.gpus else free.gpus  # whoever does not need GPUs leaves their nodes to the others
    return free.num_by_group[demand.group], free.num_by_role[demand.role], gpus, -free.cores


def _describe_shortage(
    role: str, unplaced: Sequence[tuple[ProcessDemand, int]], num_processes: int, free_nodes: Sequence[FreeNode]
) -> str:
    """Describe which of the `num_processes` of a role do not fit, what they need, and what is left."""
    demand, num_fitting = unplaced[0]
    names = ", ".join(demand.name for demand, _ in unplaced)
    if len(unplaced) > MAX_LISTED:
        names = f"{demand.name} … {unplaced[-1][0].name} ({len(unplaced)} of {num_processes})"
    if demand.num_ranks > 1:
        names = f"{names}: {num_fitting} of {demand.num_ranks} ranks fit"
    else:
        names = f"no room for {names}"
    limit = f", at most {demand.max_per_node} per node" if demand.max_per_node is not None else ""
    where = f" on {', '.join(demand.allowed_nodes)}" if demand.allowed_nodes else ""
    return f"{role}: {names}; each needs {demand.describe()}{limit}{where}; {_describe_free(free_nodes)}"


def _describe_free(free_nodes: Sequence[FreeNode]) -> str:
    """Return what is left of the nodes, and where most of it is."""
    largest = max(free_nodes, key=lambda free: (free.gpus, free.cores), default=None)
    if largest is None:
        return "there is no node"
    gpus, cores = sum(free.gpus for free in free_nodes), sum(free.cores for free in free_nodes)
    if not gpus and not cores:
        return "no GPU and no core is left"
    total, name = format_room(gpus, cores), largest.node.name
    if (gpus, cores) == (largest.gpus, largest.cores):
        return f"left: {total}, all on {name}"
    return f"left: {total}, most of it on {name}: {format_room(largest.gpus, largest.cores)}"


def format_room(gpus: float, cores: float) -> str:
    """Return numbers of GPUs and cores as text."""
    return f"{format_count(gpus, 'GPU')} and {format_count(cores, 'core')}"


def list_by_node(placed: Mapping[str, Sequence[str]], nodes: Sequence[ClusterNode]) -> dict[str, list[str]]:
    """Return the processes of each node, the ranks of a gang one by one (`trainer rank 3`)."""
    by_node: dict[str, list[str]] = {node.name: [] for node in nodes}
    for name, node_names in placed.items():
        for rank, node_name in enumerate(node_names):
            by_node[node_name].append(f"{name} rank {rank}" if len(node_names) > 1 else name)
    return by_node
