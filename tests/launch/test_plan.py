"""The launch plan: a process is configured for the place that it gets, with the addresses known then."""

import shutil
import socket
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from ramify.core.errors import ConfigInvalid, PortTaken
from ramify.infer.config import ServeConfig
from ramify.launch.launcher import ClusterNode, ProcessRole
from ramify.launch.local_launcher import LocalLauncher, LocalSlot
from ramify.launch.plan import build_orchestrator_plan, build_plan
from ramify.launch.published_weights import find_newest_weights
from ramify.model.weights_manifest import Manifest
from ramify.orchestrate.run_config import RunConfig
from ramify.processes.prefork import get_import_env
from ramify.processes.training_lock import RESERVED_MEMORY_VARIABLE, TRAINING_LOCK_VARIABLE
from ramify.rollout.envserver.config import EnvServerConfig
from ramify.rollout.envserver.server import EnvServer
from ramify.trace.version import PolicyVersion
from ramify.train import weights_directory
from ramify.train.config import TrainerProcessConfig
from tests.support.plans import build_machine, format_lines, open_place, plan_here

pytestmark = pytest.mark.process  # asks for the GPUs of this machine

TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}
EVAL = {"taskset": {"id": "reverse-text", "split": "eval"}}


def config(tmp_path, **more) -> RunConfig:
    return RunConfig(**{"name": "run", "output": tmp_path, "seq_len": 256, "train": [TRAIN], "eval": [EVAL], **more})


def prepare_orchestrator(plan) -> RunConfig:
    """Return the configuration with which the orchestrator starts now."""
    orchestrator = next(spec for spec in plan.process_specs if spec.name == "orchestrator")
    return RunConfig(**tomllib.loads(Path(orchestrator.build_start(LocalSlot()).command[-1]).read_text()))


# -- one machine -------------------------------------------------------------------------------------------------------


def test_trainer_and_engine_get_the_same_base_in_4_bits(tmp_path):
    model, trainer = {"name": "tiny", "quantize": "4bit"}, {"lora": {"rank": 8}}
    plan = plan_here(config(tmp_path, model=model, trainer=trainer))
    assert TrainerProcessConfig(**open_place(plan, "trainer")[2]).model.quantize == "4bit"
    engine = ServeConfig(**open_place(plan, "inference/0")[2]).inference
    assert engine.adapters.quantize == "4bit"


def test_every_process_is_configured_with_the_addresses_of_the_others(tmp_path):
    plan = plan_here(config(tmp_path))
    names = ["orchestrator", "trainer", "inference/0", "env/train/reverse/0", "env/eval/reverse-text/0"]
    assert [spec.name for spec in plan.process_specs] == names
    engine, started, table = open_place(plan, "inference/0")
    serve, url = ServeConfig(**table), f"http://127.0.0.1:{engine.port}"
    assert (serve.server.port, serve.server.model_name, serve.inference.max_model_len) == (engine.port, "tiny", 256)
    assert started.address == f"{url}/health"
    slot, started, table = open_place(plan, "env/train/reverse/0")
    env = EnvServerConfig(**table)
    assert env.inference.base_url == [url] and env.select_source().key == "train/reverse"
    assert (env.train[0].address, env.train[0].seq_len) == (f"tcp://127.0.0.1:{slot.port}", 256)
    assert EnvServer(env).log_path == Path("/dev/stdout")
    open_place(plan, "env/eval/reverse-text/0")
    trainer = TrainerProcessConfig(**open_place(plan, "trainer")[2])
    run = prepare_orchestrator(plan)
    assert run.path == trainer.path == tmp_path / "run"
    assert run.inference.base_url == [url] and run.train[0].address == [env.train[0].address]
    assert trainer.address == run.orchestrator.address == plan.orchestrator_address
    assert run.orchestrator.status_address == plan.status_address


