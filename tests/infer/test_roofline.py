"""The least time for a step, by hand."""

import pytest
import torch

from ramify.infer.request import SamplingParams
from ramify.infer.roofline import StepWork, build_step_work
from ramify.infer.scheduler import ScheduledChunk
from ramify.model.device_copy import DEVICE_PEAKS, DevicePeaks, get_device_peaks
from ramify.model.lora import add_adapters, quantize_base
from tests.support.models import VOCAB, build_core, run, write_llama, write_qwen3_next

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 64, 4, 2, 8, 2
LLAMA_WEIGHTS = LAYERS * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER)


@pytest.fixture
def core(tmp_path):
    return build_core(write_llama(tmp_path), kv_cache_tokens=256)


def build_chunks(core, *spans: tuple[int, int]) -> list[ScheduledChunk]:
    request = core.create_request([3], SamplingParams())
    return [ScheduledChunk(request, start, stop, True) for start, stop in spans]


def test_decode_step_is_bound_by_the_bytes_it_reads(core):
    work = StepWork.from_model(core.model, 4, DevicePeaks(flops=1e15, memory_bytes=1e6))
    weights, block = 4 * (LLAMA_WEIGHTS + VOCAB * HIDDEN), 4 * 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
    chunks = build_chunks(core, (10, 11), (20, 21))
    assert work.ideal_seconds(chunks, 7) == pytest.approx((weights + 7 * block) / 1e6)


def test_prefill_is_bound_by_its_operations(core):
    work = StepWork.from_model(core.model, 4, DevicePeaks(flops=1e6, memory_bytes=1e15))
    pairs = sum(range(8, 24)) + 0.5 * 16  # the mean of a query's keys before and after it
    products = 2 * (16 * LLAMA_WEIGHTS + VOCAB * HIDDEN)
    expected = (products + 4 * LAYERS * HEADS * HEAD_DIM * pairs) / 1e6
    assert work.ideal_seconds(build_chunks(core, (8, 24)), 0) == pytest.approx(expected)


def test_experts_are_read_as_far_as_tokens_can_choose_them(tmp_path):
    model = build_core(write_qwen3_next(tmp_path), kv_cache_tokens=64).model
    work = StepWork.from_model(model, 4, DevicePeaks(flops=1e15, memory_bytes=1e6))
    assert work.weights.expert_share == 0.5
    assert work.weights.experts == 4 * 3 * 32 * 16
    assert work.state_bytes == 4 * (64 * 4 + 4 * 8 * 8)
    core = build_core(tmp_path, kv_cache_tokens=64)
    one, two, three = (work.ideal_seconds(build_chunks(core, *[(0, 1)] * count), 0) for count in (1, 2, 3))
    states = 2 * work.state_bytes / 1e6
    assert two - one == pytest.approx(4 * work.weights.experts / 2 / 1e6 + states)
    assert three - two == pytest.approx(states)


def test_unknown_devices_are_left_out(core):
    assert build_step_work(core.model, 4) is None  # a CPU
    run(core, core.create_request([3, 4], SamplingParams(max_tokens=2)))
    assert "ideal_seconds" not in core.gauges()
    assert get_device_peaks("NVIDIA GeForce RTX 4090") is None
    assert get_device_peaks("NVIDIA H200") == DEVICE_PEAKS["H200"]


def test_ideal_time_adds_up_over_steps(core):
    core.step_work = StepWork.from_model(core.model, 4, DevicePeaks(flops=1e12, memory_bytes=1e9))
    run(core, core.create_request([3, 4, 5], SamplingParams(max_tokens=3)))
    prefill, decode = (core.step_work.ideal_seconds(build_chunks(core, span), 1) for span in ((0, 3), (3, 4)))
    last = core.step_work.ideal_seconds(build_chunks(core, (4, 5)), 2)
    assert core.gauges()["ideal_seconds"] == pytest.approx(prefill + decode + last)


def test_a_quantized_base_is_read_in_its_bits(core):
    chunks, module, peaks = build_chunks(core, (10, 11)), core.model.module, DevicePeaks(flops=1e15, memory_bytes=1e6)
    add_adapters(module, 2, 4, [])
    unquantized_seconds = StepWork.from_model(core.model, 4, peaks).ideal_seconds(chunks, 0)
    quantize_base(module, "4bit", torch.float32, core.model.device)
    quantized_seconds = StepWork.from_model(core.model, 4, peaks).ideal_seconds(chunks, 0)
    num_scales = LLAMA_WEIGHTS // 32 - LAYERS * HIDDEN * INNER // 64  # the last product has blocks of 64 columns
    assert unquantized_seconds - quantized_seconds == pytest.approx((LLAMA_WEIGHTS * 3.5 - 4 * num_scales) / 1e6)
