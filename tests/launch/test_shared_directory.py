"""Checkpoints, weights and images are written to storage that all nodes reach, and are found from the run directory."""

import shutil
from pathlib import Path

import pytest

from ramify.core.display import Display
from ramify.core.errors import ConfigInvalid, RunDamaged
from ramify.launch.execution import execute_plan
from ramify.launch.head import link_shared_directory, prepare_head
from ramify.launch.published_weights import get_served_directory, hold_weights_directory, save_final_weights
from ramify.model.weights_manifest import Manifest
from ramify.orchestrate.run_config import RunConfig
from ramify.trace.version import PolicyVersion
from ramify.train import weights_directory
from ramify.train.config import TrainerProcessConfig
from tests.launch.test_execution import build_test_plan
from tests.support.plans import open_place, plan_here

TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}


def make_config(tmp_path, head="head", **more) -> RunConfig:
    cluster = {"shared_directory": tmp_path / "shared"}
    return RunConfig(**{"name": "run", "output": tmp_path / head, "train": [TRAIN], "cluster": cluster, **more})


def publish(directory: Path, step: int) -> Path:
    folder = directory / f"0-{step:06}"
    folder.mkdir(parents=True)
    Manifest(PolicyVersion("tiny", 0, step), {}).write(folder)
    return folder


def test_trainer_writes_to_the_shared_directory_under_the_name_of_the_run(tmp_path):
    plan = plan_here(make_config(tmp_path))
    trainer = TrainerProcessConfig(**open_place(plan, "trainer")[2])
    assert trainer.storage_path == tmp_path / "shared" / "run"
    assert trainer.weights_directory == tmp_path / "shared/run/weights" == plan.config.weights_directory
    assert trainer.path == tmp_path / "head" / "run"


def test_restarted_engine_loads_the_newest_shared_weights(tmp_path):
    config = make_config(tmp_path)
    plan = plan_here(config)
    published = publish(config.weights_directory, 3)
    name = open_place(plan, "inference/0")[2]["model"]["name"]
    assert Path(name).is_relative_to(tmp_path / "shared/run/weights")
    shutil.rmtree(published)
    assert Manifest.read(Path(name)).version.step == 3


def test_head_removes_the_weights_of_engines_of_earlier_heads_only(tmp_path):
    first, second = make_config(tmp_path, "a"), make_config(tmp_path, "b")
    for config in (first, second):
        prepare_head(config)
        get_served_directory(config).mkdir()
    assert get_served_directory(first) != get_served_directory(second)
    with hold_weights_directory(first):  # it is replaced, and does not know it yet
        assert get_served_directory(second).is_dir()
    get_served_directory(first).mkdir()  # the first head was lost
    with hold_weights_directory(second):
        assert not get_served_directory(first).exists()
        assert get_served_directory(second).is_dir()
    assert not get_served_directory(second).exists()


def test_final_weights_in_memory_are_saved_to_the_shared_directory(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(weights_directory, "SHM_ROOT", tmp_path / "shm")
    config = make_config(tmp_path, weights={"transport": "shm"})
    publish(config.weights_directory, 5)
    save_final_weights(config)
    assert (tmp_path / "shared/run/weights/0-000005/manifest.json").exists()


def test_run_directory_links_to_the_shared_one(tmp_path):
    run, shared = tmp_path / "run", tmp_path / "shared"
    link_shared_directory(run, shared)
    (run / "checkpoints" / "step_000001-0").mkdir()
    assert (shared / "checkpoints" / "step_000001-0").is_dir()
    link_shared_directory(run, shared)  # a repeated command
    link_shared_directory(run, tmp_path / "moved")  # the shared storage got another path
    assert (run / "weights").readlink() == tmp_path / "moved" / "weights"


@pytest.mark.process
def test_executed_run_is_linked_and_its_checkpoints_are_not_taken_for_those_of_a_new_run(tmp_path):
    cluster = {"shared_directory": tmp_path / "shared"}
    execute_plan(build_test_plan(tmp_path, "sys.exit(75)", cluster=cluster), display=Display())
    checkpoint = tmp_path / "shared/run/checkpoints/step_000001-0"
    checkpoint.mkdir()
    assert (tmp_path / "run/checkpoints/step_000001-0").is_dir()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunDamaged, match=r"run\.sqlite is missing, but the directory holds 1 checkpoint"):
        execute_plan(build_test_plan(tmp_path, "sys.exit(75)", cluster=cluster), display=Display())
    fresh = build_test_plan(tmp_path, "sys.exit(75)", cluster=cluster)
    execute_plan(fresh, fresh=True, display=Display())
    assert not checkpoint.exists()
    assert (tmp_path / "shared/run/checkpoints.old-1/step_000001-0").is_dir()


def test_shared_directory_whose_parent_is_missing_is_refused_and_not_created(tmp_path):
    config = make_config(tmp_path, cluster={"shared_directory": tmp_path / "mount" / "runs"})
    with pytest.raises(ConfigInvalid, match=r"cluster\.shared_directory: .*/mount/runs cannot be created, because .*"):
        prepare_head(config)
    assert not (tmp_path / "mount").exists()
    (tmp_path / "mount").mkdir()
    prepare_head(config)
    assert (tmp_path / "mount/runs/run/checkpoints").is_dir()
