"""Placement on nodes: nothing is overcommitted, a gang is placed as a whole or refused, lost nodes are replaced."""

import dataclasses
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import ClusterTooSmall
from ramify.launch.launcher import ClusterNode, Place
from ramify.launch.placement import Assignments, ProcessDemand, place_processes

GIB = 1 << 30


def build_nodes(*shapes: tuple[int, int]) -> list[ClusterNode]:
    return [
        ClusterNode(f"n{number}", f"10.0.0.{number}", cores, gpus, memory=64 * GIB, is_head=number == 0)
        for number, (cores, gpus) in enumerate(shapes)
    ]


def engine(number: int, **more) -> ProcessDemand:
    return ProcessDemand(f"inference/{number}", "cluster.engines", **{"cores": 4, "gpus": 1, **more})


def trainer(num_ranks: int, **more) -> ProcessDemand:
    return ProcessDemand("trainer", "cluster.trainer", num_ranks=num_ranks, **{"cores": 4, "gpus": 1, **more})


def list_nodes(places) -> dict[str, tuple[str, ...]]:
    return {name: tuple(place.node for place in ranks) for name, ranks in places.items()}


def place(demands, nodes) -> dict[str, tuple[str, ...]]:
    return list_nodes(place_processes(demands, nodes))


def test_a_gang_is_packed_and_servers_are_spread():
    placed = place([trainer(4), engine(0), engine(1)], build_nodes((16, 0), (64, 8), (64, 8)))
    assert placed == {"trainer": ("n1",) * 4, "inference/0": ("n2",), "inference/1": ("n1",)}


def test_at_most_so_many_per_node_spreads_a_gang():
    placed = place([trainer(2, gpus=0, max_per_node=1)], build_nodes((4, 0), (4, 0), (4, 0)))
    assert placed == {"trainer": ("n1", "n2")}  # the head comes last


def test_allowed_nodes_are_names_or_addresses():
    nodes = build_nodes((8, 1), (8, 1), (8, 1))
    assert place([engine(0, allowed_nodes=("n0",))], nodes) == {"inference/0": ("n0",)}
    assert place([engine(0, allowed_nodes=("10.0.0.2",))], nodes) == {"inference/0": ("n2",)}


def test_one_error_lists_every_shortage():
    demands = [trainer(3), engine(0), engine(1), ProcessDemand("env/train/a", "cluster.env_servers", cores=99)]
    with pytest.raises(ClusterTooSmall) as error:
        place_processes(demands, build_nodes((4, 0), (8, 2)))
    left = "left: 0 GPUs and 4 cores, all on n0"
    assert str(error.value).splitlines() == [
        "the run does not fit the cluster:",
        f"  cluster.trainer: trainer: 2 of 3 ranks fit; each needs 1 GPU, 4 cores; {left}",
        f"  cluster.env_servers: no room for env/train/a; each needs 99 cores; {left}",
    ]


@pytest.mark.parametrize(
    ("shapes", "left"),
    [
        ([(4, 0)], "no GPU and no core is left"),
        ([(5, 0)], "left: 0 GPUs and 1 core, all on n0"),
        ([(5, 0), (2, 1)], "left: 1 GPU and 3 cores, most of it on n1: 1 GPU and 2 cores"),
    ],
)
def test_many_processes_without_a_place_are_summarized(shapes, left):
    with pytest.raises(ClusterTooSmall) as error:
        place_processes([engine(number, gpus=0) for number in range(9)], build_nodes(*shapes))
    names = "inference/1 … inference/8 (8 of 9)"
    assert str(error.value).endswith(f"  cluster.engines: no room for {names}; each needs 4 cores; {left}")


def test_memory_counts_where_it_is_known():
    node = ClusterNode("n0", "10.0.0.1", 8, 2, memory=8 * GIB, gpu_memory=16 * GIB)
    with pytest.raises(ClusterTooSmall, match=r"each needs 1 GPU, 4 cores, 24\.0 GiB of GPU memory"):
        place_processes([engine(0, gpu_memory=24 * GIB)], [node])
    with pytest.raises(ClusterTooSmall, match=r"9\.0 GiB of memory"):
        place_processes([engine(0, memory=9 * GIB)], [node])
    unknown = ClusterNode("n0", "10.0.0.1", 8, 2)
    assert place_processes([engine(0, memory=9 * GIB, gpu_memory=24 * GIB)], [unknown])
    with pytest.raises(ClusterTooSmall):  # the memory of a GPU is assumed
        place_processes([engine(0, gpu_memory=81 * GIB)], [unknown])


