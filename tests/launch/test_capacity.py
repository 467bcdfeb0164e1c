"""Whether a run fits its nodes, what would fit, and the plan of a cluster as `--dry-run` prints it."""

import pytest

from ramify.cli import main
from ramify.core.errors import ClusterTooSmall, ConfigInvalid
from ramify.launch.capacity import check_allocation, find_long_path_warning, place_run, plan_moments
from ramify.launch.demands import list_planned_nodes
from ramify.orchestrate.run_config import RunConfig
from ramify.train.checkpoint_manifest import CheckpointManifest
from tests.support.plans import build_machine
from tests.support.ray import StubRay

TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}


def test_several_nodes_without_a_shared_directory_are_refused():
    config = RunConfig.model_validate({"train": [TRAIN], "cluster": {"launcher": "ray"}})
    nodes = list_planned_nodes(config)
    assert len(nodes) == 1 and place_run(config, nodes).head.is_head
    with pytest.raises(ConfigInvalid, match=r"cluster\.shared_directory: the cluster has 2 nodes"):
        place_run(config, nodes * 2)


@pytest.mark.parametrize("cores", [5, 8])
def test_cores_that_are_not_configured_are_lowered_before_a_run_is_refused(cores):
    def place(num_cores: int, **cluster: object) -> dict[str, int]:
        config = {"launcher": "ray", "node": {"cores": num_cores}, **cluster}
        run = RunConfig.model_validate({"train": [TRAIN], "eval": [TRAIN], "cluster": config})
        return {demand.name: demand.cores for demand in place_run(run, list_planned_nodes(run)).demands}

    assert set(place(cores).values()) == {1} and len(place(cores)) == 5
    assert place(16)["trainer"] == 3 and place(32)["trainer"] == 10
    for num_cores, cluster in ((4, {}), (cores, {"trainer": {"cores": cores}})):
        with pytest.raises(ClusterTooSmall, match="no room for"):
            place(num_cores, **cluster)


def build_run(model: str, **more) -> RunConfig:
    return RunConfig.model_validate({"train": [TRAIN], "model": {"name": model}, "seq_len": 256, **more})


def test_a_run_that_needs_too_much_memory_is_refused_with_what_would_fit():
    with pytest.raises(ClusterTooSmall, match=r"not enough memory: GPU 0 has 80.0 GiB, the run needs about \d+"):
        place_run(build_run("org/Some-32B"), [build_machine(2)])
    with pytest.raises(ClusterTooSmall, match=r"not enough memory: this machine has .*(?s:.)* --assume-gpus 8x80"):
        place_run(build_run("org/Some-32B"), [build_machine()])
    with pytest.raises(ClusterTooSmall, match=r"with --trainer.lora.enabled true .*, or with .* on 2 GPUs"):
        place_run(build_run("org/Some-4B"), [build_machine(1)])
    with pytest.raises(ClusterTooSmall, match=r"it would fit with a smaller model, or with vLLM engines of several"):
        place_run(build_run("org/Some-700B"), [build_machine(8)])


def test_advice_is_not_repeated_with_more_settings_or_gpus():
    with pytest.raises(ClusterTooSmall, match=r"it would fit with --trainer.pack_tokens 4096$"):
        place_run(build_run("org/Some-4B"), [build_machine(4, gpu_gib=60)])


def test_copies_of_shared_weights_are_counted():
    for num_gpus, element_bytes, lora in ((0, 4, False), (1, 2, False), (1, 2, True)):
        disk, ipc = (
            place_run(
                build_run("org/Some-1B", weights={"transport": transport}, trainer={"lora": {"enabled": lora}}),
                [build_machine(num_gpus, memory_gib=256)],
            )
            for transport in ("disk", "ipc")
        )
        more = {name: used - before for (name, used, _), (_, before, _) in zip(ipc.list_memory(), disk.list_memory())}
        copy = pytest.approx(element_bytes * 10**9, rel=0.06)  # in host memory, and of merged weights on a GPU
        assert more == ({"GPU 0": copy if lora else 0} if num_gpus else {}) | {"this machine": copy}


