"""The chunked head computes what the full logits would give."""

import pytest
import torch

from ramify.model.device_memory import get_free_bytes
from ramify.train import lm_head
from ramify.train.lm_head import LogitTransform, compute_logprobs

ROWS, WIDTH, VOCAB = 37, 8, 23
NO_IDS = torch.empty(ROWS, 0, dtype=torch.int64)


@pytest.fixture(params=[1, 10, 1000], ids=lambda rows: f"{rows} rows per chunk")
def chunked(request, monkeypatch):
    monkeypatch.setitem(lm_head.CHUNK_BYTES, "cpu", request.param * VOCAB * 4)


def build_inputs(with_bias: bool):
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH, requires_grad=True)
    target_ids = torch.randint(VOCAB, (ROWS,))
    temperature = torch.linspace(0.5, 2.0, ROWS)
    return hidden, weight, torch.randn(VOCAB, requires_grad=True) if with_bias else None, target_ids, temperature


@pytest.mark.parametrize("with_bias", [False, True])
def test_logprob_entropy_and_gradients_at_each_rows_temperature(chunked, with_bias):
    hidden, weight, bias, target_ids, temperature = build_inputs(with_bias)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature[:, None]
    all_logprobs = logits.log_softmax(-1)
    expected = all_logprobs.gather(1, target_ids[:, None])[:, 0]
    logprob, entropy, _ = compute_logprobs(hidden, weight, bias, target_ids, temperature, NO_IDS)
    torch.testing.assert_close(logprob, expected)
    torch.testing.assert_close(entropy, -(all_logprobs.exp() * all_logprobs).sum(-1).detach())
    assert not entropy.requires_grad
    grad = torch.randn(ROWS)
    actual_grads, expected_grads = (torch.autograd.grad(output, inputs, grad) for output in (logprob, expected))
    for actual_grad, expected_grad in zip(actual_grads, expected_grads):
        torch.testing.assert_close(actual_grad, expected_grad)


@pytest.mark.parametrize("transform", [LogitTransform(scale=0.3), LogitTransform(cap=2.0), LogitTransform(1.7, 1.5)])
def test_a_scale_and_a_soft_cap_have_exact_gradients(chunked, transform):
    hidden, weight, bias, target_ids, temperature = build_inputs(True)
    top_ids = torch.randint(VOCAB, (ROWS, 3))
    logits = transform.scale * torch.nn.functional.linear(hidden, weight, bias)
    logits = transform.cap * torch.tanh(logits / transform.cap) if transform.cap else logits
    all_logprobs = (logits / temperature[:, None]).log_softmax(-1)
    expected = all_logprobs.gather(1, torch.cat([target_ids[:, None], top_ids], 1))
    columns = target_ids, temperature, top_ids
    logprob, entropy, top_logprob = compute_logprobs(hidden, weight, bias, *columns, transform)
    actual = torch.cat([logprob[:, None], top_logprob], 1)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(entropy, -(all_logprobs.exp() * all_logprobs).sum(-1).detach())
    grad = torch.randn(ROWS, 4)
    actual_grads, expected_grads = (
        torch.autograd.grad(output, (hidden, weight, bias), grad) for output in (actual, expected)
    )
    for actual_grad, expected_grad in zip(actual_grads, expected_grads):
        torch.testing.assert_close(actual_grad, expected_grad)


def test_bfloat16_sums_the_weights_gradient_in_float32(chunked):
    hidden, weight, _, target_ids, temperature = build_inputs(False)
    hidden, weight = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    logprob, *_ = compute_logprobs(hidden, weight, None, target_ids, temperature, NO_IDS)
    (grad,) = torch.autograd.grad(logprob.sum(), weight)
    exact_weight = weight.float().detach().requires_grad_()
    exact_logprob, *_ = compute_logprobs(hidden.float(), exact_weight, None, target_ids, temperature, NO_IDS)
    assert grad.dtype == torch.bfloat16
    logprobs = torch.log_softmax(hidden.float() @ exact_weight.t() / temperature[:, None], -1)
    (expected_grad,) = torch.autograd.grad(logprobs.gather(1, target_ids[:, None]).sum(), exact_weight)
    assert (grad.float() - expected_grad).norm() / expected_grad.norm() < 0.02
    torch.testing.assert_close(logprob, exact_logprob, atol=0.05, rtol=0.02)


def test_a_frozen_head_gets_no_gradient(chunked):
    hidden, weight, _, target_ids, temperature = build_inputs(False)
    logprob, *_ = compute_logprobs(hidden, weight.detach(), None, target_ids, temperature, NO_IDS)
    logprob.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize(("kept", "num_kept"), [(0, 0), (2, 2), (1000, 4)])
def test_kept_logits_change_no_bit(kept, num_kept, monkeypatch):
    inputs = hidden, weight, bias, *_ = build_inputs(True)
    monkeypatch.setitem(lm_head.CHUNK_BYTES, "cpu", 10 * VOCAB * 4)  # four chunks
    outputs, num_saved = [], []
    for number in (1, kept):
        monkeypatch.setitem(lm_head.KEPT_CHUNKS, "cpu", number)
        logprob, *_ = compute_logprobs(*inputs, NO_IDS)
        num_saved.append(len(logprob.grad_fn.saved_tensors))
        outputs.append([logprob, *torch.autograd.grad(logprob.sum(), (hidden, weight, bias))])
    for expected, actual in zip(*outputs, strict=True):
        assert torch.equal(expected, actual)
    assert num_saved[1] - num_saved[0] == num_kept - 1


@pytest.mark.parametrize(("free_gib", "kept"), [(0, 3), (12, 3), (22, 5), (102, 25)])
def test_a_quarter_of_the_free_memory_without_the_gradient_of_the_head_holds_logits(free_gib, kept):
    assert lm_head.count_kept_chunks("cuda", free_gib << 30, (1 << 30) // 4) == kept  # two GiB are for the gradient
    with torch.no_grad():
        assert lm_head.count_kept_chunks("cuda", free_gib << 30, (1 << 30) // 4) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts the memory of a GPU")
def test_free_memory_of_a_gpu_is_less_by_what_is_allocated():
    device = torch.device("cuda", torch.cuda.current_device())
    before = get_free_bytes(device)
    filler = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    assert get_free_bytes(device) <= before - filler.nbytes
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(0.5 * fraction, device)
    try:
        assert get_free_bytes(device) <= 0.5 * fraction * torch.cuda.mem_get_info(device)[1]
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction, device)
