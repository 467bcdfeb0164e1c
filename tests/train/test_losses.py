"""Each loss against a reference computed token by token, against TRL, and against its formula in the docs."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from ramify.core.errors import ConfigInvalid
from ramify.train.config import LossConfig
from ramify.train.losses import LOSSES, Entries, LossTerm, ce, kl, load_loss, ref_kl

GOLDEN = json.loads((Path(__file__).parent / "golden" / "trl.json").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "losses.md"
COUNT = 400


def build_entries(seed: int = 0) -> Entries:
    """Build entries of calls of one to nine tokens, with ratios on both sides of every bound."""
    rng = np.random.default_rng(seed)
    sampler = np.log(rng.uniform(0.02, 0.98, COUNT))
    logprob = np.log(np.clip(np.exp(sampler) * np.exp(rng.normal(0, 0.8, COUNT)), 0.005, 0.995))
    sequence = np.repeat(np.arange(COUNT), rng.integers(1, 10, COUNT))[:COUNT]
    logprob[sequence % 3 == 0] = sampler[sequence % 3 == 0] + 1e-4  # calls within the narrow bounds of gspo
    columns = (logprob, sampler, rng.choice([-1.5, -0.3, 0.0, 0.4, 2.0], COUNT), np.log(rng.uniform(0.02, 0.98, COUNT)))
    new, old, advantage, reference = (torch.tensor(column, dtype=torch.float64) for column in columns)
    index, num_sequences = torch.from_numpy(sequence), int(sequence.max()) + 1
    return Entries(new.requires_grad_(), old, advantage, reference, index, num_sequences)


def clipped(ratio: float, advantage: float, low: float, high: float, slope: float) -> tuple[float, float]:
    plain, bound = ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage
    return (-plain, -advantage * slope) if plain <= bound else (-bound, 0.0)


def reference(name: str, e: Entries) -> list[tuple[float, float]]:
    """Return (loss, its derivative by the token's own logprob) of each token, with the default options."""
    values: list[tuple[float, float]] = []
    logprob, sampler, advantage, ref = (
        c.detach().tolist() for c in (e.logprob, e.sampler_logprob, e.advantage, e.reference_logprob)
    )
    calls = e.sequence_index.tolist()
    for t, (p, s, a, r) in enumerate(zip(logprob, sampler, advantage, ref)):
        log_ratio = p - s
        ratio = math.exp(log_ratio)
        if name == "dppo":
            gap = math.exp(p) - math.exp(s)
            drop = (a > 0 and gap > 0.2) or (a < 0 and gap < -0.2)
            values.append((0.0, 0.0) if drop else (-a * ratio + 1e-3 * log_ratio**2, -a * ratio + 2e-3 * log_ratio))
        elif name == "ppo":
            values.append(clipped(ratio, a, 0.2, 0.2, ratio))
        elif name == "cispo":
            weight = min(max(ratio, 0.0), 5.0)
            values.append((-weight * a * p, -weight * a))
        elif name == "tis":
            weight = min(ratio, 2.0)
            values.append((-weight * a * p, -weight * a))
        elif name == "icepop":
            values.append((-a * ratio, -a * ratio) if 0.5 <= ratio <= 5.0 else (0.0, 0.0))
        elif name == "ce":
            values.append((-p, -1.0))
        elif name == "ref_kl":
            values.append((-(r - p) * ratio + 1e-3 * log_ratio**2, -(r - p) * ratio + 2e-3 * log_ratio))
        elif name == "kl":
            values.append((math.exp(r - p) - (r - p) - 1, 1 - math.exp(r - p)))
        else:  # gspo: the loss of every token of the call depends on this token's logprob
            call = [u for u, c in enumerate(calls) if c == calls[t]]
            mean = math.exp(sum(logprob[u] - sampler[u] for u in call) / len(call))
            slope = sum(clipped(mean, advantage[u], 3e-4, 4e-4, mean / len(call))[1] for u in call)
            values.append((clipped(mean, a, 3e-4, 4e-4, 0.0)[0], slope))
    return values


ALL_LOSSES = {**LOSSES, "ce": ce, "ref_kl": ref_kl, "kl": kl}


@pytest.mark.parametrize("name", ALL_LOSSES)
def test_loss_and_gradient_equal_the_reference(name):
    entries = build_entries()
    term = ALL_LOSSES[name](entries)
    (gradient,) = torch.autograd.grad(term.loss.sum(), entries.logprob)
    loss, slope = np.array(reference(name, entries)).T
    np.testing.assert_allclose(term.loss.detach(), loss, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-12)
    if term.masked is not None:
        share = float(term.masked.double().mean())
        assert 0.02 < share < 0.98
        if name != "gspo":
            assert not gradient[term.masked].any()


def load_golden_entries() -> Entries:
    lengths = GOLDEN["lengths"]
    tensors = [torch.tensor(GOLDEN[name], dtype=torch.float64) for name in ("logprob", "sampler")]
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    advantage = torch.tensor(GOLDEN["advantages"], dtype=torch.float64)[sequence]
    reference = torch.tensor(GOLDEN["reference"], dtype=torch.float64)
    return Entries(tensors[0].requires_grad_(), tensors[1], advantage, reference, sequence, len(lengths))


OPTIONS = {"low": 0.2, "high": 0.28}
SETTINGS = {
    "ppo": ("ppo", OPTIONS),
    "ppo, all tokens": ("ppo", OPTIONS),
    "ppo, beta": ("ppo", OPTIONS),
    "ppo, mean of sequences": ("ppo", OPTIONS),
    "ppo, fixed length": ("ppo", OPTIONS),
    "cispo": ("cispo", {"high": 0.5}),
    "gspo": ("gspo", OPTIONS),
    "tis": ("tis", {"cap": 2.0}),
    "icepop": ("icepop", {"low": 0.5, "high": 2.0}),
}


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_loss_and_gradient_equal_trl(case):
    """TRL averages in several ways, which are weights of the entries here."""
    entries, expected = load_golden_entries(), GOLDEN["cases"][case]
    lengths = torch.tensor(GOLDEN["lengths"], dtype=torch.float64)
    count, rows = float(lengths.sum()), len(lengths)
    weight = {
        "ppo, mean of sequences": count / (rows * lengths[entries.sequence_index]),
        "ppo, fixed length": torch.full((int(count),), count / (rows * GOLDEN["longest"]), dtype=torch.float64),
    }.get(case, torch.ones(int(count), dtype=torch.float64))
    id, options = SETTINGS[case]
    loss = (weight * load_loss(id, options)(entries).loss).sum() / count
    if case == "ppo, beta":
        loss = loss + GOLDEN["beta"] * kl(entries).loss.sum() / count
    (gradient,) = torch.autograd.grad(loss, entries.logprob)
    np.testing.assert_allclose(gradient, expected["gradient"], rtol=1e-5, atol=1e-7)
    if case != "tis":  # TRL's loss has min(ρ, cap)·1 in place of min(ρ, cap)·logπ, with the same gradient
        assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)