@pytest.mark.parametrize(
    ("num_gpus", "gib", "moments"), [(1, 80, "float32"), (1, 34, "8bit"), (1, 16, "float32"), (0, 0, "auto")]
)
def test_moments_have_8_bits_where_float32_does_not_fit_and_8_bits_do(tmp_path, num_gpus, gib, moments):
    settings = {"inference": {"kv_memory_fraction": 0.05}, "trainer": {"pack_tokens": 1024}, "output": tmp_path}
    run = plan_moments(build_run("org/Some-2B", **settings), [build_machine(num_gpus, gpu_gib=gib)])
    assert run.trainer.optim.moments == moments


def test_an_allocation_that_fits_with_8_bits_is_accepted(tmp_path):
    settings = {"inference": {"kv_memory_fraction": 0.05}, "trainer": {"pack_tokens": 1024}, "output": tmp_path}
    cluster = {"launcher": "ray", "node": {"cores": 16, "gpus": 2, "gpu_memory_gib": 30}}
    run = build_run("org/Some-2B", **settings, cluster=cluster)
    check_allocation(run)
    assert plan_moments(run, list_planned_nodes(run)).trainer.optim.moments == "8bit"


def test_moments_continue_as_in_the_checkpoints_unless_the_run_starts_over(tmp_path):
    run, nodes = build_run("org/Some-1B", output=tmp_path), [build_machine(8)]
    checkpoint = run.path / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    CheckpointManifest(step=1, optimizer="adamw-8bit", note={}, files={}).write(checkpoint)
    assert plan_moments(run, nodes).trainer.optim.moments == "8bit"
    assert plan_moments(run, nodes, fresh=True).trainer.optim.moments == "float32"


def test_8_bits_are_neither_chosen_nor_advised_for_several_ranks(tmp_path):
    settings, nodes = {"launch": {"trainer_gpus": 2}, "output": tmp_path}, [build_machine(4, gpu_gib=34)]
    compact = build_run("org/Some-4B", trainer={"pack_tokens": 1024, "recompute_layers": 99}, **settings)
    assert plan_moments(compact, nodes).trainer.optim.moments == "float32"
    with pytest.raises(ClusterTooSmall, match=r"it would fit with .*--trainer.lora.enabled true") as caught:
        place_run(build_run("org/Some-4B", **settings), nodes)
    assert "8bit" not in caught.value.message


def test_paths_longer_than_a_pack_are_warned_about_not_refused():
    def find_warning(num_gpus: int, seq_len: int) -> str | None:
        run = build_run("org/Some-1B", seq_len=seq_len)
        return find_long_path_warning(run, place_run(run, [build_machine(num_gpus)]))

    assert find_warning(2, 16384) is None
    warnings = [find_warning(num_gpus, 28000) for num_gpus in (2, 4, 8)]  # the trainer has one rank on each of them
    assert warnings[0] == warnings[1] == warnings[2]
    assert warnings[0] is not None and "GPU 0 has 80.0 GiB, the run needs about" in warnings[0]


@pytest.fixture
def run_file(tmp_path, monkeypatch, check_plugins_in_process):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(
        'name = "run"\nseq_len = 256\n[[train]]\nname = "reverse"\ntaskset = { id = "reverse-text" }\n'
        '[cluster]\nnum_nodes = 2\nshared_directory = "/shared"\nnode = { cores = 8, gpus = 2, memory_gib = 16 }\n'
        "trainer = { num_ranks = 2 }\n"
    )
    return "run.toml"