def test_other_models_are_started_unless_their_servers_run_already(tmp_path):
    models = {"teacher": {"name": "tiny"}, "judge": {"base_url": ["http://10.0.0.1:8000"]}}
    distilled = {**TRAIN, "name": "copy", "algorithm": {"id": "sft"}, "teacher": "teacher"}
    penalized = {**TRAIN, "algorithm": {"id": "grpo", "beta": 0.1}}
    plan = plan_here(config(tmp_path, models=models, train=[penalized, distilled]))
    names = [spec.name for spec in plan.process_specs]
    assert [name for name in names if name.startswith("models/")] == ["models/teacher", "models/start"]
    slot, _, table = open_place(plan, "models/teacher")
    serve, url = ServeConfig(**table), f"http://127.0.0.1:{slot.port}"
    assert (serve.model.name, serve.inference.max_model_len) == ("tiny", 257)
    for name in names:
        if name.startswith(("inference/", "models/start")):
            open_place(plan, name)
    _, copy_start, copy_table = open_place(plan, "env/train/copy/0")
    _, _, table = open_place(plan, "env/train/reverse/0")
    assert copy_table["inference"]["base_url"] == [url] != table["inference"]["base_url"]
    assert copy_start.env["RAMIFY_MODEL_TEACHER"] == f"{url} tiny"
    run = prepare_orchestrator(plan)
    assert run.models["teacher"].base_url == [url] and run.models["judge"].base_url == ["http://10.0.0.1:8000"]
    assert "models/judge: http://10.0.0.1:8000 (external, not managed by this run)" in format_lines(plan)


def test_plan_counts_the_groups_and_rollouts_of_a_step(tmp_path):
    orchestrator = {"batch_size": 128, "group_size": 4}
    lines = format_lines(plan_here(config(tmp_path, orchestrator=orchestrator)))
    assert lines[1] == "step: 32 groups, about 128 rollouts (reverse: groups of 4)"
    train = [{**TRAIN, "group_size": 1, "weight": 3}, {**TRAIN, "name": "other"}]
    lines = format_lines(plan_here(config(tmp_path, orchestrator=orchestrator, train=train)))
    assert lines[1] == "step: 32 groups, about 56 rollouts (reverse: groups of 1, other: groups of 4)"


def test_plan_notes_models_that_no_source_uses(tmp_path):
    models = {name: {"name": "tiny"} for name in ("teacher", "helper", "unused")}
    harness = {"id": "chat", "models": {"small": {"base_url": "models.helper"}}}
    train = [{**TRAIN, "algorithm": {"id": "opd"}, "teacher": "teacher", "harness": harness}]
    lines = format_lines(plan_here(config(tmp_path, models=models, train=train)))
    (note,) = [line for line in lines if line.startswith("note:")]
    assert note.startswith("note: no source uses models.unused")


def test_plan_says_who_runs_on_which_gpu_and_why(tmp_path):
    launch = {"trainer_gpus": 1, "inference_gpus": 2}
    lines = format_lines(plan_here(config(tmp_path, launch=launch), num_gpus=4))
    assert "here (127.0.0.1, head): 4 GPUs of 80 GiB, 2 cores, 64 GiB" in lines
    assert any(line.startswith("  inference/1: GPU 2, ") for line in lines)
    assert "trainer: 1 rank, as launch.trainer_gpus says" in lines
    assert "idle: GPU 3 of here" in lines


def test_environment_variables_are_set_by_role(tmp_path):
    env = {"all": {"LOG": "info", "OMP_NUM_THREADS": 3}, "trainer": {"LOG": "debug"}, "env_servers": {"SHOP": "x"}}
    run = config(tmp_path, models={"judge": {"name": "tiny"}}, launch={"env": {**env, "models": {"A": "1"}}})
    specs = plan_here(run).process_specs
    variables = {spec.name.split("/")[0]: {k: spec.env.get(k) for k in ("LOG", "SHOP", "A")} for spec in specs}
    assert {spec.env["OMP_NUM_THREADS"] for spec in specs} == {"3"}
    assert variables == {
        "orchestrator": {"LOG": "info", "SHOP": None, "A": None},
        "trainer": {"LOG": "debug", "SHOP": None, "A": None},
        "inference": {"LOG": "info", "SHOP": None, "A": None},
        "models": {"LOG": "info", "SHOP": None, "A": "1"},
        "env": {"LOG": "info", "SHOP": "x", "A": None},
    }


