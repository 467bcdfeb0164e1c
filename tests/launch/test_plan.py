"""The launch plan: processes, configurations, devices, memory and ports."""

import shutil
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from ramify.core.config import parse
from ramify.core.errors import ConfigInvalid, PortTaken
from ramify.infer.config import ExternalConfig, ServeConfig
from ramify.launch import run_checks
from ramify.launch.completion import prepare_run_directory
from ramify.launch.devices import Gpu
from ramify.launch.plan import build_plan
from ramify.launch.process import ProcessRole
from ramify.launch.published_weights import find_newest_weights
from ramify.model.manifest import Manifest
from ramify.model.resolve import read_vocab_size, resolve_model_path
from ramify.orchestrate.config import RunConfig
from ramify.processes.prefork import get_import_env
from ramify.processes.training_lock import TRAINING_LOCK_VARIABLE
from ramify.rollout.envserver.config import EnvServerConfig
from ramify.trace.version import PolicyVersion
from ramify.train import weights_directory
from ramify.train.process_config import TrainerProcessConfig

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("check_plugins_in_process")]

GIB = 1 << 30
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}
EVAL = {"taskset": {"id": "reverse-text", "split": "eval"}}


def config(tmp_path, **more) -> RunConfig:
    return RunConfig(**{"name": "run", "output": tmp_path, "seq_len": 256, "train": [TRAIN], "eval": [EVAL], **more})


def gpu(number: int, size: float = 80) -> Gpu:
    return Gpu(str(number), "a GPU", int(size * GIB))


def test_every_process_gets_a_config_that_its_command_can_parse(tmp_path):
    plan = build_plan(config(tmp_path), gpus=[])
    plan.write()
    names = ["inference", "env/train/reverse", "env/eval/reverse-text", "orchestrator", "trainer"]
    assert [spec.name for spec in plan.process_specs] == names
    folder = tmp_path / "run" / "configs"
    serve = parse(ServeConfig, ["@", str(folder / "inference.toml")])
    env = parse(EnvServerConfig, ["@", str(folder / "env-train-reverse.toml")])
    run = parse(RunConfig, ["@", str(folder / "orchestrator.toml")])
    trainer = parse(TrainerProcessConfig, ["@", str(folder / "trainer.toml")])
    url = f"http://127.0.0.1:{serve.server.port}"
    assert (serve.server.model_name, serve.inference.max_model_len) == ("tiny", 256)
    assert env.inference == ExternalConfig(base_url=[url])
    assert env.select_source().key == "train/reverse"
    assert env.train[0].seq_len == 256
    assert run.path == trainer.path == tmp_path / "run"
    assert run.inference == ExternalConfig(base_url=[url])
    assert run.train[0].address == env.train[0].address
    assert trainer.address == run.orchestrator.address
    assert run.orchestrator.status_address == plan.status_address
    assert parse(RunConfig, ["@", str(tmp_path / "run" / "config.toml")]) == plan.config


def test_other_models_are_started_unless_their_servers_run_already(tmp_path):
    models = {"teacher": {"name": "tiny"}, "judge": {"base_url": ["http://10.0.0.1:8000"]}}
    distilled = {**TRAIN, "name": "copy", "algorithm": {"id": "sft"}, "teacher": "teacher"}
    penalized = {**TRAIN, "algorithm": {"id": "grpo", "beta": 0.1}}
    plan = build_plan(config(tmp_path, models=models, train=[penalized, distilled]), gpus=[])
    plan.write()
    specs, folder = {spec.name: spec for spec in plan.process_specs}, tmp_path / "run" / "configs"
    assert [name for name in specs if name.startswith("models/")] == ["models/teacher", "models/start"]
    assert specs["models/teacher"].role is ProcessRole.SERVICE
    serve = parse(ServeConfig, ["@", str(folder / "models-teacher.toml")])
    url = f"http://127.0.0.1:{serve.server.port}"
    assert (serve.model.name, serve.inference.max_model_len) == ("tiny", 257)
    run = parse(RunConfig, ["@", str(folder / "orchestrator.toml")])
    assert run.models["teacher"].base_url == [url] and run.models["judge"].base_url == ["http://10.0.0.1:8000"]
    sampled_by_teacher = parse(EnvServerConfig, ["@", str(folder / "env-train-copy.toml")])
    sampled_by_policy = parse(EnvServerConfig, ["@", str(folder / "env-train-reverse.toml")])
    assert sampled_by_teacher.inference.base_url == [url] != sampled_by_policy.inference.base_url
    assert specs["env/train/reverse"].env["RAMIFY_MODEL_TEACHER"] == f"{url} tiny"
    assert "models/judge: http://10.0.0.1:8000 (external, not managed by this run)" in plan.format_lines()


