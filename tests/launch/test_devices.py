"""Allocation of cores and GPUs."""

import pytest

from ramify.launch.devices import Gpu, allocate_devices


def test_two_cores_give_one_thread_each_with_passive_waits():
    devices = allocate_devices(2, [], inference="auto", trainer="auto", placement="auto")
    assert devices.inference.env == {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "RAYON_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert devices.trainer.threads == devices.other.threads == 1
    assert allocate_devices(16, [], inference="auto", trainer="auto", placement="auto").trainer.threads == 8


@pytest.mark.parametrize(
    ("gpus", "placement", "engine", "trainer"),
    [
        (2, "auto", "0", "1"),
        (1, "auto", "0", "0"),
        (2, "split", "0", "1"),
        (2, "colocated", "0", "0"),
        (0, "auto", "", ""),
    ],
)
def test_gpus_are_split_or_shared(gpus, placement, engine, trainer):
    devices = allocate_devices(
        8,
        [Gpu(str(number), "a GPU", 80 << 30) for number in range(gpus)],
        inference="auto",
        trainer="auto",
        placement=placement,
    )
    assert devices.inference.env["CUDA_VISIBLE_DEVICES"] == engine
    assert devices.trainer.env["CUDA_VISIBLE_DEVICES"] == trainer
    assert devices.is_colocated == (gpus > 0 and engine == trainer)
