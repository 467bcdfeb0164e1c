"""The GPUs of this machine, as nvidia-smi and CUDA_VISIBLE_DEVICES name them."""

import pytest

from ramify.launch.machine import Gpu, get_usable_memory, parse_gpus, parse_mig_devices, select_gpus

GIB = 1 << 30
GPUS = parse_gpus("0, GPU-11aa, 40960\n1, GPU-22bb, 81920\n")
MIG_DEVICES = parse_mig_devices(
    "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-11aa)\n"
    "  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4)\n"
    "  MIG 2g.10gb+me  Device  1: (UUID: MIG-cba6)\n"
)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1,0", ["1", "0"]),
        ("GPU-22bb, GPU-11aa", ["GPU-22bb", "GPU-11aa"]),
        ("GPU-22", ["GPU-22"]),  # the first characters are enough
        ("MIG-cba6", ["MIG-cba6"]),
        ("0,-1,1", ["0"]),  # CUDA ignores what follows a name that it does not know
        ("7", []),
        ("NoDevFiles", []),
        ("", []),
    ],
)
def test_gpus_are_selected_as_cuda_selects_them(visible, names):
    sizes = {"1": 80, "0": 40, "GPU-22bb": 80, "GPU-11aa": 40, "GPU-22": 80, "MIG-cba6": 10}
    selected = select_gpus([*GPUS, *MIG_DEVICES], visible)
    assert [(gpu.index, gpu.memory) for gpu in selected] == [(name, sizes[name] * GIB) for name in names]


def test_a_gpu_without_memory_of_its_own_has_the_memory_of_the_machine():
    assert parse_gpus("0, GPU-11aa, [N/A]") == [Gpu("0", get_usable_memory(), "GPU-11aa")]
    assert parse_gpus("") == []