def test_plan_counts_the_groups_and_rollouts_of_a_step(tmp_path):
    orchestrator = {"batch_size": 128, "group_size": 4}
    lines = build_plan(config(tmp_path, orchestrator=orchestrator), gpus=[]).format_lines()
    assert lines[1] == "step: 32 groups, about 128 rollouts (reverse: groups of 4)"
    train = [{**TRAIN, "group_size": 1, "ratio": 3}, {**TRAIN, "name": "other"}]
    lines = build_plan(config(tmp_path, orchestrator=orchestrator, train=train), gpus=[]).format_lines()
    assert lines[1] == "step: 32 groups, about 56 rollouts (reverse: groups of 1, other: groups of 4)"


def test_plan_notes_models_that_no_source_uses(tmp_path):
    models = {name: {"name": "tiny"} for name in ("teacher", "helper", "unused")}
    harness = {"id": "chat", "models": {"small": {"base_url": "models.helper"}}}
    train = [{**TRAIN, "algorithm": {"id": "opd"}, "teacher": "teacher", "harness": harness}]
    lines = build_plan(config(tmp_path, models=models, train=train), gpus=[]).format_lines()
    (note,) = [line for line in lines if line.startswith("note:")]
    assert note.startswith("note: no source uses models.unused")


def test_other_models_share_the_gpu_of_the_engine_and_count_in_its_memory(tmp_path):
    alone = build_plan(config(tmp_path), gpus=[gpu(0)])
    plan = build_plan(config(tmp_path, models={"teacher": {"name": "tiny"}}), gpus=[gpu(0)])
    specs = {spec.name: spec for spec in plan.process_specs}
    assert specs["models/teacher"].env["CUDA_VISIBLE_DEVICES"] == specs["inference"].env["CUDA_VISIBLE_DEVICES"] == "0"
    assert plan.memory_estimate.inference > 1.5 * alone.memory_estimate.inference
    external = {"engine": "external", "base_url": ["http://10.0.0.1:8000"]}
    plan = build_plan(config(tmp_path, models={"teacher": {"name": "tiny"}}, inference=external), gpus=[gpu(0)])
    specs = {spec.name: spec for spec in plan.process_specs}
    assert specs["models/teacher"].env["CUDA_VISIBLE_DEVICES"] == "0"


def test_top_k_above_the_vocabulary_of_a_started_teacher_is_refused(tmp_path):
    vocab_size = read_vocab_size(resolve_model_path("tiny"))
    source = {**TRAIN, "teacher": "teacher", "sampling": {"temperature": 1.0}}

    def build(top_k, teacher):
        train = [{**source, "algorithm": {"id": "opd", "top_k": top_k}}]
        build_plan(config(tmp_path, train=train, models={"teacher": teacher}), gpus=[], dry_run=True)

    problem = f"train.0.algorithm.top_k: expected at most {vocab_size}, the vocabulary of models.teacher, got 5000"
    with pytest.raises(ConfigInvalid, match=problem):
        build(5000, {"name": "tiny"})
    build(vocab_size, {"name": "tiny"})
    build(5000, {"base_url": ["http://10.0.0.1:8000"]})