def test_the_formula_of_every_loss_in_the_docs_gives_the_same_values():
    names: dict = {}
    text = PAGE.read_text()
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
    entries = build_entries(1)
    logprob, sampler, advantage, ref, call = (
        column.detach().numpy()
        for column in (
            entries.logprob,
            entries.sampler_logprob,
            entries.advantage,
            entries.reference_logprob,
            entries.sequence_index,
        )
    )
    for name, loss in ALL_LOSSES.items():
        assert re.search(rf"^### {name}\b", text, re.MULTILINE), name
        extra = {"ce": (), "ref_kl": (sampler, ref), "kl": (ref,), "gspo": (sampler, advantage, call)}
        values = names[name](logprob, *extra.get(name, (sampler, advantage)))
        np.testing.assert_allclose(loss(entries).loss.detach(), values, rtol=1e-9, atol=1e-12, err_msg=name)
    weights = np.where(advantage > 0, 0.5, 0.0)
    assert names["total"](-logprob, weights) == pytest.approx(-0.5 * logprob[weights > 0].mean())
    losses, rollout = np.array([1.0, 2.0, 4.0]), np.array([0, 0, 1])
    assert names["sequence_mean"](losses, np.ones(3), rollout) == pytest.approx((1.5 + 4.0) / 2)
    assert names["fixed_mean"](losses, np.ones(3), rollout, 5) == pytest.approx((3.0 + 4.0) / 5 / 2)
    assert isinstance(names["reinforce"](entries), LossTerm)


def scaled(entries, *, by):
    return LossTerm(-by * entries.logprob)


def without_term(entries):
    return -entries.logprob


def averaged(entries):
    return LossTerm(-entries.logprob.mean())


def test_a_custom_loss_must_return_one_value_per_entry():
    entries = build_entries()
    assert torch.equal(load_loss(f"{__name__}.scaled", {"by": 2.0})(entries).loss, -2.0 * entries.logprob)
    for id in ("without_term", "averaged"):  # a mean would depend on the packing
        with pytest.raises(ConfigInvalid, match="one number for each entry"):
            load_loss(f"{__name__}.{id}")(entries)


def test_a_loss_is_loaded_by_name_or_import_path_and_its_options_are_checked(tmp_path, monkeypatch):
    (tmp_path / "broken_losses.py").write_text('raise RuntimeError("broken")')
    monkeypatch.syspath_prepend(tmp_path)
    entries = build_entries()
    expected = load_loss("ppo")(entries).loss
    assert torch.equal(load_loss("ramify.train.losses:ppo")(entries).loss, expected)
    assert not torch.equal(load_loss("ppo", {"high": 0.5})(entries).loss, expected)
    code = "from ramify.train.losses import ppo\ndef mine(entries, *, high):\n    return ppo(entries, high=high)\n"
    (tmp_path / "own.py").write_text(code)
    assert torch.equal(load_loss(f"{tmp_path}/own.py:mine", {"high": 0.2})(entries).loss, expected)
    for id, options, message in [
        ("dpo", {}, "did you mean 'dppo'"),
        ("ppo", {"hight": 0.5}, "did you mean 'high'"),
        ("nowhere.loss", {}, "cannot be imported"),
        ("folder/nowhere.py:loss", {}, "cannot be imported: FileNotFoundError"),
        ("nowhere.py", {}, "is a file; expected one of its functions, such as nowhere.py:my_loss"),
        ("grpo", {}, "it is an algorithm, .*: set train.0.algorithm.id; the losses are dppo, ppo"),
        ("broken_losses.loss", {}, "cannot be imported: RuntimeError: broken"),
        ("tests.support.training.VOCAB", {}, "is not a function"),
        (f"{__name__}.scaled", {}, "needs the option 'by'"),
    ]:
        with pytest.raises(ConfigInvalid, match=message):
            load_loss(id, options)
    with pytest.raises(ValueError, match="no option"):
        LossConfig(id="tis", options={"high": 1.0})
    with pytest.raises(ValueError, match="there is no loss"):
        LossConfig(id="nothing")
