"""Training on the forest gives the gradients of training on flat sequences.

A small pre-norm transformer with rotary positions is run twice: on forests, with the mask their `end` defines, and on
every root-to-leaf branch of every trace as a plain causal sequence of its own. The loss is the design's, over entries.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from ramify.trace import Annotation, Forest, build_forest, pack_trees, split_forest
from tests.support.forests import COMPONENTS, Attempt, Planned, Size, group

SEEDS = range(20 if os.environ.get("RAMIFY_FULL") else 2)
VOCAB, DIM, HEADS, LAYERS = 50, 48, 4, 3
TOLERANCE = 1e-5
# Sampler logprobs around those of an untrained model, and some far above, whose entries DPPO drops when A < 0.
SIZE = Size(traces=4, nodes=8, fewest=5, tokens=16, vocab=VOCAB, logprobs=(-5.0, -0.1), placeholders=(49,))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- the model -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x, turn, mask):
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        scores = turn(q) @ turn(k).mT / (DIM // HEADS) ** 0.5
        seen = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        x = x + self.out(seen.transpose(0, 1).reshape(len(x), DIM))
        return x + self.down(silu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.look = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, position, mask, images: Iterable[tuple[int, int, bytes]] = ()):
        """The last hidden state of every token; an image's features stand in for its placeholders."""
        x = self.embed(torch.as_tensor(ids).long())
        for start, stop, data in images:
            seed = int.from_bytes(hashlib.sha256(data).digest()[:4], "big")
            pixels = torch.from_numpy(np.random.default_rng(seed).normal(size=(stop - start, DIM)).astype(np.float32))
            x = torch.cat([x[:start], self.look(pixels), x[stop:]])
        angles = torch.as_tensor(position).float()[:, None] / 100 ** torch.linspace(0, 1, DIM // HEADS // 2)
        cos, sin = angles.cos(), angles.sin()

        def turn(t):
            a, b = t.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        for block in self.blocks:
            x = block(x, turn, torch.as_tensor(mask))
        return self.norm(x)


# -- the loss, as in the design ------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Entries by column, float32."""

    logprob: torch.Tensor
    advantage: torch.Tensor
    rl: torch.Tensor
    ce: torch.Tensor
    ref_kl: torch.Tensor
    ref_logprob: torch.Tensor
    kl: torch.Tensor


def terms(logp: torch.Tensor, entries: Batch, counts: dict[str, int]) -> torch.Tensor:
    """w/N times the loss of each component of each entry (DPPO, ce, ref_kl, k3)."""
    lr = logp - torch.where(entries.logprob.isnan(), logp.detach(), entries.logprob)
    ratio, gap = lr.exp(), (logp.exp() - entries.logprob.exp()).detach()
    drop = ((entries.advantage > 0) & (gap > 0.2)) | ((entries.advantage < 0) & (gap < -0.2))
    bracket = torch.where(entries.ref_logprob.isnan(), 0.0, entries.ref_logprob - logp.detach())
    distance = torch.where(entries.ref_logprob.isnan(), 0.0, entries.ref_logprob - logp)
    losses = {
        "kl": distance.exp() - distance - 1,
        "rl": torch.where(drop, 0.0, -entries.advantage * ratio + 1e-3 * lr**2),
        "ce": -logp,
        "ref_kl": -bracket * ratio + 1e-3 * lr**2,
    }
    return torch.stack([getattr(entries, name) / max(1, counts[name]) * losses[name] for name in COMPONENTS])


@dataclass
class Result:
    gradients: dict[str, torch.Tensor]
    loss: float
    size: float  # the sum of |terms|
    tokens: int  # that the model computed, padding included


def train(model: Transformer, steps: Iterable[tuple[torch.Tensor, int]]) -> Result:
    """Gradients summed over steps, each the terms of one row or sequence and its length."""
    model.zero_grad(set_to_none=True)
    loss, size, tokens = 0.0, 0.0, 0
    for step, length in steps:
        step.sum().backward()
        found = step.detach().double()
        loss, size, tokens = loss + float(found.sum()), size + float(found.abs().sum()), tokens + length
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result(gradients, loss, size, tokens)


def train_forest(model: Transformer, rows: Iterable[Forest], counts: dict[str, int]) -> Result:
    def steps():
        for row in rows:
            images = [(item.start, item.stop, item.media.data) for item in row.media]
            hidden = model(row.token_ids, row.position_ids, row.build_attention_mask(), images)
            sources, tokens, own = row.unique_head_inputs()
            logits = model.head(hidden[torch.as_tensor(sources)])
            temperature = torch.as_tensor(row.expand_call_column("temperature"))
            logp = (logits[own] / temperature[:, None]).log_softmax(-1)
            logp = logp.gather(1, torch.as_tensor(tokens).long()[own][:, None])[:, 0]
            columns = {name: torch.as_tensor(getattr(row.targets, name)) for name in Batch.__dataclass_fields__}
            yield terms(logp, Batch(**columns), counts), len(row)

    return train(model, steps())


def train_flat(model: Transformer, attempts: Iterable[Attempt], counts: dict[str, int]) -> Result:
    def steps():
        for attempt in attempts:
            done: set[int] = set()
            for leaf in attempt.leaves():
                path = attempt.path(leaf)
                ids = [token for node in path for token in attempt.nodes[node].tokens]
                images = [
                    (attempt.depth(node) + start, attempt.depth(node) + stop, data)
                    for node in path
                    for start, stop, data in attempt.nodes[node].images
                ]
                rows = [
                    (attempt.depth(note.node) + offset, _logprob(attempt.nodes[note.node], offset), row)
                    for note in attempt.notes
                    if note.node in path and note.node not in done
                    for offset, row in attempt.values(note)
                ]
                done.update(path)
                if rows:
                    causal = np.tri(len(ids), dtype=bool)
                    logits = model.head(model(ids, np.arange(len(ids)), causal, images)) / attempt.temperature
                    places = torch.tensor([place for place, _, _ in rows])
                    logp = logits.log_softmax(-1)[places - 1, torch.tensor(ids)[places]]
                    columns = {name: torch.tensor([row[name] for _, _, row in rows]) for name in rows[0][2]}
                    sampler = torch.tensor([logprob for _, logprob, _ in rows])
                    yield terms(logp, Batch(sampler, **columns), counts), len(ids)

    return train(model, steps())


def _logprob(node: Planned, offset: int) -> float:
    start, stop = node.sampled
    return node.logprobs[offset - start] if start <= offset < stop else np.nan


def assert_equal(forest: Result, flat: Result) -> None:
    """Equal gradients, tensor by tensor, and equal losses."""
    assert forest.gradients.keys() == flat.gradients.keys()
    for name, gradient in flat.gradients.items():
        assert gradient.norm() > 0, name
        error = (forest.gradients[name] - gradient).norm() / gradient.norm()
        assert error <= TOLERANCE, f"{name}: {error}"
    assert abs(forest.loss - flat.loss) <= TOLERANCE * flat.size


def total(forests: Iterable[Forest]) -> dict[str, int]:
    counts = [forest.count_by_component() for forest in forests]
    return {name: sum(count[name] for count in counts) for name in COMPONENTS}


def samples(attempts: Iterable[Attempt]):
    return [attempt.sample() for attempt in attempts]


# -- the cases -----------------------------------------------------------------------------------------------------


def one_branching_trace(rng: Random) -> list[list[Attempt]]:
    """A prompt, eight replies of which half go on: branches within one trace."""
    return [[_attempt(rng, "a", [-1, 0, 0, 0, 1, 1, 4, 4, 4])]]


def several_roots(rng: Random) -> list[list[Attempt]]:
    return [[_attempt(rng, "a", [-1, 0, -1, 2, 2, -1, 5, 0])]]


def merged_group(rng: Random) -> list[list[Attempt]]:
    """Attempts at one prompt; some begin their reply alike."""
    first = _attempt(rng, "a0", [-1, 0, 1, 1])
    attempts = [first]
    for name in ("a1", "a2", "a3"):
        other = _attempt(rng, name, [-1, 0, 1, 1])
        half = first.nodes[1].tokens[:5] + other.nodes[1].tokens[5:]
        attempts.append(replace(other, nodes=(first.nodes[0], replace(other.nodes[1], tokens=half), *other.nodes[2:])))
    return [attempts]


def _attempt(rng: Random, name: str, parents: list[int]) -> Attempt:
    """Roots are prompts, everything else is sampled; advantages, ce and ref_kl are mixed."""
    nodes: list[Planned] = []
    for parent in parents:
        tokens = tuple(rng.randrange(VOCAB) for _ in range(10))
        if parent < 0:
            nodes.append(Planned(-1, tokens))
        else:
            nodes.append(Planned(parent, tokens, (2, 10), tuple(rng.uniform(-5.0, -0.1) for _ in range(8))))
    notes = tuple(
        Annotation(
            name,
            i,
            advantage=rng.choice([-1.0, 0.5, 2.0]),
            ce=rng.choice([0.0, 0.1]),
            ref_kl=0.2,
            ref_logprobs=-3.0,
            kl=0.1,
        )
        for i, parent in enumerate(parents)
        if parent >= 0
    )
    return Attempt(name, tuple(nodes), notes)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", [one_branching_trace, several_roots, merged_group])
def test_forest_gradients_equal_flat_gradients(case, seed):
    model, (attempts,) = Transformer(seed), case(Random(seed))
    forest = build_forest(samples(attempts))
    counts = forest.count_by_component()
    assert min(counts.values()) > 0
    trained, flat = train_forest(model, [forest], counts), train_flat(model, attempts, counts)
    assert_equal(trained, flat)
    assert trained.tokens < forest.flat_tokens <= flat.tokens


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", [one_branching_trace, several_roots, merged_group])
def test_split_forest_gradients_equal_flat_gradients(case, seed):
    model, (attempts,) = Transformer(seed), case(Random(seed))
    forest = build_forest(samples(attempts))
    pieces = split_forest(forest, 45)
    assert len(pieces) > 1
    assert total(pieces) == forest.count_by_component()
    trained, flat = (
        train_forest(model, pieces, forest.count_by_component()),
        train_flat(model, attempts, forest.count_by_component()),
    )
    assert_equal(trained, flat)
    assert forest.num_tokens <= trained.tokens < flat.tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_padded_pack_gradients_equal_flat_gradients(seed):
    rng, model = Random(seed), Transformer(seed)
    attempts = [_attempt(rng, f"a{i}", [-1, 0, 0]) for i in range(6)]
    trees = [build_forest(samples([attempt])) for attempt in attempts]
    rows = pack_trees(trees, 80, pad_to_multiple=32)
    assert max(len(row.traces) for row in rows) > 1
    assert any(len(row) > row.num_tokens for row in rows)
    counts = total(rows)
    assert counts == total(trees)
    assert_equal(train_forest(model, rows, counts), train_flat(model, attempts, counts))


@pytest.mark.parametrize("seed", SEEDS)
def test_split_packed_and_balanced_gradients_equal_flat_gradients(seed):
    """Random groups with images, retries, several roots, context CE and masks: merged, cut, packed, padded."""
    rng, model = Random(seed), Transformer(seed)
    groups = [group(rng, SIZE, f"g{number}-") for number in range(8)]
    forests = [build_forest(samples(attempts)) for attempts in groups]
    pieces = [piece for forest in forests for piece in split_forest(forest, 60)]
    rows = pack_trees(pieces, 100, pad_to_multiple=16)
    assert len(pieces) > len(forests)
    assert len(rows) < len(pieces)
    assert any(len(row) > row.num_tokens for row in rows)
    assert any(row.media for row in rows)
    counts = total(rows)
    assert min(counts.values()) > 0
    flat = train_flat(model, [attempt for each in groups for attempt in each], counts)
    trained = train_forest(model, rows, counts)
    assert_equal(trained, flat)
    assert sum(forest.num_tokens for forest in forests) < sum(forest.flat_tokens for forest in forests) <= flat.tokens
    assert trained.tokens < flat.tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_identical_attempts_double_the_gradient(seed):
    """Bit for bit: both entries of a place add up to twice one before anything is rounded."""
    model, attempt = Transformer(seed), _attempt(Random(seed), "a", [-1, 0, 0, 1])
    twin = replace(attempt, name="b", notes=tuple(replace(note, trace_id="b") for note in attempt.notes))
    alone, both = build_forest(samples([attempt])), build_forest(samples([attempt, twin]))
    assert len(both) == len(alone)
    assert both.count_by_component() == {name: 2 * count for name, count in alone.count_by_component().items()}
    one, two = (train_forest(model, [forest], alone.count_by_component()) for forest in (alone, both))
    for name, gradient in one.gradients.items():
        assert torch.equal(two.gradients[name], 2 * gradient), name
    assert two.loss == pytest.approx(2 * one.loss, rel=0, abs=1e-12 * one.size)


def test_dppo_drops_some_entries():
    """The cases above would not notice a mask that differs if none ever did anything."""
    model, (attempts,) = Transformer(0), merged_group(Random(0))
    forest = build_forest(samples(attempts))
    with torch.no_grad():
        hidden = model(forest.token_ids, forest.position_ids, forest.build_attention_mask())
        logits = model.head(hidden[torch.as_tensor(forest.targets.logits_index)])
    p = logits.softmax(-1).gather(1, torch.as_tensor(forest.targets.token).long()[:, None])[:, 0].numpy()
    far = p - np.exp(forest.targets.logprob) < -0.2
    assert 0 < np.count_nonzero(far & (forest.targets.advantage < 0)) < len(far)