def test_optional_processes_are_left_out_if_they_do_not_fit():
    demands = [engine(0), *(engine(number, is_optional=True) for number in range(1, 9)), trainer(2)]
    placed = place(demands, build_nodes((64, 4)))
    assert list(placed) == ["inference/0", "inference/1", "trainer"]


sizes = st.integers(0, 8)
node_lists = st.lists(st.tuples(st.integers(0, 16), sizes, st.none() | st.integers(0, 64)), min_size=1, max_size=5).map(
    lambda shapes: [
        ClusterNode(f"n{i}", f"10.0.0.{i}", cores, gpus, memory=memory, is_head=i == 0)
        for i, (cores, gpus, memory) in enumerate(shapes)
    ]
)
demand_lists = st.lists(
    st.builds(
        ProcessDemand,
        name=st.just(""),
        role=st.sampled_from(["cluster.engines", "cluster.env_servers", "cluster.trainer"]),
        cores=st.integers(1, 6),
        gpus=st.integers(0, 3),
        memory=st.integers(0, 32),
        num_ranks=st.integers(1, 5),
        allowed_nodes=st.sampled_from([(), ("n0",), ("n1", "10.0.0.2")]),
        max_per_node=st.none() | st.integers(1, 3),
        is_optional=st.booleans(),
    ),
    max_size=6,
).map(lambda demands: [named(demand, number) for number, demand in enumerate(demands)])


def named(demand: ProcessDemand, number: int) -> ProcessDemand:
    fields = {name: getattr(demand, name) for name in ProcessDemand.__slots__}
    return ProcessDemand(**{**fields, "name": f"p{number}"})


def test_processes_of_different_groups_share_gpus_if_their_memory_allows_it():
    node = ClusterNode("n0", "127.0.0.1", 1, 2, gpu_memory=80 * GIB, allows_sharing=True)
    ranks = trainer(2, gpu_memory=50 * GIB, gpu_group="trainer")
    engines = [engine(number, gpu_memory=20 * GIB) for number in range(2)]
    teacher = ProcessDemand("models/teacher", "cluster.models", 1, 1, gpu_memory=10 * GIB, gpu_group="models/teacher")
    placed = place_processes([ranks, *engines, teacher], [node])
    assert placed["trainer"] == (Place("n0", (0,)), Place("n0", (1,)))
    assert [placed[f"inference/{number}"] for number in range(2)] == [(Place("n0", (0,)),), (Place("n0", (1,)),)]
    assert placed["models/teacher"] == (Place("n0", (0,)),)
    with pytest.raises(ClusterTooSmall, match="no room for models/teacher"):
        place_processes([ranks, *engines, dataclasses.replace(teacher, gpu_memory=11 * GIB)], [node])


@given(node_lists, demand_lists)
def test_nothing_is_overcommitted_and_every_needed_process_is_placed_or_refused(nodes, demands):
    by_name, node_by_name = {demand.name: demand for demand in demands}, {node.name: node for node in nodes}
    needed = {demand.name for demand in demands if not demand.is_optional}
    try:
        placed = place_processes(demands, nodes)
    except ClusterTooSmall as error:
        assert needed & set(re.findall(r"p\d", str(error)))
        return
    assert placed == place_processes(demands, nodes)
    assert needed <= placed.keys()
    used: dict[str, Counter] = {node.name: Counter() for node in nodes}
    used_gpus: set[tuple[str, int]] = set()
    for name, places in placed.items():
        demand = by_name[name]
        assert len(places) == demand.num_ranks
        for node_name, gpus in places:
            node = node_by_name[node_name]
            assert len(gpus) == demand.gpus and not used_gpus & {(node_name, gpu) for gpu in gpus}
            used_gpus |= {(node_name, gpu) for gpu in gpus}
            assert not demand.allowed_nodes or {node.name, node.host} & set(demand.allowed_nodes)
            amounts = {"cores": demand.cores, "gpus": demand.gpus, "memory": demand.memory, demand.role: 1}
            used[node_name].update(amounts)
            if demand.max_per_node is not None:
                limits = [d.max_per_node for d in demands if d.role == demand.role and d.max_per_node is not None]
                assert used[node_name][demand.role] <= max(limits) or len(limits) < sum(
                    d.role == demand.role for d in demands
                )
    for node in nodes:
        total = used[node.name]
        assert total["cores"] <= node.num_cpus and total["gpus"] <= node.num_gpus
        assert node.memory is None or total["memory"] <= node.memory


