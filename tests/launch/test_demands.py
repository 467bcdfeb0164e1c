"""Counts, cores and GPUs of a run's processes, configured or derived from the nodes."""

import pytest

from ramify.core.errors import ClusterTooSmall, ConfigInvalid
from ramify.launch.demands import GpuDivision, build_demands
from ramify.launch.launcher import ClusterNode
from ramify.launch.placement import ProcessDemand, place_processes
from ramify.orchestrate.run_config import RunConfig
from ramify.train.memory import ModelSize
from tests.support.plans import GIB, build_machine

TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}
EVAL = {"taskset": {"id": "reverse-text", "split": "eval"}}
SMALL = ModelSize(1_000_000, 4, 64, 256, 64)
LARGE = ModelSize(8_000_000_000, 32, 4096, 12288, 2048)
TEACHER = {"models": {"teacher": {"name": "tiny"}}}
VLLM_2 = {"inference": {"engine": "vllm", "tensor_parallel": 2}}


def build_nodes(count: int, cores: int, gpus: int = 0) -> list[ClusterNode]:
    return [
        ClusterNode(f"n{i}", f"10.0.0.{i}", cores, gpus, memory=256 * GIB, gpu_memory=80 * GIB, is_head=i == 0)
        for i in range(count)
    ]


def build(nodes, *, size: ModelSize = SMALL, **more) -> tuple[dict[str, ProcessDemand], list[str]]:
    config = RunConfig(**{"train": [TRAIN], "eval": [EVAL], **more})
    demands, reasons = build_demands(config, nodes, find_size=lambda _: size)
    return {demand.name: demand for demand in demands}, reasons


def place(nodes, *, size: ModelSize = SMALL, cluster=None, **more) -> tuple[dict, dict[str, ProcessDemand]]:
    table = {"launcher": "ray", "shared_directory": "/shared", **(cluster or {})}
    demands, _ = build(nodes, size=size, cluster=table, **more)
    places = place_processes(list(demands.values()), nodes)
    return {name: tuple(place.node for place in ranks) for name, ranks in places.items()}, demands


# -- one machine -------------------------------------------------------------------------------------------------------


def divide(num_gpus: int, **more) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each process on one machine; a gang's are in one tuple."""
    machine = build_machine(num_gpus, cores=64, memory_gib=1024)
    demands, _ = build([machine], **more)
    places = place_processes(list(demands.values()), [machine])
    gpus = {name: tuple(gpu for place in ranks for gpu in place.gpus) for name, ranks in places.items()}
    return {name: numbers for name, numbers in gpus.items() if numbers}