def test_missing_models_and_wrong_plugin_tables_are_reported_together(tmp_path):
    models = {"teacher": {"name": str(tmp_path / "nothing")}, "judge": {"name": "org/model"}}
    train = [{**TRAIN, "algorithm": {"id": "grpo", "normalise": True}}]
    with pytest.raises(ConfigInvalid) as caught:
        build_plan(config(tmp_path, model={"name": "tinny"}, models=models, train=train), gpus=[])
    head, *problems = caught.value.message.splitlines()
    assert head == "3 problems in the configuration:"
    keys = ["model.name", "models.teacher.name", "train.0.algorithm.normalise"]
    assert [problem.split(":")[0].strip() for problem in problems] == keys


def test_roles_and_preloaded_modules(tmp_path):
    specs = {spec.name: spec for spec in build_plan(config(tmp_path), gpus=[]).process_specs}
    assert specs["orchestrator"].role is ProcessRole.LEADER
    assert specs["trainer"].role is ProcessRole.FOLLOWER
    assert specs["inference"].role is ProcessRole.SERVICE
    assert {name for name, spec in specs.items() if spec.preload_modules} == {"inference", "trainer"}
    assert get_import_env(specs["inference"].env) == get_import_env(specs["trainer"].env)  # so they are forked from one
    gpu_specs = build_plan(config(tmp_path), gpus=[gpu(0)]).process_specs
    assert not any(spec.preload_modules for spec in gpu_specs)


def test_external_services_are_not_started(tmp_path):
    train = [{**TRAIN, "address": "tcp://127.0.0.1:5001"}]
    inference = {"engine": "external", "base_url": ["http://127.0.0.1:9"]}
    plan = build_plan(config(tmp_path, train=train, eval=[], inference=inference), gpus=[])
    assert [spec.name for spec in plan.process_specs] == ["orchestrator", "trainer"]
    text = "\n".join(plan.format_lines())
    assert "inference: http://127.0.0.1:9 (external, not managed by this run)" in text
    assert "env/train/reverse: tcp://127.0.0.1:5001" in text


def test_fixed_ports_are_used_or_refused(tmp_path, free_port):
    base = free_port
    plan = build_plan(config(tmp_path, launch={"base_port": base}), gpus=[])
    addresses = [spec.address for spec in plan.process_specs if spec.name.startswith("env/")]
    assert addresses == [f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + 1000}"]
    plan.reservation.close()
    with socket.create_server(("127.0.0.1", base)):
        with pytest.raises(PortTaken, match=f"train/reverse: tcp://127.0.0.1:{base} cannot be listened on"):
            build_plan(config(tmp_path, launch={"base_port": base}), gpus=[])
        mine = [{**TRAIN, "address": f"tcp://127.0.0.1:{base}"}]  # the server of an external source is there already
        build_plan(config(tmp_path, train=mine, launch={"base_port": base}), gpus=[])


@pytest.mark.skipif(not EPHEMERAL.exists(), reason="only Linux says which ports it gives away")
def test_free_ports_are_outside_the_ephemeral_range(tmp_path):
    """Another program took such a port while an env server restarted, and each of its ten restarts failed."""
    lowest = int(EPHEMERAL.read_text().split()[0])
    servers = [spec for spec in build_plan(config(tmp_path), gpus=[]).process_specs if spec.name.startswith("env/")]
    ports = [int(spec.address.rpartition(":")[2]) for spec in servers]
    assert len(ports) == len(set(ports)) == 2 and max(ports) < lowest


def test_configured_orchestrator_address_is_used(tmp_path, free_port):
    told = {"address": f"tcp://127.0.0.1:{free_port}"}
    plan = build_plan(config(tmp_path, orchestrator=told), gpus=[])
    assert (
        plan.orchestrator_address
        == plan.config_files[tmp_path / "run" / "configs" / "trainer.toml"].address
        == told["address"]
    )
    plan.reservation.close()
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(PortTaken, match=r"orchestrator\.address"):
        build_plan(config(tmp_path, orchestrator=told), gpus=[])


