"""Assignments of processes to nodes while nodes are lost and join: what the configuration forbids never happens."""

import dataclasses

import pytest

from ramify.launch.node_assignments import NodeAssignments
from ramify.launch.placement import ProcessDemand, place_processes
from tests.launch.test_placement import GIB, build_nodes, engine, trainer

NODES = build_nodes((8, 0), (8, 2), (8, 2), (8, 2))


def assign_all(demands, nodes=NODES) -> NodeAssignments:
    return NodeAssignments(demands, place_processes(demands, nodes))


def without(*names: str):
    return [node for node in NODES if node.name not in names]


def test_process_keeps_its_node_as_long_as_it_is_there():
    assignments = assign_all([engine(0), engine(1)])
    assert assignments.assign("inference/0", NODES) == ("n1",)
    assert assignments.assign("inference/0", without("n2", "n3")) == ("n1",)


@pytest.mark.parametrize("limit", [{"allowed_nodes": ("n1", "n3")}, {"max_per_node": 1}, {"memory": 40 * GIB}])
def test_lost_node_is_replaced_by_one_that_the_demand_allows(limit):
    demands = [engine(0, **limit), ProcessDemand("env/train/a/0", "cluster.env_servers", 1, allowed_nodes=("n2",))]
    demands.append(engine(1, **{**limit, "allowed_nodes": ("n2",)}))
    assignments = assign_all(demands)
    assert assignments.assign("inference/0", without("n1")) == ("n3",)


@pytest.mark.parametrize("limit", [{"allowed_nodes": ("n1",)}, {"max_per_node": 1}, {"memory": 40 * GIB}])
def test_process_waits_if_no_node_is_allowed_to_run_it(limit):
    assignments = assign_all([engine(0, **limit), engine(1, **{**limit, "allowed_nodes": ("n2",)})])
    assert assignments.assign("inference/0", without("n1", "n3")) == ()
    assert assignments.assign("inference/0", without("n3")) == ("n1",)  # n1 has joined again


def test_room_of_a_process_that_is_being_restarted_is_left_to_it():
    nodes = build_nodes((8, 0), (8, 1), (8, 1))
    assignments = assign_all([engine(0), engine(1)], nodes)
    assert assignments.assign("inference/0", [nodes[0], nodes[2]]) == ()
    assert assignments.assign("inference/1", [nodes[0], nodes[2]]) == ("n2",)


def test_room_of_a_gang_that_waits_for_a_node_is_left_to_it():
    nodes = build_nodes((8, 0), (8, 1), (8, 1), (8, 1))
    assignments = assign_all([trainer(2), engine(0)], nodes)
    assert assignments.assign("trainer", nodes[:2]) == ()
    assert assignments.assign("inference/0", nodes[:2]) == ()
    assert assignments.assign("trainer", nodes[:3]) == ("n1", "n2")


def test_head_has_room_left_for_the_orchestrator():
    orchestrator = ProcessDemand("orchestrator", "cluster", 1, allowed_nodes=("n0",))
    env_server = ProcessDemand("env/train/a/0", "cluster.env_servers", 8)
    assignments = assign_all([orchestrator, env_server])
    assert assignments.assign("env/train/a/0", without("n1", "n2", "n3")) == ()


def test_gang_is_assigned_again_as_a_whole():
    demands = [trainer(4), engine(0)]
    assignments = assign_all(demands)
    assert assignments.assign("trainer", NODES) == ("n1", "n1", "n2", "n2")
    assert assignments.assign("inference/0", NODES) == ("n3",)
    assert assignments.assign("trainer", without("n2")) == ()
    joined = [*without("n2"), dataclasses.replace(NODES[1], name="n4", host="10.0.0.4")]
    assert assignments.assign("trainer", joined) == ("n1", "n1", "n4", "n4")
    assert assignments.assign("trainer", joined) == ("n1", "n1", "n4", "n4")
