"""The size of a model, from which its memory is estimated."""

import json
import math
import shutil

import pytest

from ramify.launch.devices import Gpu, allocate_devices
from ramify.launch.memory import ModelSize, decide_moments, estimate_memory
from ramify.launch.plan import build_plan
from ramify.model.load import load_model
from ramify.model.resolve import resolve_model_path
from tests.launch.test_plan import config
from tests.support.models import write_qwen3_next


def test_model_size_is_read_or_guessed():
    assert 1_000_000 < ModelSize.from_name("tiny").num_parameters < 3_000_000
    assert ModelSize.from_name("org/Some-7B-Instruct").num_parameters == 7 * 10**9
    assert ModelSize.from_name("org/SmolLM2-135M").num_parameters == 135 * 10**6
    assert ModelSize.from_name("org/no-size") is None


def test_null_in_a_model_config_means_the_default(tmp_path):
    shutil.copytree(resolve_model_path("tiny"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_key_value_heads": None, "text_config": None}))
    assert ModelSize.from_name(str(tmp_path / "model")) == ModelSize.from_name("tiny")


def test_a_model_with_recurrent_layers_has_their_states(tmp_path):
    types = ["linear_attention", "linear_attention", "full_attention"]
    model = write_qwen3_next(tmp_path / "model", num_hidden_layers=3, layer_types=types)
    size, specs = ModelSize.from_name(str(model)), load_model(model, dtype="float32", device="cpu").state_specs
    assert size is not None
    assert size.num_kv_layers == 1
    assert size.state_elements == sum(math.prod(spec.shape) for spec in specs) > 0
    assert ModelSize.from_name("tiny").state_elements == 0


@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_weights_that_are_handed_over_in_memory_are_counted(tmp_path, num_gpus):
    gpus = [Gpu(str(number), "a GPU", 80 << 30) for number in range(num_gpus)]
    devices = allocate_devices(8, gpus, inference="auto", trainer="auto", placement="auto")
    size = ModelSize.from_name("org/Some-1B")
    disk, ipc = (
        estimate_memory(config(tmp_path, weights={"transport": transport}), size, devices)
        for transport in ("disk", "ipc")
    )
    copy_bytes = size.num_parameters * (2 if num_gpus else 4)
    assert ipc.trainer - disk.trainer == copy_bytes  # the buffer; on a CPU it is a file, but its copy is not
    assert ipc.other - disk.other == (copy_bytes if num_gpus else 0)  # the copy in pinned memory


@pytest.mark.parametrize(("gib", "moments"), [(80, "float32"), (34, "8bit"), (20, "float32")])
def test_moments_have_8_bits_where_float32_does_not_fit_and_8_bits_do(tmp_path, gib, moments):
    devices = allocate_devices(8, [Gpu("0", "a GPU", gib << 30)], inference="auto", trainer="auto", placement="auto")
    size = ModelSize(2 * 10**9, 20, 2048, 8192, 256, num_outer_parameters=10**8)
    settings = {"inference": {"kv_memory_fraction": 0.05}, "trainer": {"pack_tokens": 1024}}
    decided = decide_moments(config(tmp_path, **settings), size, devices)
    assert decided.trainer.optim.moments == moments
    requested = config(tmp_path, **{**settings, "trainer": {"pack_tokens": 1024, "optim": {"moments": "8bit"}}})
    saved_bytes = estimate_memory(decided, size, devices).trainer - estimate_memory(requested, size, devices).trainer
    assert saved_bytes == (0 if moments == "8bit" else pytest.approx(5.9375 * 1.9e9, rel=1e-6))


def test_states_take_memory_of_the_cache(tmp_path):
    devices = allocate_devices(8, [Gpu("0", "a GPU", 80 << 30)], inference="auto", trainer="auto", placement="auto")
    sizes = [ModelSize(10**9, 20, 1024, 4096, 256, state_elements=elements) for elements in (0, 10**6)]
    engine = {"kv_cache_tokens": 1000, "max_running_requests": 8, "state_snapshots": 2}
    plain, recurrent = (estimate_memory(config(tmp_path, inference=engine), size, devices) for size in sizes)
    assert recurrent.inference - plain.inference == (8 + 2) * 10**6 * 4


@pytest.mark.process
def test_paths_longer_than_a_pack_are_warned_about_not_refused(tmp_path):
    gpus, model = [Gpu("0", "a GPU", 80 << 30), Gpu("1", "a GPU", 80 << 30)], {"name": "org/Some-1B"}

    def find_warning(seq_len: int) -> str | None:
        return build_plan(config(tmp_path, model=model, seq_len=seq_len), gpus=gpus, dry_run=True).find_memory_warning()

    assert find_warning(16384) is None
    warning = find_warning(131072)
    assert warning is not None and "GPU 1 has 80.0 GiB, the run needs about" in warning
    lines = build_plan(config(tmp_path, model=model, seq_len=131072), gpus=gpus, dry_run=True).format_lines()
    assert f"warning: {warning}" in lines
