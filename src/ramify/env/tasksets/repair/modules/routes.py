"""Paths in graphs. A graph maps each node to the nodes that its edges lead to."""


def count_steps(graph: dict[str, list[str]], start: str, goal: str) -> int:
    """Return the smallest number of edges from `start` to `goal`; 0 if they are equal, -1 if there is no path."""
    steps = {start: 0}
    queue = [start]
    while queue:
        node = queue.pop(0)
        if node == goal:
            return steps[node]
        for neighbour in graph.get(node, []):
            if neighbour not in steps:
                steps[neighbour] = steps[node] + 1
                queue.append(neighbour)
    return -1


def find_reachable(graph: dict[str, list[str]], start: str, max_steps: int) -> list[str]:
    """Return the nodes that are 1 to `max_steps` edges away from `start`, sorted, without `start` itself."""
    return sorted(node for node in _collect_nodes(graph) if 1 <= count_steps(graph, start, node) <= max_steps)


def sort_by_dependencies(graph: dict[str, list[str]]) -> list[str]:
    """Return all nodes so that each stands after the nodes that its edges lead to; of those that can come next, the
    first in the alphabet. The result is [] if the edges form a circle."""
    waiting = _collect_nodes(graph)
    order: list[str] = []
    while waiting:
        ready = [node for node in sorted(waiting) if all(other in order for other in graph.get(node, []))]
        if not ready:
            return []
        order.append(ready[0])
        waiting.remove(ready[0])
    return order


def _collect_nodes(graph: dict[str, list[str]]) -> list[str]:
    """Return every node once."""
    nodes = list(graph)
    for neighbours in graph.values():
        nodes += [node for node in neighbours if node not in nodes]
    return nodes