@pytest.mark.parametrize("transport", ["disk", "shm"])
def test_restarted_engine_serves_the_newest_weights(tmp_path, monkeypatch, transport):
    monkeypatch.setattr(weights_directory, "SHM_ROOT", tmp_path)
    plan = build_plan(config(tmp_path, weights={"transport": transport}), gpus=[])
    weights = weights_directory.get_weights_directory(tmp_path / "run", transport)
    engine, file = plan.process_specs[0], tmp_path / "run" / "configs" / "inference.toml"
    engine.prepare()
    assert parse(ServeConfig, ["@", str(file)]).model.name == "tiny"
    for incarnation, step in ((0, 9), (1, 4), (1, 3)):
        folder = weights / f"{incarnation}-{step:06}"
        folder.mkdir(parents=True)
        Manifest(PolicyVersion("tiny", incarnation, step), {}).write(folder)
    assert find_newest_weights(weights).name == "1-000004"
    engine.prepare()
    served = parse(ServeConfig, ["@", str(file)])
    assert served.model.name.endswith("1-000004")
    shutil.rmtree(weights / "1-000004")  # the trainer continues while the engine starts
    assert Manifest.read(Path(served.model.name)).version == PolicyVersion("tiny", 1, 4)
    assert served.server.model_name == "tiny"


def test_engines_fetch_weights_from_the_url_to_which_the_trainer_copies_them(tmp_path):
    plan = build_plan(config(tmp_path, weights={"url": "s3://bucket/weights/"}), gpus=[])
    plan.write()
    folder = tmp_path / "run" / "configs"
    trainer = parse(TrainerProcessConfig, ["@", str(folder / "trainer.toml")])
    serve = parse(ServeConfig, ["@", str(folder / "inference.toml")])
    assert trainer.weights.url_for(trainer.path) == serve.inference.weights_url == "s3://bucket/weights/run"
    for table, text in (
        ({"weights": {"url": "s3://b", "transport": "ipc"}}, "url: not allowed with transport"),
        ({"weights": {"url": "s3://b"}, "inference": {"engine": "vllm"}}, "vLLM reads weights from"),
    ):
        with pytest.raises(ValueError, match=text):
            config(tmp_path, **table)