@pytest.mark.parametrize("name", ["RAMIFY_SECRET", "CUDA_VISIBLE_DEVICES", "A=B"])
def test_environment_variables_that_the_run_sets_are_refused(tmp_path, name):
    with pytest.raises(ValidationError, match=r"launch\.env|set by the run|expected the name"):
        config(tmp_path, launch={"env": {"all": {name: "1"}}})


def test_roles_and_preloaded_modules(tmp_path):
    specs = {spec.name: spec for spec in plan_here(config(tmp_path)).process_specs}
    assert specs["orchestrator"].role is ProcessRole.LEADER
    assert specs["trainer"].role is ProcessRole.FOLLOWER
    assert specs["inference/0"].role is ProcessRole.SERVICE
    assert {name for name, spec in specs.items() if spec.preload_modules} == {"inference/0", "trainer"}
    environments = [get_import_env(specs[name].env) for name in ("inference/0", "trainer")]
    assert environments[0] == environments[1]  # so they are forked from one
    assert not any(spec.preload_modules for spec in plan_here(config(tmp_path), num_gpus=1).process_specs)


def test_external_services_are_not_started(tmp_path):
    train = [{**TRAIN, "address": "tcp://127.0.0.1:5001"}]
    inference = {"engine": "external", "base_url": ["http://127.0.0.1:9"]}
    plan = plan_here(config(tmp_path, train=train, eval=[], inference=inference))
    assert [spec.name for spec in plan.process_specs] == ["orchestrator", "trainer"]
    text = "\n".join(format_lines(plan))
    assert "inference: http://127.0.0.1:9 (external, not managed by this run)" in text
    assert "env/train/reverse: tcp://127.0.0.1:5001" in text


def test_an_orchestrator_alone_starts_env_servers_but_neither_engine_nor_trainer(tmp_path):
    inference = {"engine": "external", "base_url": ["http://127.0.0.1:9"]}
    run = config(tmp_path, inference=inference, trainer={"device": "cuda"})
    plan = build_orchestrator_plan(run, [build_machine()])
    names = [spec.name for spec in plan.process_specs]
    assert names == ["orchestrator", "env/train/reverse/0", "env/eval/reverse-text/0"]


def test_fixed_ports_are_used_or_refused(tmp_path, free_port):
    run = config(tmp_path, launch={"base_port": free_port})
    specs = {spec.name: spec for spec in plan_here(run).process_specs}
    ports = [specs[name].placement.port for name in ("env/train/reverse/0", "env/eval/reverse-text/0")]
    assert ports == [free_port, free_port + 1000]
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(PortTaken, match=f"env/train/reverse/0: tcp://127.0.0.1:{free_port} cannot be listened on"),
        LocalLauncher().prepare([specs["env/train/reverse/0"]]),
    ):
        pass


def test_configured_orchestrator_address_is_used(tmp_path, free_port):
    run = config(tmp_path, orchestrator={"address": f"tcp://127.0.0.1:{free_port}"})
    plan = plan_here(run)
    assert plan.orchestrator_address == open_place(plan, "trainer")[2]["address"] == f"tcp://127.0.0.1:{free_port}"
    plan.reservation.close()
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(PortTaken, match=r"orchestrator\.address"):
        plan_here(run)