def test_a_dry_run_prints_who_runs_where(run_file, capsys):
    assert main(["rl", "@", run_file, "--cluster", "ray", "--dry-run"]) == 0
    first, step, origin, *lines = capsys.readouterr().out.splitlines()
    assert first == "run outputs/run: tiny, 100 steps"
    assert step == "step: 8 groups, about 128 rollouts (reverse: groups of 16)"
    assert origin.startswith("nodes as in [cluster.node], because cluster.")
    assert lines[:11] == [
        "",
        "node-0 (node-0, head): 2 GPUs of 80 GiB, 8 cores, 16 GiB",
        "  orchestrator: 1 core, 0.3 GiB of memory",
        "  inference/0: 1 GPU, 2 cores, 1.0 GiB of memory, 1.2 GiB of GPU memory per GPU",
        "  inference/1: 1 GPU, 2 cores, 1.0 GiB of memory, 1.2 GiB of GPU memory per GPU",
        "  env/train/reverse/1: 2 cores, 0.4 GiB of memory",
        "",
        "node-1 (node-1): 2 GPUs of 80 GiB, 8 cores, 16 GiB",
        "  trainer rank 0: 1 GPU, 2 cores, 1.0 GiB of memory, 1.5 GiB of GPU memory per GPU",
        "  trainer rank 1: 1 GPU, 2 cores, 1.0 GiB of memory, 1.5 GiB of GPU memory per GPU",
        "  env/train/reverse/0: 2 cores, 0.4 GiB of memory",
    ]


def test_a_dry_run_lists_everything_that_does_not_fit(run_file, capsys):
    args = ["--cluster.trainer.num_ranks", "5", "--cluster.env_servers.cores", "32"]
    assert main(["rl", "@", run_file, "--cluster", "ray", "--dry-run", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ClusterTooSmall: the run does not fit the cluster:")
    assert "cluster.trainer: trainer: 4 of 5 ranks fit" in error and "no room for env/train/reverse/0" in error
    assert "\n  nodes as in [cluster.node], because cluster." in error


def test_a_dry_run_says_how_many_nodes_have_joined_and_plans_the_others(run_file, capsys, monkeypatch):
    monkeypatch.setattr("ramify.launch.ray_launcher.connect_to_ray", lambda address: StubRay("a"))
    assert main(["rl", "@", run_file, "--cluster", "ray", "--dry-run", "--cluster.trainer.num_ranks", "1"]) == 0
    _, _, origin, *lines = capsys.readouterr().out.splitlines()
    assert origin == (
        "nodes of the Ray cluster at 'auto'; 1 of 2 nodes have joined (a); "
        "the run would wait up to 600 s for the others, planned as in [cluster.node]"
    )
    assert {"a (a, head): 0 GPUs, 4 cores", "node-1 (node-1): 2 GPUs of 80 GiB, 8 cores, 16 GiB"} <= set(lines)


def test_a_dry_run_on_ray_plans_with_the_configured_memory_of_a_gpu(run_file, capsys, monkeypatch):
    ray = StubRay("a", "b")
    ray.num_gpus = 2
    monkeypatch.setattr("ramify.launch.ray_launcher.connect_to_ray", lambda address: ray)
    command = ["rl", "@", run_file, "--cluster", "ray", "--dry-run", "--cluster.env_servers.cores", "1"]
    assert main(command) == 0
    output, note = capsys.readouterr().out, "note: each GPU is assumed to have 80 GiB, which Ray does not report"
    assert "a (a, head): 2 GPUs of 80 GiB, 4 cores" in output
    assert f"{note}; set cluster.node.gpu_memory_gib" in output
    assert main([*command, "--cluster.node.gpu_memory_gib", "1.25"]) == 2
    error = capsys.readouterr().err
    assert "has 1.2 GiB, the run needs about" in error and "assumed" not in error


def test_a_dry_run_says_what_other_jobs_use(run_file, capsys, monkeypatch):
    ray = StubRay("a", "b")
    ray.used_cores = 3
    monkeypatch.setattr("ramify.launch.ray_launcher.connect_to_ray", lambda address: ray)
    args = ["--cluster.trainer.num_ranks", "1", "--cluster.env_servers.cores", "1"]
    assert main(["rl", "@", run_file, "--cluster", "ray", "--dry-run", *args]) == 0
    usage = "other Ray jobs use 0 GPUs and 3 cores, and 0 GPUs and 5 cores are free"
    origin = "nodes of the Ray cluster at 'auto', planned as if they were free"
    assert capsys.readouterr().out.splitlines()[2] == f"{origin}: {usage}"
