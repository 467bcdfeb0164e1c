"""The KL over the likeliest tokens of a reference: its value, its bound, and its gradient through forest and flat."""

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from ramify.core.errors import OperationInvalid, ValueNotFinite
from ramify.trace import Annotation, build_forest
from ramify.trace.annotation import TOP_DTYPE
from ramify.train import lm_head
from ramify.train.batch import Batch, pack_forests
from ramify.train.batch_codec import decode_batch, encode_batch
from ramify.train.lm_head import compute_logprobs
from ramify.train.losses import compute_top_kl
from tests.support.forests import Attempt
from tests.support.training import (
    CONFIGS,
    VOCAB,
    build_attempt,
    build_group,
    build_model,
    build_policy,
    count_entries,
    get_gradients,
    train_forest,
)

PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
ROWS, TOP_K = 200, 5


def build_distributions(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs of all tokens under a policy and a reference, some of them almost certain."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.1, 8.0, ROWS)[:, None]
    logits = (scale * torch.randn(2, ROWS, VOCAB, generator=generator)).to(dtype)
    return logits[0].log_softmax(-1), logits[1].log_softmax(-1)


def compute_kl(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (policy.exp() * (policy - reference)).sum(-1)


def take_top(policy: torch.Tensor, reference: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    reference_top, ids = reference.topk(top_k)
    return policy.gather(1, ids), reference_top


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_tokens_give_the_full_kl(dtype):
    policy, reference = build_distributions()
    top = compute_top_kl(*(values.to(dtype) for values in take_top(policy, reference, VOCAB)))
    expected = compute_kl(policy, reference)
    assert float(((top.double() - expected).abs() / expected.clamp(min=1.0)).max()) <= 1e-6


def test_fewer_tokens_give_a_lower_bound_that_grows_with_them():
    policy, reference = build_distributions()
    bounds = [compute_top_kl(*take_top(policy, reference, top_k)) for top_k in (1, 4, 16, VOCAB)]
    for lower, upper in zip(bounds, [*bounds[1:], compute_kl(policy, reference)]):
        assert bool((lower <= upper + 1e-6).all())
    assert float(bounds[0].mean()) < float(bounds[-1].mean())


def test_the_formula_of_the_docs_gives_the_same_values():
    (block,) = re.findall(r"^```python\n(def top_kl.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names = {"np": np}
    exec(block, names)
    top = take_top(*build_distributions(), TOP_K)
    np.testing.assert_allclose(compute_top_kl(*top), names["top_kl"](*(values.numpy() for values in top)), rtol=1e-9)


def test_missing_tokens_change_nothing():
    policy, reference = take_top(*build_distributions(), TOP_K)
    fills = ((policy, -3.0), (reference, -torch.inf))
    padded = [torch.cat([values, torch.full((ROWS, 2), fill)], 1) for values, fill in fills]
    torch.testing.assert_close(compute_top_kl(*padded), compute_top_kl(policy, reference))


def test_the_chunked_head_returns_the_logprobs_of_several_tokens_with_gradients(monkeypatch):
    monkeypatch.setitem(lm_head.CHUNK_BYTES, "cpu", 10 * VOCAB * 4)
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, 8, requires_grad=True), torch.randn(VOCAB, 8, requires_grad=True)
    target_ids, top_ids = torch.randint(VOCAB, (ROWS,)), torch.randint(VOCAB, (ROWS, TOP_K))
    temperature = torch.linspace(0.5, 2.0, ROWS)
    logprobs = (hidden @ weight.t() / temperature[:, None]).log_softmax(-1)
    expected = [logprobs.gather(1, target_ids[:, None])[:, 0], logprobs.gather(1, top_ids)]
    logprob, _, top_logprob = compute_logprobs(hidden, weight, None, target_ids, temperature, top_ids)
    grads = [torch.randn(ROWS), torch.randn(ROWS, TOP_K)]
    actual = torch.autograd.grad([logprob, top_logprob], [hidden, weight], grads)
    for got, want in zip(actual, torch.autograd.grad(expected, [hidden, weight], grads)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# -- through the model ---------------------------------------------------------------------------------------------


def add_top(attempt: Attempt, teacher, top_k: int) -> Attempt:
    """Return the attempt with `ref_kl` on all its replies, scored by the teacher."""
    notes = []
    for note in attempt.notes:
        path = attempt.path(note.node)
        ids = torch.tensor([token for node in path for token in attempt.nodes[node].tokens])
        start, stop = attempt.nodes[note.node].sampled
        first = attempt.depth(note.node) + start
        with torch.no_grad():
            logprobs = teacher(ids[None], use_cache=False).logits[0].log_softmax(-1)
        values, tokens = logprobs[first - 1 : first - 1 + stop - start].topk(top_k)
        top = np.zeros(tuple(tokens.shape), TOP_DTYPE)
        top["token"], top["logprob"] = tokens.numpy(), values.numpy()
        weights = {"rl": 0.0, "ref_kl": 0.7, "ref_logprobs": -3.0}
        notes.append(Annotation(attempt.name, note.node, **weights, top_k=top_k if note.node % 3 else 0, ref_top=top))
    return replace(attempt, notes=tuple(notes), temperature=1.0)


def train_in_float64(model, attempts: list[Attempt], num_entries: int) -> tuple[dict[str, torch.Tensor], float]:
    """Return gradients and loss of the formulas on the page, path by path, by autograd in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for attempt in attempts:
        for note in attempt.notes:
            planned = attempt.nodes[note.node]
            ids = torch.tensor([token for node in attempt.path(note.node) for token in attempt.nodes[node].tokens])
            start, stop = planned.sampled
            positions = torch.arange(attempt.depth(note.node) + start, attempt.depth(note.node) + stop)
            logprobs = model(ids[None], use_cache=False).logits[0].log_softmax(-1)[positions - 1]
            if note.top_k:
                q_log = torch.tensor(note.ref_top["logprob"], dtype=torch.float64)
                p_log = logprobs.gather(1, torch.tensor(note.ref_top["token"]).long())
                rest_p, rest_q = ((1 - x.exp().sum(1)).clamp(min=1e-6) for x in (p_log, q_log))
                losses = (p_log.exp() * (p_log - q_log)).sum(1) + rest_p * (rest_p / rest_q).log()
            else:
                logp = logprobs.gather(1, ids[positions, None])[:, 0]
                delta = logp - torch.tensor(planned.logprobs, dtype=torch.float64)
                losses = -(-3.0 - logp).detach() * delta.exp() + 1e-3 * delta**2
            total = total + 0.7 * losses.sum() / num_entries
    total.backward()
    return get_gradients(model), float(total.detach())


@pytest.mark.promise
@pytest.mark.parametrize("shape", ["llama", "qwen3"])
def test_forest_and_flat_packs_have_the_gradient_of_the_formula(shape):
    rng, config = Random(0), CONFIGS[shape]
    teacher = build_model(config, "eager", seed=1)
    attempts = [*build_group(rng, 3, [-1, 0, 1, 1]), build_attempt(rng, "b", [-1, 0, 0, 1, 1])]
    groups = [[add_top(attempt, teacher, TOP_K) for attempt in group] for group in (attempts[:3], attempts[3:])]
    plain = replace(build_attempt(rng, "c", [-1, 0]), temperature=1.0)  # a forest without likeliest tokens in one pack
    plain = replace(plain, notes=(Annotation("c", 1, rl=0.0, ref_kl=0.7, ref_logprobs=-3.0),))
    groups.append([plain])
    forests = [build_forest([attempt.sample() for attempt in group]) for group in groups]
    counts = count_entries(forests)
    model = build_model(config, "eager").double()
    expected, loss = train_in_float64(model, [attempt for group in groups for attempt in group], counts["ref_kl"])
    policy = build_policy(config)
    for flat in (False, True):
        packs = pack_forests(forests, 400, flat=flat)
        packs = decode_batch(encode_batch(Batch.from_packs(0, packs))).packs
        result = train_forest(policy, packs, counts)
        for name, gradient in expected.items():
            assert float((result.gradients[name] - gradient).norm() / gradient.norm()) <= 1e-5, (flat, name)
        assert result.loss == pytest.approx(loss, rel=1e-5)


def test_tokens_that_are_missing_are_refused_by_name():
    attempt = build_attempt(Random(0), "a", [-1, 0])
    note = Annotation("a", 1, rl=0.0, ref_kl=1.0, ref_logprobs=-1.0, top_k=3)
    with pytest.raises(ValueNotFinite, match="not the likeliest tokens of the reference"):
        build_forest([replace(attempt, notes=(note,)).sample()])
    with pytest.raises(OperationInvalid, match=r"has shape \(2, 3\): expected \(8, 3\)"):
        build_forest([replace(attempt, notes=(replace(note, ref_top=np.zeros((2, 3), TOP_DTYPE)),)).sample()])
