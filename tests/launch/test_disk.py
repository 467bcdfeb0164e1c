"""The disk space of a run: one that cannot save its checkpoints is refused, one that cannot keep them all is warned."""

from pathlib import Path

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.launch.machine import assume_machine
from ramify.launch.memory import estimate_disk
from ramify.launch.plan import build_plan
from tests.launch.test_plan import config
from tests.support.plans import build_machine, format_lines, plan_here

pytestmark = pytest.mark.process  # mounts small disks

CPU, GPU = [build_machine()], [build_machine(1)]
ON_DISK = {"weights": {"transport": "disk"}}
CHECKPOINT_MIB = 16  # of the model tiny, about: 12 bytes for each of its 1.3 million parameters


def test_checkpoint_size_is_estimated_from_the_model(tmp_path):
    tables = ({}, {"lora": {"enabled": True}}, {"optim": {"type": "muon"}}, {"optim": {"moments": "8bit"}})
    full, lora, muon, compact = (estimate_disk(config(tmp_path, trainer=table), CPU) for table in tables)
    assert CHECKPOINT_MIB - 1 < full.checkpoint / 2**20 < CHECKPOINT_MIB + 1
    assert lora.checkpoint < compact.checkpoint < muon.checkpoint < full.checkpoint
    assert full.find_warning() is None


def test_disk_that_does_not_report_its_size_is_not_checked():
    assert estimate_disk(config(Path("/proc")), CPU) is None  # like some network file systems, it reports a size of 0


def test_shared_directory_that_is_not_mounted_here_is_not_checked(tmp_path):
    shared = tmp_path / "shared"
    assert estimate_disk(config(tmp_path, cluster={"shared_directory": shared}), CPU) is None
    shared.mkdir()
    assert estimate_disk(config(tmp_path, cluster={"shared_directory": shared}), CPU) is not None


@pytest.mark.megabytes(30)
def test_disk_with_room_for_a_checkpoint_only_is_refused(small_disk):
    with pytest.raises(ConfigInvalid, match=r"too small: 1 checkpoint of 1\d\.\d MiB, published weights and logs need"):
        plan_here(config(small_disk, max_steps=8, checkpoint={"interval": 8}, **ON_DISK))
    plan_here(config(small_disk, max_steps=8, checkpoint={"interval": 8}))  # weights are in shared memory


def test_published_weights_have_the_dtype_of_the_trainer(tmp_path):
    cpu, gpu = (estimate_disk(config(tmp_path), nodes) for nodes in (CPU, GPU))
    wide = estimate_disk(config(tmp_path, trainer={"dtype": "float32"}), GPU)
    assert cpu.weights == 2 * gpu.weights == wide.weights
    once = estimate_disk(config(tmp_path, max_steps=1), CPU)  # version 0 and version 1
    assert once.weights == cpu.weights // 2


@pytest.mark.megabytes(48)
def test_disk_without_room_for_two_checkpoints_is_refused(small_disk):
    with pytest.raises(ConfigInvalid, match=r"output: the disk of .*/run is too small: 2 checkpoints of 1\d\.\d MiB"):
        plan_here(config(small_disk, max_steps=8, checkpoint={"interval": 1}, **ON_DISK))
    plan_here(config(small_disk, max_steps=8, checkpoint={"interval": 8}, **ON_DISK))  # it saves once


@pytest.mark.megabytes(30)
def test_disk_of_this_machine_is_only_warned_about_if_the_run_is_planned_for_another(small_disk):
    run = config(small_disk, max_steps=8, **ON_DISK)
    lines = format_lines(build_plan(run, [assume_machine("1x80")]))
    assert any(line.startswith("warning: the disk of ") and "is too small" in line for line in lines)
    assert "memory of each GPU in GiB, roughly:" in lines
    on_shared_disk = config(small_disk, max_steps=8, cluster={"shared_directory": small_disk}, **ON_DISK)
    for refused, nodes in ((run, GPU), (on_shared_disk, [assume_machine("1x80")])):
        with pytest.raises(ConfigInvalid, match=r"output: the disk of .* is too small"):
            build_plan(refused, nodes)


@pytest.mark.megabytes(30)
def test_disk_is_only_warned_about_if_the_model_may_be_elsewhere(small_disk):
    plan = plan_here(config(small_disk, model={"name": "org/Some-10M"}))
    assert "warning: the disk of" in "\n".join(format_lines(plan))


@pytest.mark.megabytes(63)
def test_plan_warns_if_not_all_checkpoints_fit(small_disk):
    run = config(small_disk, max_steps=8, checkpoint={"interval": 1}, **ON_DISK)
    plan = plan_here(run)
    warning = "has room for 2 checkpoints of 1"
    assert [line for line in format_lines(plan) if line.startswith("warning:") and warning in line]
    assert warning in plan.list_warnings()[0]
    checkpoint = small_disk / "run" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "data").write_bytes(bytes(20 << 20))  # a resumed run has its checkpoints already
    plan_here(run)
    with pytest.raises(ConfigInvalid, match="is too small"):  # a run that starts over does not remove them
        build_plan(run, CPU, fresh=True)