@pytest.mark.parametrize("transport", ["disk", "shm"])
def test_restarted_engine_serves_the_newest_weights(tmp_path, monkeypatch, transport):
    monkeypatch.setattr(weights_directory, "SHM_ROOT", tmp_path)
    plan = plan_here(config(tmp_path, weights={"transport": transport}))
    weights = weights_directory.get_weights_directory(tmp_path / "run", transport)
    assert open_place(plan, "inference/0")[2]["model"]["name"] == "tiny"
    for incarnation, step in ((0, 9), (1, 4), (1, 3)):
        folder = weights / f"{incarnation}-{step:06}"
        folder.mkdir(parents=True)
        Manifest(PolicyVersion("tiny", incarnation, step), {}).write(folder)
    assert find_newest_weights(weights).name == "1-000004"
    served = ServeConfig(**open_place(plan, "inference/0")[2])
    assert served.model.name.endswith("1-000004")
    shutil.rmtree(weights / "1-000004")  # the trainer continues while the engine starts
    assert Manifest.read(Path(served.model.name)).version == PolicyVersion("tiny", 1, 4)
    assert served.server.model_name == "tiny"


def test_engines_fetch_weights_from_the_url_to_which_the_trainer_copies_them(tmp_path):
    plan = plan_here(config(tmp_path, weights={"url": "s3://bucket/weights/"}))
    trainer = TrainerProcessConfig(**open_place(plan, "trainer")[2])
    serve = ServeConfig(**open_place(plan, "inference/0")[2])
    assert trainer.weights.url_for(trainer.path) == serve.inference.weights_url == "s3://bucket/weights/run"
    for table, text in (
        ({"weights": {"url": "s3://b", "transport": "ipc"}}, "url: not allowed with transport"),
        ({"weights": {"url": "s3://b"}, "inference": {"engine": "vllm"}}, "vLLM reads weights from"),
    ):
        with pytest.raises(ValueError, match=text):
            config(tmp_path, **table)


def test_engine_waits_for_the_trainer_only_if_they_share_a_gpu(tmp_path):
    for placement, num_gpus, is_set in (("colocated", 1, True), ("split", 2, False)):
        run = config(tmp_path, launch={"gpu_placement": placement})
        paths = {spec.name: spec.env.get(TRAINING_LOCK_VARIABLE) for spec in plan_here(run, num_gpus).process_specs}
        expected = str(run.path.resolve() / "training.lock") if is_set else None
        assert (paths["inference/0"], paths["trainer"], paths["orchestrator"]) == (expected, expected, None)


def test_trainer_leaves_an_engine_on_its_gpu_the_planned_memory(tmp_path):
    for placement, num_gpus, is_shared in (("colocated", 1, True), ("split", 2, False)):
        plan = plan_here(config(tmp_path, launch={"gpu_placement": placement}), num_gpus)
        reserved = {spec.name: spec.env.get(RESERVED_MEMORY_VARIABLE) for spec in plan.process_specs}
        expected = str(plan.placement.get_demand("inference/0").gpu_memory) if is_shared else None
        assert (reserved["inference/0"], reserved["trainer"]) == (None, expected)


@pytest.mark.parametrize(
    ("num_gpus", "more", "transport", "text"),
    [
        (0, {}, "shm", "read from shared memory by 1 engine, 5.2 MiB per step"),
        (1, {}, "ipc", "copied from the trainer's memory by 1 engine"),
        (4, {}, "shm", "read from shared memory by 3 engines, 7.8 MiB per step"),
        (4, {"weights": {"transport": "disk"}}, "disk", "read from disk by 3 engines, 7.8 MiB per step"),
        (1, {"inference": {"engine": "vllm"}}, "shm", "read from shared memory by 1 engine"),
        (
            2,
            {"launch": {"gpu_placement": "colocated", "trainer_gpus": 1}},
            "ipc+shm",
            "copied from the trainer's memory by 1 engine; read from shared memory by 1 engine, 2.6 MiB per step",
        ),
    ],
)
def test_weights_take_the_shortest_way_to_the_engines(tmp_path, num_gpus, more, transport, text):
    plan = plan_here(config(tmp_path, **more), num_gpus)
    assert plan.config.weights.transport == open_place(plan, "trainer")[2]["weights"]["transport"] == transport
    (line,) = [line for line in format_lines(plan) if line.startswith(f"weights: {transport}, ")]
    assert text in line
    engines = [spec.name for spec in plan.process_specs if spec.name.startswith("inference/")]
    tables = [open_place(plan, name)[2]["inference"] for name in engines]
    num_copying = sum(table.get("copy_from_trainer", True) for table in tables)
    assert num_copying == (1 if "ipc" in transport or not num_gpus or "vllm" in str(more) else 0)


