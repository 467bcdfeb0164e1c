"""Each loss against a reference that goes token by token, against TRL's, and against its page in the docs."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ramify.errors import ConfigInvalid
from ramify.train.config import LossConfig
from ramify.train.losses import LOSSES, Entries, LossTerm, ce, load_loss, ref_kl

GOLDEN = json.loads((Path(__file__).parent / "golden" / "trl.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
COUNT = 400


def entries(seed: int = 0) -> Entries:
    """Calls of one to nine tokens; ratios on both sides of every bound, advantages of both signs and zero."""
    rng = np.random.default_rng(seed)
    sampler = np.log(rng.uniform(0.02, 0.98, COUNT))
    logprob = np.log(np.clip(np.exp(sampler) * np.exp(rng.normal(0, 0.8, COUNT)), 0.005, 0.995))
    sequence = np.repeat(np.arange(COUNT), rng.integers(1, 10, COUNT))[:COUNT]
    logprob[sequence % 3 == 0] = sampler[sequence % 3 == 0] + 1e-4  # calls inside the narrow band of gspo
    columns = (logprob, sampler, rng.choice([-1.5, -0.3, 0.0, 0.4, 2.0], COUNT), np.log(rng.uniform(0.02, 0.98, COUNT)))
    held = [torch.tensor(column, dtype=torch.float64) for column in columns]
    return Entries(held[0].requires_grad_(), *held[1:], torch.from_numpy(sequence), int(sequence.max()) + 1)


def clipped(ratio: float, advantage: float, low: float, high: float, slope: float) -> tuple[float, float]:
    plain, bound = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
    return (-plain, -advantage * slope) if plain <= bound else (-bound, 0.0)


def reference(name: str, e: Entries) -> list[tuple[float, float]]:
    """(loss, its derivative by the token's own logprob) of each token, with the default options."""
    found: list[tuple[float, float]] = []
    logprob, sampler, advantage, ref = (
        c.detach().tolist() for c in (e.logprob, e.sampler_logprob, e.advantage, e.reference_logprob)
    )
    calls = e.sequence_index.tolist()
    for t, (p, s, a, r) in enumerate(zip(logprob, sampler, advantage, ref)):
        lr = p - s
        ratio = math.exp(lr)
        if name == "dppo":
            gap = math.exp(p) - math.exp(s)
            drop = (a > 0 and gap > 0.2) or (a < 0 and gap < -0.2)
            found.append((0.0, 0.0) if drop else (-a * ratio + 1e-3 * lr * lr, -a * ratio + 2e-3 * lr))
        elif name == "ppo":
            found.append(clipped(ratio, a, 0.2, 0.2, ratio))
        elif name == "cispo":
            weight = min(max(ratio, 0.0), 5.0)
            found.append((-weight * a * p, -weight * a))
        elif name == "tis":
            weight = min(ratio, 2.0)
            found.append((-weight * a * p, -weight * a))
        elif name == "icepop":
            found.append((-a * ratio, -a * ratio) if 0.5 <= ratio <= 5.0 else (0.0, 0.0))
        elif name == "ce":
            found.append((-p, -1.0))
        elif name == "ref_kl":
            found.append((-(r - p) * ratio + 1e-3 * lr * lr, -(r - p) * ratio + 2e-3 * lr))
        else:  # gspo: the loss of every token of the call depends on this token's logprob
            call = [u for u, c in enumerate(calls) if c == calls[t]]
            mean = math.exp(sum(logprob[u] - sampler[u] for u in call) / len(call))
            slope = sum(clipped(mean, advantage[u], 3e-4, 4e-4, mean / len(call))[1] for u in call)
            found.append((clipped(mean, a, 3e-4, 4e-4, 0.0)[0], slope))
    return found


EVERY = {**LOSSES, "ce": ce, "ref_kl": ref_kl}


@pytest.mark.parametrize("name", EVERY)
def test_a_loss_and_its_gradient_equal_the_reference_token_by_token(name):
    given = entries()
    term = EVERY[name](given)
    (gradient,) = torch.autograd.grad(term.loss.sum(), given.logprob)
    loss, slope = np.array(reference(name, given)).T
    np.testing.assert_allclose(term.loss.detach(), loss, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-12)
    if term.masked is not None:
        share = float(term.masked.double().mean())
        assert 0.02 < share < 0.98
        if name != "gspo":
            assert not gradient[term.masked].any()


def from_golden() -> Entries:
    lengths = GOLDEN["lengths"]
    held = [torch.tensor(GOLDEN[name], dtype=torch.float64) for name in ("logprob", "sampler")]
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    advantage = torch.tensor(GOLDEN["advantages"], dtype=torch.float64)[sequence]
    return Entries(
        held[0].requires_grad_(), held[1], advantage, torch.full_like(held[1], math.nan), sequence, len(lengths)
    )


OPTIONS = {"low": 0.2, "high": 0.28}
SETTINGS = {
    "ppo": ("ppo", OPTIONS),
    "ppo, all tokens": ("ppo", OPTIONS),
    "ppo, mean of sequences": ("ppo", OPTIONS),
    "ppo, fixed length": ("ppo", OPTIONS),
    "cispo": ("cispo", {"high": 0.5}),
    "gspo": ("gspo", OPTIONS),
    "tis": ("tis", {"cap": 2.0}),
    "icepop": ("icepop", {"low": 0.5, "high": 2.0}),
}


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_loss_and_gradient_equal_trl(case):
    """TRL's ways to average are weights here: of a mean of sequences, each token's share of its own."""
    given, wanted = from_golden(), GOLDEN["cases"][case]
    lengths = torch.tensor(GOLDEN["lengths"], dtype=torch.float64)
    count, rows = float(lengths.sum()), len(lengths)
    weight = {
        "ppo, mean of sequences": count / (rows * lengths[given.sequence_index]),
        "ppo, fixed length": torch.full((int(count),), count / (rows * GOLDEN["longest"]), dtype=torch.float64),
    }.get(case, torch.ones(int(count), dtype=torch.float64))
    id, options = SETTINGS[case]
    loss = (weight * load_loss(id, options)(given).loss).sum() / count
    (gradient,) = torch.autograd.grad(loss, given.logprob)
    np.testing.assert_allclose(gradient, wanted["gradient"], rtol=1e-5, atol=1e-7)
    if case != "tis":  # TRL has min(ρ, cap)·1 where we have min(ρ, cap)·logπ: the same gradient
        assert loss.item() == pytest.approx(wanted["loss"], rel=1e-5)


def test_every_loss_has_a_formula_in_the_docs_that_gives_the_same_numbers():
    names: dict = {}
    text = PAGE.read_text()
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
    given = entries(1)
    logprob, sampler, advantage, ref, call = (
        column.detach().numpy()
        for column in (
            given.logprob,
            given.sampler_logprob,
            given.advantage,
            given.reference_logprob,
            given.sequence_index,
        )
    )
    for name, loss in EVERY.items():
        assert re.search(rf"^### {name}\b", text, re.MULTILINE), name
        extra = {"ce": (), "ref_kl": (sampler, ref), "gspo": (sampler, advantage, call)}.get(name, (sampler, advantage))
        found = names[name](logprob, *extra)
        np.testing.assert_allclose(loss(given).loss.detach(), found, rtol=1e-9, atol=1e-12, err_msg=name)
    weights = np.where(advantage > 0, 0.5, 0.0)
    assert names["total"](-logprob, weights) == pytest.approx(-0.5 * logprob[weights > 0].mean())
    assert isinstance(names["reinforce"](given), LossTerm)


def sharpened(entries, *, by):
    return LossTerm(-by * entries.logprob)


def bare(entries):
    return -entries.logprob


def averaged(entries):
    return LossTerm(-entries.logprob.mean())


def test_a_loss_of_ones_own_gives_each_entry_its_number():
    assert torch.equal(load_loss(f"{__name__}.sharpened", {"by": 2.0})(entries()).loss, -2.0 * entries().logprob)
    for id in ("bare", "averaged"):  # a mean would depend on the packing
        with pytest.raises(ConfigInvalid, match="one number for each entry"):
            load_loss(f"{__name__}.{id}")(entries())


def test_a_loss_is_found_by_name_or_import_path_and_its_options_are_checked(tmp_path, monkeypatch):
    (tmp_path / "broken_losses.py").write_text('raise RuntimeError("broken")')
    monkeypatch.syspath_prepend(tmp_path)
    assert torch.equal(load_loss("ramify.train.losses.ppo:ppo")(entries()).loss, load_loss("ppo")(entries()).loss)
    assert not torch.equal(load_loss("ppo", {"high": 0.5})(entries()).loss, load_loss("ppo")(entries()).loss)
    for id, options, said in [
        ("dpo", {}, "did you mean 'dppo'"),
        ("ppo", {"hight": 0.5}, "did you mean 'high'"),
        ("nowhere.loss", {}, "cannot be imported"),
        ("broken_losses.loss", {}, "cannot be imported: RuntimeError: broken"),
        ("tests.train.models.VOCAB", {}, "is no function"),
        (f"{__name__}.sharpened", {}, "needs the option 'by'"),
    ]:
        with pytest.raises(ConfigInvalid, match=said):
            load_loss(id, options)
    with pytest.raises(ValueError, match="no option"):
        LossConfig(id="tis", options={"high": 1.0})
    with pytest.raises(ValueError, match="there is no loss"):
        LossConfig(id="nothing")
