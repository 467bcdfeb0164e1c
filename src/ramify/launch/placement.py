"""Placement: which node, and which of its GPUs, runs which process. Pure functions: equal input gives equal output.

Demands are placed in two rounds, each in the given order: first those that the run needs, then the optional ones, as
far as they fit. A gang is placed as a whole or not at all, on few nodes, because its ranks exchange gradients. Servers
are spread, because a lost node should not take all of them with it. The head comes last where nothing else decides,
because the orchestrator is on it.

A process that is started again keeps its places if their nodes can be reached. Otherwise it is placed again by the same
rules, in the room that the other processes leave, whether these run now or not.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ramify.core.errors import ClusterTooSmall
from ramify.core.names import format_count
from ramify.launch.launcher import ClusterNode, Place
from ramify.launch.machine import GIB
from ramify.train.memory import MemoryUse

MAX_LISTED = 4  # processes in a line of an error

Places = Mapping[str, tuple[Place, ...]]
"""The place of each rank, by process."""


@dataclass(frozen=True, slots=True)
class ProcessDemand:
    """What a process needs of its node; `cores`, `gpus` and the sizes are needed by each rank."""

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
    gpu_group: str = ""
    """Processes of the same group have GPUs of their own; processes of different groups may share one."""
    num_ranks: int = 1
    """More than one: a gang, whose ranks are all placed or none."""
    allowed_nodes: tuple[str, ...] = ()
    """Names or addresses; empty: any node."""
    max_per_node: int | None = None
    is_optional: bool = False
    """Whether the run starts without it if it does not fit."""
    memory_use: MemoryUse = field(default_factory=MemoryUse)
    """What the memory of its device holds: `gpu_memory`, or `memory` without a GPU, is for this."""
    count_key: str = ""
    """The key that sets the number of its processes or ranks, if it is not a key of the role."""

    @property
    def service(self) -> str:
        """The processes that do the same work, such as the env servers of one source: the name without its number."""
        return self.name.rpartition("/")[0] or self.name

    @property
    def file_stem(self) -> str:
        """The name of its files, without a suffix: `inference-0` for `inference/0`."""
        return self.name.replace("/", "-")

    def describe(self, gpus: Sequence[int] | None = None) -> str:
        """Return what one rank needs, as text; with the numbers of its `gpus` if they are known."""
        sizes = {"memory": self.memory, "GPU memory per GPU": self.gpu_memory}
        numbers = [f"GPU {', '.join(map(str, gpus))}"] if gpus else []
        counts = {"GPU": 0 if gpus else self.gpus, "core": self.cores}
        amounts = [format_count(number, noun) for noun, number in counts.items() if number]
        sizes_text = (f"{size / GIB:.1f} GiB of {name}" for name, size in sizes.items() if size)
        return ", ".join([*numbers, *amounts, *sizes_text])


@dataclass(slots=True)
class FreeGpu:
    """What is left of a GPU while processes are placed."""

    number: int
    memory: float
    groups: set[str] = field(default_factory=set[str])


@dataclass(slots=True)
class FreeNode:
    """What is left of a node while processes are placed."""

    node: ClusterNode
    cores: float
    memory: float
    gpus: list[FreeGpu]
    num_by_role: Counter[str] = field(default_factory=Counter[str])
    num_by_service: Counter[str] = field(default_factory=Counter[str])

    @classmethod
    def from_node(cls, node: ClusterNode) -> "FreeNode":
        """Return the whole of a node."""
        unlimited = float("inf")
        return cls(
            node,
            cores=unlimited if node.allows_sharing else int(node.num_cpus),
            memory=unlimited if node.memory is None else node.memory,
            gpus=[FreeGpu(number, node.gpu_memory) for number in range(int(node.num_gpus))],
        )

    @property
    def num_free_gpus(self) -> int:
        """The number of GPUs that no process has."""
        return sum(not gpu.groups for gpu in self.gpus)

    def count_fitting(self, demand: ProcessDemand) -> int:
        """Return how many ranks of a demand fit."""
        if demand.allowed_nodes and not {self.node.name, self.node.host} & set(demand.allowed_nodes):
            return 0
        limits = [demand.num_ranks]
        for free, needed in ((self.cores, demand.cores), (self.memory, demand.memory)):
            limits += [int(free // needed)] if needed and math.isfinite(free) else []
        limits += [len(self._list_fitting_gpus(demand)) // demand.gpus] if demand.gpus else []
        if demand.max_per_node is not None:
            limits.append(demand.max_per_node - self.num_by_role[demand.role])
        return max(0, min(limits))

    def _list_fitting_gpus(self, demand: ProcessDemand) -> list[FreeGpu]:
        """Return the GPUs that have room for a rank, those with the most memory left first."""
        fitting = [g for g in self.gpus if demand.gpu_group not in g.groups and g.memory >= demand.gpu_memory]
        return sorted(fitting, key=lambda gpu: -gpu.memory)

    def reserve(self, demand: ProcessDemand) -> Place:
        """Reserve the room of one rank."""
        gpus = sorted(gpu.number for gpu in self._list_fitting_gpus(demand)[: demand.gpus])
        place = Place(self.node.name, tuple(gpus))
        self.occupy(demand, place)
        return place

    def occupy(self, demand: ProcessDemand, place: Place) -> None:
        """Reserve the room of a rank that has a place here."""
        self.cores -= demand.cores
        self.memory -= demand.memory
        self.num_by_role[demand.role] += 1
        self.num_by_service[demand.service] += 1
        for gpu in self.gpus:
            if gpu.number in place.gpus:
                gpu.memory -= demand.gpu_memory
                gpu.groups.add(demand.gpu_group)


def place_processes(demands: Sequence[ProcessDemand], nodes: Sequence[ClusterNode]) -> dict[str, tuple[Place, ...]]:
    """Return the place of each rank, by process. Optional processes that do not fit are left out.

    Raises ClusterTooSmall with everything that does not fit.
    """
    free_nodes = [FreeNode.from_node(node) for node in sorted(nodes, key=lambda node: node.is_head)]
    placed: dict[str, tuple[Place, ...]] = {}
    refused: dict[str, list[_Refusal]] = {}
    for is_optional in (False, True):
        for demand in demands:
            if demand.is_optional is not is_optional:
                continue
            places, num_fitting = _place_process(demand, free_nodes)
            if places:
                placed[demand.name] = places
            elif not is_optional:
                refused.setdefault(demand.role, []).append(_Refusal(demand, num_fitting))
        if refused:
            counts = Counter(demand.role for demand in demands if not demand.is_optional)
            lines = [_describe_shortage(role, refused[role], counts[role], free_nodes) for role in refused]
            place = "the cluster" if len(nodes) > 1 else f"the node {nodes[0].name}" if nodes else "no node"
            raise ClusterTooSmall("\n".join([f"the run does not fit {place}:", *(f"  {line}" for line in lines)]))
    return {demand.name: placed[demand.name] for demand in demands if demand.name in placed}


def _place_process(demand: ProcessDemand, free_nodes: Sequence[FreeNode]) -> tuple[tuple[Place, ...], int]:
    """Return the places of all ranks, and reserve them; no place if one does not fit. Also count those that fit."""
    if demand.num_ranks == 1:
        order = sorted(free_nodes, key=lambda free: _get_server_sort_key(free, demand))
    else:
        order = sorted(free_nodes, key=lambda free: -free.count_fitting(demand))
    num_missing, ranks_by_node = demand.num_ranks, list[tuple[FreeNode, int]]()
    for free in order:
        num_ranks = min(num_missing, free.count_fitting(demand))
        ranks_by_node.append((free, num_ranks))
        num_missing -= num_ranks
    if num_missing:
        return (), demand.num_ranks - num_missing
    return tuple(free.reserve(demand) for free, number in ranks_by_node for _ in range(number)), demand.num_ranks


def _get_server_sort_key(free: FreeNode, demand: ProcessDemand) -> tuple[float, ...]:
    """Return a key by which the best node for a server sorts first, whether it has room or not."""
    gpus = free.num_free_gpus if not demand.gpus else -free.num_free_gpus  # leave GPU nodes to those that need them
    return free.num_by_service[demand.service], free.num_by_role[demand.role], gpus, -free.cores


class Assignments:
    """The places of the processes of one run, while nodes are lost and join; they begin as `places`."""

    def __init__(self, demands: Sequence[ProcessDemand], places: Places) -> None:
        self._demands = {demand.name: demand for demand in demands}
        self._places = dict(places)

    def assign(self, name: str, nodes: Sequence[ClusterNode]) -> tuple[Place, ...]:
        """Return the place of each rank of a process, on `nodes` that can be reached; empty if there is no room."""
        places = self._places.get(name, ())
        if not places or not {node.name for node in nodes}.issuperset(place.node for place in places):
            places = self._place_again(self._demands[name], nodes)
        if places:  # without room the old places stay, so that their reachable nodes remain reserved
            self._places[name] = places
        return places

    def _place_again(self, demand: ProcessDemand, nodes: Sequence[ClusterNode]) -> tuple[Place, ...]:
        free_nodes = {node.name: FreeNode.from_node(node) for node in sorted(nodes, key=lambda node: node.is_head)}
        for name, places in self._places.items():
            for place in places if name != demand.name else ():
                if place.node in free_nodes:
                    free_nodes[place.node].occupy(self._demands[name], place)
        return _place_process(demand, list(free_nodes.values()))[0]


@dataclass(frozen=True, slots=True)
class RunPlacement:
    """The nodes, what the processes need of them, and the place of each rank."""

    nodes: tuple[ClusterNode, ...]
    demands: tuple[ProcessDemand, ...]  # only of processes that have a place
    places: Mapping[str, tuple[Place, ...]]
    reasons: tuple[str, ...] = ()  # why the GPUs are divided as they are, one line for each role

    @property
    def head(self) -> ClusterNode:
        """The node with the supervisor and the orchestrator."""
        return next(node for node in self.nodes if node.is_head)

    def get_demand(self, name: str) -> ProcessDemand:
        """Return what a process needs."""
        return next(demand for demand in self.demands if demand.name == name)

    def list_names(self, *prefixes: str) -> tuple[str, ...]:
        """Return the names of the processes that begin with one of `prefixes`."""
        return tuple(demand.name for demand in self.demands if demand.name.startswith(prefixes))

    def shares_gpu(self, name: str, other: str) -> bool:
        """Return whether two processes have a GPU in common."""
        return not self._list_gpus(name).isdisjoint(self._list_gpus(other))

    def count_reserved_memory(self, name: str) -> int:
        """Return the most memory that other processes need of a GPU that a process has."""
        needed = Counter[tuple[str, int]]()
        for demand in self.demands:
            for gpu in self._list_gpus(demand.name) if demand.name != name else ():
                needed[gpu] += demand.gpu_memory
        return max((needed[gpu] for gpu in self._list_gpus(name)), default=0)

    def _list_gpus(self, name: str) -> set[tuple[str, int]]:
        return {(place.node, gpu) for place in self.places.get(name, ()) for gpu in place.gpus}

    def format_lines(self) -> list[str]:
        """Return who runs where as lines of text, node by node, the ranks of a gang one by one, and why."""
        lines: list[str] = []
        for node in self.nodes:
            label = f"{node.name} ({node.host}, head)" if node.is_head else f"{node.name} ({node.host})"
            gpu_size = f" of {node.gpu_memory / GIB:.0f} GiB" if node.num_gpus else ""
            memory = "" if node.memory is None else f", {node.memory / GIB:.0f} GiB"
            lines += ["", f"{label}: {format_count(node.num_gpus, 'GPU')}{gpu_size}, {node.num_cpus:g} cores{memory}"]
            lines += self._list_processes(node) or ["  nothing"]
        lines += ["", *self.reasons] if self.reasons else []
        idle_gpus = [f"{numbers} of {name}" for name, numbers in self._list_idle_gpus().items()]
        return [*lines, *([f"idle: {'; '.join(idle_gpus)}"] if idle_gpus else [])]

    def _list_processes(self, node: ClusterNode) -> list[str]:
        lines: list[str] = []
        for demand in self.demands:
            for rank, place in enumerate(self.places[demand.name]):
                if place.node == node.name:
                    label = f"{demand.name} rank {rank}" if demand.num_ranks > 1 else demand.name
                    gpus = place.gpus if node.allows_sharing else None  # another launcher chooses them itself
                    lines.append(f"  {label}: {demand.describe(gpus)}")
        return lines

    def _list_idle_gpus(self) -> dict[str, str]:
        """Return the GPUs that no process uses, by node, as text."""
        used = {gpu for name in self.places for gpu in self._list_gpus(name)}
        idle: dict[str, str] = {}
        for node in self.nodes:
            if numbers := [str(number) for number in range(int(node.num_gpus)) if (node.name, number) not in used]:
                idle[node.name] = f"GPU {', '.join(numbers)}"
        return idle

    def list_gpu_use(self) -> list[tuple[str, MemoryUse, int]]:
        """Return what the memory of each GPU in use holds, and its size."""
        use_by_gpu: dict[tuple[str, int], MemoryUse] = {}
        for demand in self.demands:
            for gpu in self._list_gpus(demand.name):
                use_by_gpu[gpu] = use_by_gpu.get(gpu, MemoryUse()) + demand.memory_use
        return [
            (f"GPU {number}" if node.allows_sharing else f"GPU {number} of {node.name}", use, node.gpu_memory)
            for node in self.nodes
            for number in range(int(node.num_gpus))
            if (use := use_by_gpu.get((node.name, number))) is not None
        ]

    def list_memory(self) -> list[tuple[str, int, int | None]]:
        """Return the bytes that are needed and that there are of each GPU in use, and of each node."""
        rows: list[tuple[str, int, int | None]] = [
            (name, use.with_headroom, size) for name, use, size in self.list_gpu_use()
        ]
        for node in self.nodes:
            where = "this machine" if node.allows_sharing else node.name
            needed = sum(d.memory for d in self.demands for place in self.places[d.name] if place.node == node.name)
            rows.append((where, needed, node.memory))
        return rows


# -- text --------------------------------------------------------------------------------------------------------------


class _Refusal(NamedTuple):
    """A process without a place, and how many of its ranks would fit."""

    demand: ProcessDemand
    num_fitting: int


def _describe_shortage(
    role: str, refusals: Sequence[_Refusal], num_processes: int, free_nodes: Sequence[FreeNode]
) -> str:
    """Describe which of the `num_processes` of a role do not fit, what they need, and what is left."""
    demand, num_fitting = refusals[0]
    names = ", ".join(refusal.demand.name for refusal in refusals)
    if len(refusals) > MAX_LISTED:
        names = f"{demand.name} … {refusals[-1].demand.name} ({len(refusals)} of {num_processes})"
    if demand.num_ranks > 1:
        names = f"{names}: {num_fitting} of {demand.num_ranks} ranks fit"
    else:
        names = f"no room for {names}"
    limit = f", at most {demand.max_per_node} per node" if demand.max_per_node is not None else ""
    where = f" on {', '.join(demand.allowed_nodes)}" if demand.allowed_nodes else ""
    key = demand.count_key or role
    return f"{key}: {names}; each needs {demand.describe()}{limit}{where}; {_describe_free(free_nodes)}"


def _describe_free(free_nodes: Sequence[FreeNode]) -> str:
    """Return what is left of the nodes, and where most of it is."""
    largest = max(free_nodes, key=lambda free: (free.num_free_gpus, free.cores), default=None)
    if largest is None:
        return "there is no node"
    gpus, cores = sum(free.num_free_gpus for free in free_nodes), sum(free.cores for free in free_nodes)
    if not gpus and cores in (0, float("inf")):
        return "no GPU is left" if cores else "no GPU and no core is left"
    total, name = format_room(gpus, cores), largest.node.name
    if (gpus, cores) == (largest.num_free_gpus, largest.cores):
        return f"left: {total}, all on {name}"
    return f"left: {total}, most of it on {name}: {format_room(largest.num_free_gpus, largest.cores)}"


def format_room(gpus: float, cores: float) -> str:
    """Return numbers of GPUs and cores as text; cores that are shared without a limit are left out."""
    parts = [format_count(gpus, "GPU"), *([] if cores == float("inf") else [format_count(cores, "core")])]
    return " and ".join(parts)
