"""Loading a model to train: which values reach the master weights, and how much memory the host needs for it."""

import ctypes
import math
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3MoeConfig

from ramify.core.errors import WeightsRefused
from ramify.model.load import load_config, load_hf_model
from ramify.model.lora import is_adapter_weight
from ramify.model.weights_manifest import read_tensor_shapes
from ramify.train import Trainer, TrainerConfig, build_trainer
from ramify.train.distributed import gather_full_tensor, init_distributed
from ramify.train.policy_model import load_policy
from tests.support.models import write_qwen3_5_with_images, write_vision_model
from tests.support.runs import FULL
from tests.support.trainer import run_ranks
from tests.support.training import CONFIGS, HYBRIDS, SINGLE_RANK, build_model, copy_weights

# Models in many layers, of which a single one does not matter.
TALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}
TALL_CONFIGS = {
    "dense": LlamaConfig(**TALL, intermediate_size=512),
    "experts": Qwen3MoeConfig(**TALL, **EXPERTS, intermediate_size=128),
}
# The dtype of each tensor in a checkpoint, by its name there.
STORED: dict[str, Callable[[str], torch.dtype]] = {
    "mixed": lambda name: torch.float32 if name.endswith(("norm.weight", "A_log", "dt_bias")) else torch.bfloat16,
    "mixed_experts": lambda name: torch.float32 if "experts.2." in name else torch.bfloat16,
    "float16": lambda name: torch.float16,
    "float32": lambda name: torch.float32,
}


class _HeapUsage(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


class HeapPeak:
    """The most bytes that were allocated at the same time in a block; mapped files are not among them."""

    def __init__(self) -> None:
        self._read: Any = ctypes.CDLL(None).mallinfo2
        self._read.restype = _HeapUsage
        self._start, self.peak = self._read_bytes(), 0

    def _read_bytes(self) -> int:
        usage = self._read()
        return usage.uordblks + usage.hblkhd

    @classmethod
    @contextmanager
    def measure(cls) -> Iterator["HeapPeak"]:
        heap, stopped = cls(), threading.Event()

        def watch() -> None:
            while not stopped.wait(0.0002):
                heap.update()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield heap
        finally:
            stopped.set()
            thread.join()
            heap.update()

    def update(self) -> int:
        """Return the peak until now."""
        self.peak = max(self.peak, self._read_bytes() - self._start)
        return self.peak


def store_as(directory: Path, stored: str) -> Path:
    """Change the dtypes of a stored model, whose values get all bits of their dtypes."""
    generator = torch.Generator().manual_seed(0)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            noise = torch.empty(tensor.shape).uniform_(0.99, 1.01, generator=generator)
            tensors[name] = (tensor.float() * noise).to(STORED[stored](name))
        save_file(tensors, file, {"format": "pt"})
    return directory


def write_checkpoint(directory: Path, kind: str, stored: str) -> Path:
    """Write a random model; hybrids are in several files."""
    if kind == "qwen3_5_with_images":
        return store_as(write_qwen3_5_with_images(directory), stored)
    if kind == "qwen3_vl":
        return store_as(write_vision_model(directory, kind), stored)
    config = {**CONFIGS, **HYBRIDS, **TALL_CONFIGS}[kind]
    build_model(config, "eager").save_pretrained(directory, max_shard_size="100KB" if kind in HYBRIDS else "1GB")
    return store_as(directory, stored)


@pytest.fixture(scope="module")
def stored_model(tmp_path_factory):
    """A function that returns the directory of a model, which the tests of this module share."""
    return cache(lambda kind, stored: write_checkpoint(tmp_path_factory.mktemp("stored") / kind, kind, stored))


@cache
def read_stored(directory: Path) -> dict[str, Tensor]:
    """Return the stored values by the names of parameters in a policy."""
    module = load_hf_model(directory, load_config(directory), torch.float32, None)
    return {f"model.{name}": parameter.detach() for name, parameter in module.named_parameters()}


def count_float32_bytes(directory: Path) -> int:
    """Return the bytes of a float32 copy of a model."""
    return 4 * sum(math.prod(shape) for shape in read_tensor_shapes(directory).values())


def equal_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.float().view(torch.int32), right.float().view(torch.int32))


@pytest.mark.promise
@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        ("llama", "float16"),
        ("qwen3_5", "mixed"),
        ("qwen3_5", "float32"),
        ("qwen3_5_with_images", "mixed"),
        ("qwen3_vl", "mixed"),
        pytest.param("qwen3_next", "mixed", marks=pytest.mark.full("qwen3_5 is stored in the same dtypes")),
        ("qwen3_next", "mixed_experts"),
        pytest.param("qwen3_next", "float32", marks=pytest.mark.full("qwen3_5 is stored in float32, too")),
    ],
)
def test_master_weights_are_the_stored_values(kind, stored, stored_model):
    """Qwen3.5 is stored in bfloat16, except norms and decays. Experts are stored one by one, and loaded as one."""
    expected = read_stored(model := stored_model(kind, stored))
    assert not all(torch.equal(value, value.bfloat16().float()) for value in expected.values())
    for dtype in (torch.bfloat16, torch.float32):
        trainer = Trainer(
            load_policy(model, device="cpu", dtype=dtype, keep_precision=True), TrainerConfig(), dtype=dtype
        )
        assert trainer.master_weights.is_split == (dtype == torch.bfloat16)
        assert {parameter.dtype for parameter in trainer.policy.parameters()} == {dtype}
        weights = copy_weights(trainer)
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            assert equal_bits(value, expected[name]), name


