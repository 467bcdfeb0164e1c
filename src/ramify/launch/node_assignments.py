"""Which node runs which process while nodes are lost and join.

The plan assigns every process to its nodes. A process that is started again keeps them if they can be reached;
otherwise it is placed again by the rules of the plan (`placement`), in the room that the other processes leave, whether
these run now or not.
"""

from collections.abc import Mapping, Sequence

from ramify.launch.launcher import ClusterNode
from ramify.launch.placement import FreeNode, ProcessDemand, place_process


class NodeAssignments:
    """The nodes of the processes of one run, which begin as `node_names`: the node of each rank, by process."""

    def __init__(self, demands: Sequence[ProcessDemand], node_names: Mapping[str, Sequence[str]]) -> None:
        self._demands = {demand.name: demand for demand in demands}
        self._node_names = {name: tuple(names) for name, names in node_names.items()}

    def assign(self, name: str, nodes: Sequence[ClusterNode]) -> tuple[str, ...]:
        """Return the node of each rank of a process, of the `nodes` that can be reached; empty if there is no room."""
        assigned_nodes = self._node_names.get(name, ())
        if not assigned_nodes or not {node.name for node in nodes}.issuperset(assigned_nodes):
            assigned_nodes = self._place_again(self._demands[name], nodes)
        if assigned_nodes:  # without room the old assignment stays, so that its reachable nodes remain reserved
            self._node_names[name] = assigned_nodes
        return assigned_nodes

    def _place_again(self, demand: ProcessDemand, nodes: Sequence[ClusterNode]) -> tuple[str, ...]:
        free_nodes = {node.name: FreeNode.from_node(node) for node in sorted(nodes, key=lambda node: node.is_head)}
        for name, assigned_nodes in self._node_names.items():
            if name == demand.name:
                continue
            for node_name in assigned_nodes:
                if node_name in free_nodes:
                    free_nodes[node_name].reserve(self._demands[name], 1)
        node_names = place_process(demand, list(free_nodes.values()))
        return node_names if len(node_names) == demand.num_ranks else ()
