"""`auto` chooses bfloat16 only if the device has instructions for it, and gives the reason."""

import pytest
import torch

from ramify.model import precision
from ramify.model.load import load_engine_model
from ramify.model.precision import choose_dtype, cpu_has_bfloat16, disable_tf32_convolutions
from ramify.model.resolve import resolve_model_path

CPU = torch.device("cpu")
NEOVERSE_N1 = ["Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm"]
NEOVERSE_V1 = ["Features\t: fp asimd svei8mm svebf16 i8mm bf16 dgh rng"]
SAPPHIRE_RAPIDS = ["model name\t: Xeon", "flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile"]
SKYLAKE = ["model name\t: Xeon bf16", "flags\t\t: fpu avx2 avx512f avx512bw"]


@pytest.fixture(params=[(NEOVERSE_N1, False), (NEOVERSE_V1, True), (SAPPHIRE_RAPIDS, True), (["arm64", "arm"], False)])
def cpu(request, monkeypatch) -> bool:
    """Set the features of the CPU; return whether it has bfloat16 instructions."""
    features, has_bfloat16 = request.param
    monkeypatch.setattr(precision, "read_cpu_features", lambda: features)
    return has_bfloat16


def test_cpu_features_are_parsed(cpu):
    assert cpu_has_bfloat16() == cpu


def test_bfloat16_checkpoint_needs_a_cpu_with_bfloat16(cpu):
    choice = choose_dtype("auto", "bfloat16", CPU)
    assert choice.dtype == (torch.bfloat16 if cpu else torch.float32)
    assert ("this CPU cannot multiply" in str(choice)) == (not cpu)


def test_gpu_uses_the_dtype_of_the_checkpoint(cpu):
    assert choose_dtype("auto", torch.bfloat16, torch.device("cuda")).dtype == torch.bfloat16


def test_requested_dtype_is_used_and_emulation_is_reported(cpu):
    assert choose_dtype("float32", "bfloat16", CPU).dtype == torch.float32
    choice = choose_dtype("bfloat16", "float32", CPU)
    assert choice.dtype == torch.bfloat16
    assert ("emulates" in choice.reason) == (not cpu)


def test_model_name_is_not_a_feature(monkeypatch):
    monkeypatch.setattr(precision, "read_cpu_features", lambda: SKYLAKE)
    assert not cpu_has_bfloat16()


def test_packaged_model_is_loaded_in_the_dtype_of_this_cpu():
    loaded = load_engine_model(resolve_model_path("tiny"), device="cpu")
    expected = torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    assert loaded.dtype == expected
    assert {weight.dtype for weight in loaded.module.parameters()} == {expected}


def test_only_a_process_of_our_own_disables_tf32_convolutions(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    load_engine_model(resolve_model_path("tiny"), device="cpu")
    assert torch.backends.cudnn.allow_tf32
    disable_tf32_convolutions()
    assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.conv.fp32_precision != "tf32"