@pytest.mark.parametrize("problem", ["no file", "missing file", "missing tensor", "truncated file"])
def test_incomplete_files_are_refused(problem, stored_model, tmp_path):
    shutil.copytree(stored_model("qwen3_5", "mixed"), tmp_path, dirs_exist_ok=True)
    files = sorted(tmp_path.glob("*.safetensors"))
    if problem == "missing tensor":
        save_file({}, files[0], {"format": "pt"})
    elif problem == "truncated file":
        files[0].write_bytes(files[0].read_bytes()[:-1])
    else:
        files[0].unlink()
    if problem == "no file":
        (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(WeightsRefused, match=re.escape(str(tmp_path))):
        load_policy(tmp_path, device="cpu", dtype=torch.bfloat16, keep_precision=True)


def save_masters_as_rank(model: Path, file: Path) -> None:
    config = TrainerConfig.model_validate({"threads": 1, "dtype": "bfloat16"})
    with init_distributed(config) as ranks:
        weights = copy_weights(build_trainer(model, config, ranks))
        weights = {name: gather_full_tensor(value) for name, value in weights.items()}
        if ranks.is_first:
            torch.save(weights, file)


@pytest.mark.skipif(not FULL, reason="starts two processes")
@pytest.mark.process
@pytest.mark.promise
def test_sharded_master_weights_are_the_stored_values(tmp_path):
    expected = read_stored(write_checkpoint(tmp_path / "model", "qwen3_5", "mixed"))
    run_ranks(2, save_masters_as_rank, tmp_path / "model", tmp_path / "masters.pt", gang="0")
    weights = torch.load(tmp_path / "masters.pt")
    assert weights.keys() == expected.keys()
    assert all(equal_bits(value, expected[name]) for name, value in weights.items())


@pytest.mark.parametrize("stored", ["mixed", "float32"])
def test_a_policy_is_in_its_dtype_unless_it_keeps_the_stored_precision(stored, stored_model):
    expected = read_stored(model := stored_model("llama", stored))
    for dtype in (torch.bfloat16, torch.float32):
        parameters = dict(load_policy(model, device="cpu", dtype=dtype).named_parameters())
        assert {value.dtype for value in parameters.values()} == {dtype}
        assert all(torch.equal(value, expected[name].to(dtype)) for name, value in parameters.items())
    policy = load_policy(model, device="cpu", dtype=torch.bfloat16, keep_precision=True)
    names = {name: STORED[stored](name) for name in expected}
    assert {name: value.dtype for name, value in policy.named_parameters()} == names


@pytest.mark.promise
@pytest.mark.parametrize(
    ("stored", "quantize"),
    [
        ("mixed", None),
        ("float32", "8bit"),
        pytest.param("float32", None, marks=pytest.mark.full("float32 is quantized above")),
        pytest.param("mixed", "8bit", marks=pytest.mark.full("float32 is quantized above")),
    ],
)
def test_weights_beside_adapters_are_rounded_to_the_dtype_of_the_computation(stored, quantize, stored_model):
    expected = read_stored(model := stored_model("qwen3_5", stored))
    trainers = [
        build_trainer(
            model,
            TrainerConfig.model_validate({"dtype": dtype, "lora": {"enabled": True, "rank": 2}}),
            SINGLE_RANK,
            quantize=quantize,
        )
        for dtype in ("bfloat16", "float32")
    ]
    adapters, unsplit_adapters = map(copy_weights, trainers)
    assert trainers[0].master_weights.is_split
    assert all(map(is_adapter_weight, adapters))
    assert adapters.keys() == unsplit_adapters.keys()
    assert all(equal_bits(value, unsplit_adapters[name]) for name, value in adapters.items())
    fixed = {name: value for name, value in trainers[0].policy.named_parameters() if name not in adapters}
    assert {"model.model.embed_tokens.weight", "model.model.norm.weight"} <= fixed.keys() <= expected.keys()
    assert fixed.keys() == expected.keys() or quantize
    for name, value in fixed.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, expected[name].bfloat16()), name


@pytest.mark.skipif(sys.platform != "linux", reason="reads the heap of glibc")
@pytest.mark.promise
@pytest.mark.parametrize(("kind", "stored"), [("dense", "mixed"), ("dense", "float32"), ("experts", "mixed")])
def test_the_host_holds_no_float32_copy_of_a_model(kind, stored, tmp_path):
    """Split master weights take as much as a float32 copy, which must not be there beside them."""
    float32_bytes = count_float32_bytes(write_checkpoint(tmp_path, kind, stored))
    with HeapPeak.measure() as heap:
        policy = load_policy(tmp_path, device="cpu", dtype=torch.bfloat16, keep_precision=True)
        assert heap.update() < 0.75 * float32_bytes
        trainer = Trainer(policy, TrainerConfig(), dtype=torch.bfloat16)
    assert trainer.master_weights.is_split
    assert heap.peak < 1.25 * float32_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads the heap of glibc")
@pytest.mark.promise
@pytest.mark.parametrize(("kind", "stored"), [("dense", "mixed"), ("dense", "float32"), ("experts", "float32")])
def test_the_host_holds_no_float32_copy_of_weights_beside_adapters(kind, stored, tmp_path):
    float32_bytes = count_float32_bytes(write_checkpoint(tmp_path, kind, stored))
    config = TrainerConfig.model_validate({"dtype": "bfloat16", "lora": {"enabled": True, "rank": 1}})
    with HeapPeak.measure() as heap:
        trainer = build_trainer(tmp_path, config, SINGLE_RANK)
    assert trainer.master_weights.is_split
    assert heap.peak < 0.85 * float32_bytes