def test_trainer_has_one_process_per_gpu(tmp_path):
    several = config(tmp_path, launch={"gpu_placement": "split", "trainer_gpus": 2})
    plan = build_plan(several, gpus=[gpu(0), gpu(1), gpu(2)])
    trainer = plan.process_specs[-1]
    assert trainer.env["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert "--nproc-per-node" in trainer.command


def test_several_ranks_are_refused_for_a_vision_model_that_was_just_downloaded(tmp_path, monkeypatch):
    repo_directory = tmp_path / "hub" / "models--org--vision"

    def download(name):
        shutil.copytree(resolve_model_path("tiny-vision"), repo_directory / "snapshots" / "0")
        (repo_directory / "refs").mkdir()
        (repo_directory / "refs" / "main").write_text("0")

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(run_checks, "fetch_model", download)
    launch, gpus = {"gpu_placement": "split", "trainer_gpus": 2}, [gpu(number) for number in range(3)]
    with pytest.raises(ConfigInvalid, match=r"launch.trainer_gpus: org/vision .* one rank, got 2; set it to 1"):
        build_plan(config(tmp_path, launch=launch, model={"name": "org/vision"}), gpus=gpus)


@pytest.mark.parametrize(
    ("launch", "gpus", "text"),
    [
        ({"gpu_placement": "split"}, 1, "launch.gpu_placement: the run needs 2 GPUs, found 1"),
        (
            {"gpu_placement": "colocated"},
            0,
            "launch.gpu_placement: 'colocated' requires both engine and trainer on GPUs",
        ),
        ({"trainer_gpus": 2}, 2, "launch.trainer_gpus: 2 requires launch.gpu_placement = 'split'"),
        ({"trainer_gpus": 2}, 0, "launch.trainer_gpus: 2 requires a trainer on GPUs; it runs on the CPU"),
        (
            {"trainer_gpus": 2, "gpu_placement": "split"},
            0,
            "launch.trainer_gpus: 2 requires a trainer on GPUs; it runs on the CPU",
        ),
    ],
)
def test_missing_gpus_are_refused(tmp_path, launch, gpus, text):
    with pytest.raises(ConfigInvalid, match=text):
        build_plan(config(tmp_path, launch=launch), gpus=[gpu(number) for number in range(gpus)])


def test_engine_waits_for_the_trainer_only_if_they_share_a_gpu(tmp_path):
    for placement, num_gpus, is_set in (("colocated", 1, True), ("split", 2, False)):
        asked = config(tmp_path, launch={"gpu_placement": placement})
        specs = build_plan(asked, gpus=[gpu(number) for number in range(num_gpus)]).process_specs
        paths = {spec.name: spec.env.get(TRAINING_LOCK_VARIABLE) for spec in specs}
        expected = str(asked.path.resolve() / "training.lock") if is_set else None
        assert (paths["inference"], paths["trainer"], paths["orchestrator"]) == (expected, expected, None)


def test_weights_in_memory_need_an_engine_on_the_trainers_device(tmp_path):
    ipc, url = {"transport": "ipc"}, {"engine": "external", "base_url": ["http://127.0.0.1:1"]}
    build_plan(config(tmp_path, weights=ipc), gpus=[])
    build_plan(config(tmp_path, weights=ipc, launch={"gpu_placement": "colocated"}), gpus=[gpu(0)])
    for gpus, more in (([gpu(0), gpu(1)], {"launch": {"gpu_placement": "split"}}), ([], {"inference": url})):
        with pytest.raises(ConfigInvalid, match=r"weights.transport: 'ipc' needs a native engine that the run starts"):
            build_plan(config(tmp_path, weights=ipc, **more), gpus=gpus)


def test_dry_run_plans_for_another_machine(tmp_path):
    asked = {"model": {"name": "Qwen/Qwen3-0.6B"}, "trainer": {"device": "cuda"}, "inference": {"device": "cuda"}}
    text = "\n".join(
        build_plan(config(tmp_path, launch={"gpu_placement": "split"}, **asked), dry_run=True, gpus=[]).format_lines()
    )
    assert "GPU 1 (not on this machine)" in text
    assert "600,000,000 parameters, guessed from its name" in text
    with pytest.raises(ConfigInvalid, match=r"model.name: model 'Qwen/Qwen3-0.6B' is not in the local cache"):
        build_plan(config(tmp_path, **asked), gpus=[])


def test_run_that_needs_too_much_memory_is_refused(tmp_path):
    big = config(tmp_path, model={"name": "Qwen/Qwen3-32B"})
    with pytest.raises(ConfigInvalid, match=r"not enough memory: GPU 1 has 80.0 GiB, the run needs about \d+"):
        build_plan(big, dry_run=True, gpus=[gpu(0), gpu(1)])
    with pytest.raises(ConfigInvalid, match=r"not enough memory: this machine.* --cluster.node.gpus N"):
        build_plan(big, dry_run=True, gpus=[])
    with pytest.raises(ConfigInvalid, match=r"--launch.gpu_placement split .*on 2 GPUs"):
        build_plan(config(tmp_path, model={"name": "Qwen/Qwen3-4B"}), dry_run=True, gpus=[gpu(0)])


def test_missing_sink_library_is_refused(tmp_path):
    assert find_spec("trackio") is None, "this test needs an environment without trackio"
    sinks = {"sinks": [{"type": "trackio"}]}
    match = r"monitor.sinks.0: trackio is not installed; pip install 'ramify\[trackio\]'"
    with pytest.raises(ConfigInvalid, match=match):
        build_plan(config(tmp_path, monitor=sinks), dry_run=True, gpus=[])


def test_resuming_with_other_trained_weights_is_refused_before_anything_starts(tmp_path):
    full, lora = config(tmp_path), config(tmp_path, trainer={"lora": {"rank": 8}})
    prepare_run_directory(full)
    for accept_changes in (False, True):  # no checkpoint fits, so the change cannot be accepted
        with pytest.raises(ConfigInvalid, match=r"(?s)lora\.enabled: was False, now True.*lora\.rank: .*8.*--fresh"):
            prepare_run_directory(lora, accept_changes=accept_changes)
    prepare_run_directory(lora, fresh=True)
    with pytest.raises(ConfigInvalid, match=r"lora\.rank: was 8, now 4"):
        prepare_run_directory(config(tmp_path, trainer={"lora": {"rank": 4}}))