@pytest.mark.parametrize("more", [{}, {"trainer": {"lora": {"rank": 8}}}, TEACHER, VLLM_2], ids=str)
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "8B"])
@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_all_gpus_of_a_machine_are_used(num_gpus, size, more):
    if num_gpus < 2 and more is VLLM_2:
        with pytest.raises(ConfigInvalid, match=r"inference.tensor_parallel: the run needs 2 GPUs, found 1"):
            divide(num_gpus, size=size, **more)
        return
    config = RunConfig(train=[TRAIN], eval=[EVAL], **more)
    demands, _ = build_demands(config, [build_machine(num_gpus, cores=64)], find_size=lambda _: size)
    unlimited = [ProcessDemand(d.name, d.role, d.cores, d.gpus, 0, 0, d.gpu_group, d.num_ranks) for d in demands]
    places = place_processes(unlimited, [build_machine(num_gpus)])
    assert {gpu for ranks in places.values() for place in ranks for gpu in place.gpus} == set(range(num_gpus))
    is_shared = any(demand.gpu_group for demand in demands if demand.name == "trainer")
    assert len(places["trainer"]) <= (num_gpus if is_shared else num_gpus // 2)


def test_trainer_gets_the_fewest_gpus_that_hold_its_state_and_engines_the_rest():
    assert divide(1) == {"trainer": (0,), "inference/0": (0,)}
    assert divide(2) == {"trainer": (0,), "inference/0": (1,)}
    assert divide(4) == {"trainer": (0,), **{f"inference/{number}": (number + 1,) for number in range(3)}}
    trainer = {"recompute_layers": 99}
    _, (trainer_reason, engine_reason) = build([build_machine(8)], size=LARGE, trainer=trainer)
    assert trainer_reason.startswith("trainer: 2 of 8 GPUs: the fewest that hold its state (") and (
        trainer_reason.endswith("; there are 80.0 GiB)")
    )
    assert engine_reason == "inference: 6 engines of 1 GPU each, on the GPUs that are left"


def test_other_models_get_gpus_of_their_own_unless_there_are_too_few():
    assert divide(1, **TEACHER) == {"trainer": (0,), "models/teacher": (0,), "inference/0": (0,)}
    two = divide(2, **TEACHER)
    assert two["trainer"] != two["inference/0"] and len(two["models/teacher"]) == 1
    assert divide(4, **TEACHER) == {
        "trainer": (0,),
        "models/teacher": (1,),
        "inference/0": (2,),
        "inference/1": (3,),
    }


def test_gpus_that_are_too_few_for_another_engine_train():
    assert divide(4, **VLLM_2) == {"trainer": (0, 1), "inference/0": (2, 3)}
    assert divide(2, **VLLM_2) == {"trainer": (0,), "inference/0": (0, 1)}
    eight = divide(8, **VLLM_2)
    assert len(eight["trainer"]) == 2 and len([name for name in eight if name.startswith("inference/")]) == 3


def test_vllm_may_use_almost_all_of_its_gpu():
    assert len(divide(2, inference={"engine": "vllm", "gpu_memory_utilization": 0.97})) == 2


def test_configured_numbers_of_gpus_are_used():
    launch = {"trainer_gpus": 2, "inference_gpus": 5}
    gpus = divide(8, launch=launch)
    assert len(gpus["trainer"]) == 2 and len(gpus) == 6
    assert len(divide(8, launch={"inference_gpus": 3})["trainer"]) == 5  # the trainer gets what is left
    external = {"engine": "external", "base_url": ["http://10.0.0.1:8000"]}
    assert divide(4, inference=external) == {"trainer": (0, 1, 2, 3)}
    colocated = divide(2, launch={"gpu_placement": "colocated", "trainer_gpus": 1, "inference_gpus": 2})
    assert colocated == {"trainer": (0,), "inference/0": (1,), "inference/1": (0,)}


@pytest.mark.parametrize(
    ("num_gpus", "more", "text"),
    [
        (1, {"launch": {"gpu_placement": "split"}}, r"launch.gpu_placement: the run needs 2 GPUs, found 1"),
        (0, {"launch": {"gpu_placement": "colocated"}}, r"'colocated' requires both engine and trainer on GPUs"),
        (0, {"launch": {"trainer_gpus": 2}}, r"launch.trainer_gpus: 2 requires a trainer on GPUs; .*num_ranks"),
        (4, {"launch": {"inference_gpus": 3}, **VLLM_2}, r"launch.inference_gpus: expected a multiple of 2"),
        (0, {"launch": {"inference_gpus": 1}}, r"launch.inference_gpus: expected engines on GPUs"),
        (0, {"trainer": {"device": "cuda"}}, r"trainer.device: the run needs 1 GPU, found 0"),
        (0, {"inference": {"device": "cuda"}}, r"inference.device: the run needs 1 GPU, found 0"),
        (
            4,
            {"launch": {"trainer_gpus": 2}, "trainer": {"optim": {"moments": "8bit"}}},
            r"trainer.optim.moments: '8bit' needs a trainer of one rank, got 2",
        ),
    ],
)
def test_numbers_of_gpus_that_are_not_possible_are_refused(num_gpus, more, text):
    with pytest.raises(ConfigInvalid, match=text):
        divide(num_gpus, **more)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"launch": {"trainer_gpus": 2}, "cluster": {"trainer": {"num_ranks": 2}}}, "launch.trainer_gpus: not allowed"),
        (
            {"launch": {"inference_gpus": 2}, "cluster": {"engines": {"num_replicas": 2}}},
            "launch.inference_gpus: not allowed",
        ),
        ({"launch": {"base_port": 5000}, "cluster": {"env_servers": {"num_per_source": 2}}}, "launch.base_port: not"),
    ],
)
def test_a_number_is_configured_by_one_key(more, text):
    with pytest.raises(ValueError, match=text):
        RunConfig(train=[TRAIN], **more)


def test_without_gpus_engines_and_ranks_share_the_cores():
    def count_cores(cores: int, **cluster) -> dict[str, int]:
        demands, _ = build([build_machine(cores=cores)], cluster=cluster)
        return {name: demand.cores for name, demand in demands.items()}

    assert set(count_cores(2).values()) == {1}
    assert count_cores(16)["trainer"] == count_cores(16)["inference/0"] == 8
    several = count_cores(16, engines={"num_replicas": 2}, trainer={"num_ranks": 2}, env_servers={"num_per_source": 2})
    assert (several["trainer"], several["inference/1"], several["env/train/reverse/1"]) == (4, 4, 1)
    demands, _ = build([build_machine(2, cores=16)])
    assert demands["trainer"].cores == 4


# -- several nodes -----------------------------------------------------------------------------------------------------


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


def test_one_of_eight_gpus_trains_at_least():
    placed, demands = place(build_nodes(4, 64, 8))
    assert len(placed["trainer"]) == 4 and len(set(placed["trainer"])) == 1
    assert sum(name.startswith("inference/") for name in placed) == 28
    assert (demands["inference/0"].cores, demands["inference/0"].gpus) == (4, 1)
    assert sum(name.startswith("env/train/") for name in placed) == 4


def test_only_nodes_with_gpus_limit_the_memory_of_a_gpu():
    nodes = [ClusterNode("n0", "10.0.0.0", 8), ClusterNode("n1", "10.0.0.1", 8, 2, gpu_memory=141 * GIB)]
    assert GpuDivision(RunConfig(train=[TRAIN]), nodes, lambda _: SMALL).gpu_memory == 141 * GIB


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
    placed, demands = place(build_nodes(2, 64, 8), inference={"engine": "vllm", "tensor_parallel": 3})
    assert demands["trainer"].num_ranks == 4
    assert sum(name.startswith("inference/") for name in placed) == 3  # 1 on the trainer's node, 2 on the other


def test_external_services_need_no_room():
    inference = {"engine": "external", "base_url": ["http://10.1.1.1:8000"]}
    train = [{**TRAIN, "address": "tcp://10.1.1.1:5000"}]
    placed, _ = place(build_nodes(1, 4), inference=inference, train=train, eval=[])
    assert list(placed) == ["orchestrator", "trainer"]


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
        place(build_nodes(2, 64, 8), **vision, cluster={"trainer": {"num_ranks": 2}})
