"""The disk space of a run: one that cannot save its checkpoints is refused, one that cannot keep them all is warned."""

from pathlib import Path

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.launch.memory import estimate_disk
from ramify.launch.run_checks import check_run
from tests.launch.test_plan import config
from tests.support.plans import format_lines, plan_here

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("check_plugins_in_process")]

CHECKPOINT_MIB = 16  # of the model tiny, about: 12 bytes for each of its 1.3 million parameters


def test_checkpoint_size_is_estimated_from_the_model(tmp_path):
    full, lora, muon = (
        estimate_disk(config(tmp_path, trainer=table))
        for table in ({}, {"lora": {"enabled": True}}, {"optim": {"type": "muon"}})
    )
    assert CHECKPOINT_MIB - 1 < full.checkpoint / 2**20 < CHECKPOINT_MIB + 1
    assert lora.checkpoint < muon.checkpoint < full.checkpoint
    assert full.find_warning() is None


def test_disk_that_does_not_report_its_size_is_not_checked():
    assert estimate_disk(config(Path("/proc"))) is None  # like some network file systems, it reports a size of 0


def test_shared_directory_that_is_not_mounted_here_is_not_checked(tmp_path):
    shared = tmp_path / "shared"
    assert estimate_disk(config(tmp_path, cluster={"shared_directory": shared})) is None
    shared.mkdir()
    assert estimate_disk(config(tmp_path, cluster={"shared_directory": shared})) is not None


@pytest.mark.megabytes(30)
def test_disk_with_room_for_a_checkpoint_only_is_refused(small_disk):
    with pytest.raises(ConfigInvalid, match=r"too small: 1 checkpoint of 1\d\.\d MiB, published weights and logs need"):
        check_run(config(small_disk, max_steps=8, checkpoint={"interval": 8}))


def test_published_weights_have_the_dtype_of_the_trainer(tmp_path):
    tables = [{"device": "cpu"}, {"device": "cuda"}, {"device": "cuda", "dtype": "float32"}]
    cpu, gpu, wide = (estimate_disk(config(tmp_path, trainer=table)) for table in tables)
    assert cpu.weights == 2 * gpu.weights == wide.weights
    once = estimate_disk(config(tmp_path, trainer={"device": "cpu"}, max_steps=1))  # version 0 and version 1
    assert once.weights == cpu.weights // 2


@pytest.mark.megabytes(48)
def test_disk_without_room_for_two_checkpoints_is_refused(small_disk):
    with pytest.raises(ConfigInvalid, match=r"output: the disk of .*/run is too small: 2 checkpoints of 1\d\.\d MiB"):
        check_run(config(small_disk, max_steps=8, checkpoint={"interval": 1}), dry_run=True)
    check_run(config(small_disk, max_steps=8, checkpoint={"interval": 8}))  # it saves once


@pytest.mark.megabytes(30)
def test_disk_is_only_warned_about_if_the_model_may_be_elsewhere(small_disk):
    elsewhere = config(small_disk, model={"name": "org/Some-10M"})
    check_run(elsewhere, dry_run=True)
    plan = plan_here(elsewhere)
    assert "warning: the disk of" in "\n".join(format_lines(plan))


@pytest.mark.megabytes(63)
def test_plan_warns_if_not_all_checkpoints_fit(small_disk):
    run = config(small_disk, max_steps=8, checkpoint={"interval": 1}, weights={"transport": "disk"})
    check_run(run)
    plan = plan_here(run)
    warning = "has room for 2 checkpoints of 1"
    assert [line for line in format_lines(plan) if line.startswith("warning:") and warning in line]
    checkpoint = small_disk / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "data").write_bytes(bytes(20 << 20))  # a resumed run has its checkpoints already
    check_run(run)