# -- processes that are started again ----------------------------------------------------------------------------------

NODES = build_nodes((8, 0), (8, 2), (8, 2), (8, 2))


class NodeAssignments:
    """Assignments, of which only the nodes are looked at."""

    def __init__(self, demands, nodes=NODES) -> None:
        self.assignments = Assignments(demands, place_processes(demands, nodes))

    def assign(self, name: str, nodes) -> tuple[str, ...]:
        return tuple(place.node for place in self.assignments.assign(name, nodes))


def without(*names: str):
    return [node for node in NODES if node.name not in names]


def test_process_keeps_its_node_as_long_as_it_is_there():
    assignments = NodeAssignments([engine(0), engine(1)])
    assert assignments.assign("inference/0", NODES) == ("n1",)
    assert assignments.assign("inference/0", without("n2", "n3")) == ("n1",)


@pytest.mark.parametrize("limit", [{"allowed_nodes": ("n1", "n3")}, {"max_per_node": 1}, {"memory": 40 * GIB}])
def test_lost_node_is_replaced_by_one_that_the_demand_allows(limit):
    demands = [engine(0, **limit), ProcessDemand("env/train/a/0", "cluster.env_servers", 1, allowed_nodes=("n2",))]
    demands.append(engine(1, **{**limit, "allowed_nodes": ("n2",)}))
    assignments = NodeAssignments(demands)
    assert assignments.assign("inference/0", without("n1")) == ("n3",)


@pytest.mark.parametrize("limit", [{"allowed_nodes": ("n1",)}, {"max_per_node": 1}, {"memory": 40 * GIB}])
def test_process_waits_if_no_node_is_allowed_to_run_it(limit):
    assignments = NodeAssignments([engine(0, **limit), engine(1, **{**limit, "allowed_nodes": ("n2",)})])
    assert assignments.assign("inference/0", without("n1", "n3")) == ()
    assert assignments.assign("inference/0", without("n3")) == ("n1",)  # n1 has joined again


def test_room_of_a_process_that_is_being_restarted_is_left_to_it():
    nodes = build_nodes((8, 0), (8, 1), (8, 1))
    assignments = NodeAssignments([engine(0), engine(1)], nodes)
    assert assignments.assign("inference/0", [nodes[0], nodes[2]]) == ()
    assert assignments.assign("inference/1", [nodes[0], nodes[2]]) == ("n2",)


def test_room_of_a_gang_that_waits_for_a_node_is_left_to_it():
    nodes = build_nodes((8, 0), (8, 1), (8, 1), (8, 1))
    assignments = NodeAssignments([trainer(2), engine(0)], nodes)
    assert assignments.assign("trainer", nodes[:2]) == ()
    assert assignments.assign("inference/0", nodes[:2]) == ()
    assert assignments.assign("trainer", nodes[:3]) == ("n1", "n2")


def test_head_has_room_left_for_the_orchestrator():
    orchestrator = ProcessDemand("orchestrator", "cluster", 1, allowed_nodes=("n0",))
    env_server = ProcessDemand("env/train/a/0", "cluster.env_servers", 8)
    assignments = NodeAssignments([orchestrator, env_server])
    assert assignments.assign("env/train/a/0", without("n1", "n2", "n3")) == ()


def test_gang_is_assigned_again_as_a_whole():
    demands = [trainer(4), engine(0)]
    assignments = NodeAssignments(demands)
    assert assignments.assign("trainer", NODES) == ("n1", "n1", "n2", "n2")
    assert assignments.assign("inference/0", NODES) == ("n3",)
    assert assignments.assign("trainer", without("n2")) == ()
    joined = [*without("n2"), dataclasses.replace(NODES[1], name="n4", host="10.0.0.4")]
    assert assignments.assign("trainer", joined) == ("n1", "n1", "n4", "n4")
    assert assignments.assign("trainer", joined) == ("n1", "n1", "n4", "n4")
