"""The head in chunks gives what the whole logits would."""

import pytest
import torch

from ramify.train import lm_head
from ramify.train.lm_head import compute_logprobs

ROWS, WIDTH, VOCAB = 37, 8, 23


@pytest.fixture(params=[1, 10, 1000], ids=lambda rows: f"{rows} rows a chunk")
def chunked(request, monkeypatch):
    monkeypatch.setitem(lm_head.CHUNK_BYTES, "cpu", request.param * VOCAB * 4)


def columns(bias: bool):
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH, requires_grad=True)
    token = torch.randint(VOCAB, (ROWS,))
    temperature = torch.linspace(0.5, 2.0, ROWS)
    return hidden, weight, torch.randn(VOCAB, requires_grad=True) if bias else None, token, temperature


@pytest.mark.parametrize("bias", [False, True])
def test_logprob_entropy_and_gradients_at_each_rows_temperature(chunked, bias):
    hidden, weight, more, token, temperature = columns(bias)
    inputs = [each for each in (hidden, weight, more) if each is not None]
    logits = torch.nn.functional.linear(hidden, weight, more) / temperature[:, None]
    logs = logits.log_softmax(-1)
    wanted = logs.gather(1, token[:, None])[:, 0]
    found, entropy = compute_logprobs(hidden, weight, more, token, temperature)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(entropy, -(logs.exp() * logs).sum(-1).detach())
    assert not entropy.requires_grad
    grad = torch.randn(ROWS)
    for ours, theirs in zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(wanted, inputs, grad)):
        torch.testing.assert_close(ours, theirs)


def test_bfloat16_sums_the_weights_gradient_in_float32(chunked):
    hidden, weight, _, token, temperature = columns(False)
    small, rounded = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    found, _ = compute_logprobs(small, rounded, None, token, temperature)
    (grad,) = torch.autograd.grad(found.sum(), rounded)
    exact, _ = compute_logprobs(small.float(), rounded.float().detach().requires_grad_(), None, token, temperature)
    assert grad.dtype == torch.bfloat16
    wanted = torch.autograd.grad(
        torch.log_softmax(
            small.float() @ (w := rounded.float().detach().requires_grad_()).t() / temperature[:, None], -1
        )
        .gather(1, token[:, None])
        .sum(),
        w,
    )[0]
    assert (grad.float() - wanted).norm() / wanted.norm() < 0.02
    torch.testing.assert_close(found, exact, atol=0.05, rtol=0.02)


def test_a_frozen_head_gets_no_gradient(chunked):
    hidden, weight, _, token, temperature = columns(False)
    found, _ = compute_logprobs(hidden, weight.detach(), None, token, temperature)
    found.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