def test_weights_go_to_disk_if_memory_has_no_room_or_another_head_may_need_them(tmp_path, monkeypatch):
    shared = config(tmp_path, cluster={"shared_directory": tmp_path / "shared"})
    assert plan_here(shared).config.weights.transport == "disk"
    monkeypatch.setattr("ramify.launch.published_weights.get_free_bytes", lambda path: 1 << 20)
    assert plan_here(config(tmp_path)).config.weights.transport == "disk"


def test_weights_that_a_killed_run_left_in_memory_count_as_room(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_directory, "SHM_ROOT", tmp_path)
    monkeypatch.setattr("ramify.launch.published_weights.get_free_bytes", lambda path: 1 << 20)
    run = config(tmp_path)
    left = weights_directory.get_weights_directory(run.path, "shm") / "0-000001"
    left.mkdir(parents=True)
    with (left / "model.safetensors").open("wb") as file:
        file.truncate(32 << 20)
    assert plan_here(run).config.weights.transport == "shm"


def test_weights_in_memory_need_an_engine_on_the_trainers_device(tmp_path):
    ipc, url = {"transport": "ipc"}, {"engine": "external", "base_url": ["http://127.0.0.1:1"]}
    plan_here(config(tmp_path, weights=ipc))
    plan_here(config(tmp_path, weights=ipc, launch={"gpu_placement": "colocated"}), num_gpus=1)
    for num_gpus, more in ((2, {"launch": {"gpu_placement": "split"}}), (0, {"inference": url})):
        with pytest.raises(ConfigInvalid, match=r"weights.transport: 'ipc' needs a native engine that the run starts"):
            plan_here(config(tmp_path, weights=ipc, **more), num_gpus)
    sharded = {"gpu_placement": "colocated", "trainer_gpus": 2}
    with pytest.raises(ConfigInvalid, match=r"weights.transport: 'ipc' needs a trainer with one rank, not 2"):
        plan_here(config(tmp_path, weights=ipc, launch=sharded), 2)
    assert plan_here(config(tmp_path, launch=sharded), 2).config.weights.transport == "shm"


def test_a_run_that_is_resumed_from_its_files_is_planned_for_the_nodes_there_are(tmp_path):
    run = config(tmp_path)
    with (plan := plan_here(run, num_gpus=1)).reservation:
        plan.write()
    assert (plan.config.weights.transport, plan.config.trainer.optim.moments) == ("ipc", "float32")
    assert "weights: ipc, " in (run.path / "plan.txt").read_text()
    resumed, plan_file = RunConfig(**tomllib.loads((run.path / "config.toml").read_text())), run.path / "plan.txt"
    assert resumed == run
    inode = plan_file.stat().st_ino
    plan.write()
    assert plan_file.stat().st_ino != inode  # a reader of the old file sees all of it
    assert plan_here(resumed, num_gpus=8).config.weights.transport == "shm"


# -- several nodes -----------------------------------------------------------------------------------------------------

NODES = [
    ClusterNode("head", "127.0.0.1", 4, is_head=True),
    ClusterNode("b", "10.0.0.2", 8),
    ClusterNode("c", "10.0.0.3", 8),
]


