"""Counts, cores and GPUs of a run's processes on a cluster, configured or derived from the nodes."""

import pytest

from ramify.core.errors import ClusterTooSmall, ConfigInvalid
from ramify.launch.cluster_demands import build_demands
from ramify.launch.launcher import ClusterNode
from ramify.launch.memory import ModelSize
from ramify.launch.placement import place_processes
from ramify.orchestrate.config import RunConfig

GIB = 1 << 30
TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}
EVAL = {"taskset": {"id": "reverse-text", "split": "eval"}}
SMALL = ModelSize(1_000_000, 4, 64, 256, 64)


def build_nodes(count: int, cores: int, gpus: int = 0) -> list[ClusterNode]:
    return [
        ClusterNode(f"n{i}", f"10.0.0.{i}", cores, gpus, memory=256 * GIB, gpu_memory=80 * GIB, is_head=i == 0)
        for i in range(count)
    ]


def place(nodes: list[ClusterNode], *, size: ModelSize = SMALL, cluster=None, **more) -> tuple[dict, dict]:
    table = {"launcher": "ray", "shared_directory": "/shared", **(cluster or {})}
    config = RunConfig(**{"train": [TRAIN], "eval": [EVAL], **more}, cluster=table)
    demands = build_demands(config, config.cluster, nodes, find_size=lambda _: size)
    return place_processes(demands, nodes), {demand.name: demand for demand in demands}


def test_a_cpu_cluster_gets_one_engine_one_rank_and_an_env_server_per_node():
    placed, demands = place(build_nodes(3, 4))
    assert placed == {
        "orchestrator": ("n0",),
        "trainer": ("n1",),
        "inference/0": ("n2",),
        "env/train/reverse/0": ("n1",),
        "env/train/reverse/1": ("n0",),
        "env/train/reverse/2": ("n2",),
        "env/eval/reverse-text/0": ("n2",),
    }
    assert (demands["trainer"].cores, demands["trainer"].gpus) == (1, 0)


def test_a_quarter_of_the_gpus_trains_and_the_others_sample():
    placed, demands = place(build_nodes(4, 64, 8))
    assert len(placed["trainer"]) == 8 and len(set(placed["trainer"])) == 1
    assert sum(name.startswith("inference/") for name in placed) == 24
    assert (demands["inference/0"].cores, demands["inference/0"].gpus) == (4, 1)
    assert sum(name.startswith("env/train/") for name in placed) == 4


def test_configured_counts_are_needed_and_derived_ones_are_not():
    nodes = build_nodes(2, 8, 2)
    placed, _ = place(nodes, cluster={"engines": {"num_replicas": 2}, "trainer": {"num_ranks": 2, "max_per_node": 1}})
    assert placed["trainer"] == ("n1", "n0") and "inference/1" in placed
    with pytest.raises(ClusterTooSmall, match=r"cluster\.engines: no room for inference/2, inference/3"):
        place(nodes, cluster={"engines": {"num_replicas": 4}, "trainer": {"num_ranks": 2}})


def test_engines_of_other_models_are_placed():
    placed, _ = place(build_nodes(1, 32, 4), models={"teacher": {"name": "tiny"}, "judge": {"name": "tiny"}})
    assert [name for name in placed if name.startswith(("models/", "inference/"))] == [
        "models/teacher",
        "models/judge",
        "inference/0",
    ]


def test_engines_with_several_gpus_are_as_many_as_fit():
    vllm = {"engine": "vllm"}
    placed, demands = place(build_nodes(2, 64, 8), inference=vllm, cluster={"engines": {"gpus": 3}})
    assert demands["trainer"].num_ranks == 4
    assert sum(name.startswith("inference/") for name in placed) == 3  # 1 on the trainer's node, 2 on the other


def test_external_services_need_no_room():
    inference = {"engine": "external", "base_url": ["http://10.1.1.1:8000"]}
    train = [{**TRAIN, "address": "tcp://10.1.1.1:5000"}]
    placed, _ = place(build_nodes(1, 4), inference=inference, train=train, eval=[])
    assert list(placed) == ["orchestrator", "trainer"]


def test_a_model_that_is_too_large_for_the_gpus_is_refused():
    large = ModelSize(70_000_000_000, 80, 8192, 28672, 2048)
    with pytest.raises(ClusterTooSmall, match=r"cluster\.trainer: .* GiB of GPU memory"):
        place(build_nodes(1, 64, 8), size=large)


def test_unknown_nodes_are_refused():
    with pytest.raises(ConfigInvalid, match=r"cluster\.trainer\.nodes: the cluster has no node 'n9'; .*n0, n1"):
        place(build_nodes(2, 8), cluster={"trainer": {"nodes": ["n9"]}})


def test_processes_that_must_not_use_gpus_get_none():
    placed, demands = place(build_nodes(2, 16, 2), inference={"device": "cpu"}, trainer={"device": "cpu"})
    assert not any(demand.gpus for demand in demands.values())
    assert "inference/0" in placed


def test_a_vision_model_is_trained_by_one_rank():
    vision = {"model": {"name": "tiny-vision"}}
    _, demands = place(build_nodes(2, 64, 8), **vision)
    assert demands["trainer"].num_ranks == 1
    with pytest.raises(ConfigInvalid, match=r"cluster.trainer.num_ranks: .* one rank.*got 2; set it to 1"):
        place(build_nodes(2, 64, 8), cluster={"trainer": {"num_ranks": 2}}, **vision)