@pytest.fixture
def cluster_plan(tmp_path):
    """A run with two engines, two env servers of its train source, and two trainer ranks."""
    cluster = {
        "launcher": "ray",
        "shared_directory": str(tmp_path / "shared"),
        "lease_duration": 30,
        "engines": {"num_replicas": 2, "cores": 2},
        "env_servers": {"num_per_source": 2, "cores": 1},
        "trainer": {"num_ranks": 2, "cores": 1, "max_per_node": 1, "nodes": ["b", "c"]},
    }
    source = {"name": "words", "taskset": {"id": "reverse-text"}}
    run = RunConfig(name="run", output=tmp_path, train=[source], eval=[source], cluster=cluster)
    with (plan := build_plan(run, NODES)).reservation:
        yield plan


def test_processes_have_placements_and_services(cluster_plan):
    specs = {spec.name: spec for spec in cluster_plan.process_specs}
    assert set(specs) == {
        "orchestrator",
        "trainer",
        "inference/0",
        "inference/1",
        "env/train/words/0",
        "env/train/words/1",
        "env/eval/words/0",
    }
    assert specs["orchestrator"].placement is None
    assert set(specs["orchestrator"].start_after) == set(specs) - {"orchestrator", "trainer"}
    assert specs["trainer"].num_ranks == 2
    assert [place.node for place in specs["trainer"].placement.choose_places(NODES)] == ["b", "c"]
    assert specs["trainer"].placement.choose_places(NODES[:2]) == ()
    assert specs["trainer"].placement.lease.duration == 30
    assert specs["inference/1"].placement.lease.duration == 60
    assert specs["inference/1"].service == "inference"
    assert specs["env/train/words/1"].service == "env/train/words"
    assert specs["env/train/words/1"].start_after == ("inference/0", "inference/1")
    assert specs["env/train/words/1"].env["RAMIFY_SECRET"]
    assert (specs["trainer"].env["OMP_NUM_THREADS"], specs["inference/0"].env["OMP_NUM_THREADS"]) == ("1", "2")


def test_processes_on_other_nodes_write_to_their_slots_and_shared_storage(cluster_plan, tmp_path, monkeypatch):
    slot, _, table = open_place(cluster_plan, "inference/0", "127.0.0.2")
    assert (table["server"]["host"], table["server"]["port"]) == ("127.0.0.2", slot.port)
    monkeypatch.setattr("ramify.launch.local_launcher.LocalSlot.node", "b")
    slot, _, table = open_place(cluster_plan, "env/train/words/0", "127.0.0.2")
    assert (table["output"], table["secret_env"]) == (str(slot.directory), "RAMIFY_SECRET")
    assert table["train"][0]["pool"]["max_workers"] == 1
    slot, _, table = open_place(cluster_plan, "trainer", "127.0.0.3")
    assert table["address"].startswith("tcp://127.0.0.1:")
    assert (table["output"], table["shared_directory"]) == (str(slot.directory), str(tmp_path / "shared" / "run"))


def test_orchestrator_starts_with_the_addresses_of_the_others(cluster_plan):
    names = ("inference/0", "inference/1", "env/train/words/0", "env/train/words/1", "env/eval/words/0")
    addresses = {n: open_place(cluster_plan, n, "127.0.0.2")[1].address.removesuffix("/health") for n in names}
    run = prepare_orchestrator(cluster_plan)
    assert run.inference.base_url == [addresses["inference/0"], addresses["inference/1"]]
    assert run.train[0].address == [addresses["env/train/words/0"], addresses["env/train/words/1"]]
    assert run.eval[0].address == [addresses["env/eval/words/0"]]


def test_plan_is_written_with_who_runs_where(cluster_plan, tmp_path):
    cluster_plan.config.path.mkdir(parents=True)
    cluster_plan.write()
    lines = (tmp_path / "run" / "plan.txt").read_text().splitlines()
    assert "b (10.0.0.2): 0 GPUs, 8 cores" in lines
    assert any(line.startswith("  trainer rank 1: ") for line in lines)
    assert RunConfig(**tomllib.loads((tmp_path / "run" / "config.toml").read_text())) == cluster_plan.user_config
