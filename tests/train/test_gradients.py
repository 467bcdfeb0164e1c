"""Through the real model path, a forest gives the gradients of its flat paths."""

import os
from copy import deepcopy
from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import MixtralConfig, OPTConfig, Phi3Config

from ramify.errors import ModelUnsupported
from ramify.model.pack_layout import PackLayout
from ramify.model.precision import cpu_has_bfloat16
from ramify.trace import Annotation, build_forest
from ramify.train import Batch, Trainer, TrainerConfig, pack_forests
from tests.trace.forests import Attempt, Planned, Size, group
from tests.train.models import (
    CONFIGS,
    HYBRID,
    SIZES,
    VOCAB,
    assert_equal,
    made,
    policy,
    total,
    train_flat,
    train_forest,
)

SEEDS = range(10 if os.environ.get("RAMIFY_FULL") else 1)
SIZE = Size(traces=4, nodes=8, fewest=5, tokens=16, vocab=VOCAB, logprobs=(-5.0, -0.1))
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def attempt(rng: Random, name: str, parents: list[int], temperature: float = 1.0, tokens: int = 10) -> Attempt:
    """Roots are prompts, everything else is sampled; advantages, ce and (at temperature 1) ref_kl are mixed."""
    nodes: list[Planned] = []
    for parent in parents:
        ids = tuple(rng.randrange(VOCAB) for _ in range(tokens))
        logprobs = tuple(rng.uniform(-5.0, -0.1) for _ in range(tokens - 2))
        nodes.append(Planned(parent, ids) if parent < 0 else Planned(parent, ids, (2, tokens), logprobs))
    notes = tuple(
        Annotation(
            name,
            number,
            advantage=rng.choice([-1.0, 0.5, 2.0]),
            ce=rng.choice([0.0, 0.1]),
            ref_kl=0.2 if temperature == 1 else 0.0,
            ref_logprobs=-3.0,
        )
        for number, parent in enumerate(parents)
        if parent >= 0
    )
    return Attempt(name, tuple(nodes), notes, temperature)


def merged(rng: Random, count: int, parents: list[int], tokens: int = 10) -> list[Attempt]:
    """Attempts at one prompt; all begin their reply alike, and differ in temperature."""
    first = attempt(rng, "a0", parents, tokens=tokens)
    found = [first]
    for number in range(1, count):
        other = attempt(rng, f"a{number}", parents, (1.0, 0.7)[number % 2], tokens)
        half = first.nodes[1].tokens[: tokens // 2] + other.nodes[1].tokens[tokens // 2 :]
        found.append(replace(other, nodes=(first.nodes[0], replace(other.nodes[1], tokens=half), *other.nodes[2:])))
    return found


def without_images(planned: Attempt) -> Attempt:
    return replace(planned, nodes=tuple(replace(node, images=()) for node in planned.nodes))


CASES = {
    "branches": lambda rng: [[attempt(rng, "a", [-1, 0, 0, 0, 1, 1, 4, 4, 4])]],
    "roots": lambda rng: [[attempt(rng, "a", [-1, 0, -1, 2, 2, -1, 5, 0])]],
    "merged": lambda rng: [merged(rng, 4, [-1, 0, 1, 1])],
    "long": lambda rng: [merged(rng, 3, [-1, 0, 1, 0], tokens=50)],  # runs that are tiles of their own
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", CONFIGS)
def test_a_forest_whole_and_cut_gives_the_flat_gradients(shape, case, seed):
    config = CONFIGS[shape]
    ours, plain = policy(config, seed), made(config, "eager", seed)
    (attempts,) = CASES[case](Random(seed))
    forest = build_forest([each.sample() for each in attempts])
    counts = forest.count_by_component()
    flat = train_flat(plain, attempts, counts)
    whole = train_forest(ours, [forest], counts)
    assert_equal(whole, flat)
    assert whole.tokens == len(forest) < flat.tokens
    pieces = pack_forests([forest], len(forest) // 2)
    assert len(pieces) > 1
    assert_equal(train_forest(ours, pieces, counts), flat)


NOISY = {
    "dropout": OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        enable_bias=False,  # that of keys has no gradient but what rounding leaves
    ),
    "router": MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.3),
}


@pytest.mark.parametrize("noise", NOISY)
def test_a_policy_has_no_noise_of_its_own(noise):
    config = NOISY[noise]
    (attempts,) = CASES["branches"](Random(0))
    forest = build_forest([each.sample() for each in attempts])
    counts = forest.count_by_component()
    plain = made(config, "eager").eval()
    assert_equal(train_forest(policy(config), [forest], counts), train_flat(plain, attempts, counts))


def test_longrope_is_refused_where_a_row_would_turn_all_its_tokens_by_other_angles():
    factors = [1.0 + number for number in range(6)]  # of half a head
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 30,
    }
    module = policy(Phi3Config(**SIZES, original_max_position_embeddings=30, rope_parameters=rope))
    short, long = (build_forest([attempt(Random(0), "a", [-1, 0], tokens=size).sample()]) for size in (10, 20))
    train_forest(module, [short], short.count_by_component())
    with pytest.raises(ModelUnsupported, match="longrope"):
        train_forest(module, [long], long.count_by_component())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", CONFIGS)
def test_random_groups_merged_cut_and_packed_give_the_flat_gradients(shape, seed):
    rng, config = Random(seed), CONFIGS[shape]
    groups = [[without_images(each) for each in group(rng, SIZE, f"g{number}-")] for number in range(6)]
    groups.append(merged(rng, 3, [-1, 0, 1, 0]))  # several temperatures in one pack
    forests = [build_forest([each.sample() for each in attempts]) for attempts in groups]
    packs = pack_forests(forests, 150)
    assert len(packs) > 1
    assert any(len(pack.traces) > len(groups[0]) for pack in packs)
    counts = total(packs)
    assert counts == total(forests)
    assert min(counts.values()) > 0
    flat = train_flat(made(config, "eager", seed), [each for attempts in groups for each in attempts], counts)
    ours = policy(config, seed)
    assert_equal(train_forest(ours, packs, counts), flat)
    spread = pack_forests(forests, 150, flat=True)
    assert sum(map(len, spread)) > sum(map(len, packs))
    assert_equal(train_forest(ours, spread, counts), flat)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", CONFIGS)
def test_in_bfloat16_a_forest_is_as_near_to_float32_as_flat_paths_are(shape, device):
    """What is shared is rounded once instead of in every copy, which is neither better nor worse: on average, as one
    batch may be a tenth nearer or further."""
    if device == "cpu" and not cpu_has_bfloat16():
        pytest.skip("this CPU emulates bfloat16: the test would take minutes")
    module = policy(CONFIGS[shape]).to(device)
    for weight in module.parameters():
        weight.data = weight.data.bfloat16().float()  # one model, in whatever it computes
    exact, rounded = (
        Trainer(each, TrainerConfig(pack_tokens=2048), dtype=dtype)
        for each, dtype in ((module, torch.float32), (deepcopy(module), torch.bfloat16))
    )
    off = {True: 0.0, False: 0.0}
    for seed in range(4):
        rng = Random(seed)
        groups = [merged(rng, 6, [-1, 0, 1, 1], tokens=40), [attempt(rng, "r", [-1, 0, -1, 2, 2, -1, 5, 0], tokens=30)]]
        groups += [[without_images(each) for each in group(rng, SIZE, f"g{number}-")] for number in range(6)]
        forests = [build_forest([each.sample() for each in attempts]) for attempts in groups]
        truth = gradient(exact, pack_forests(forests, 2048, flat=True))
        for flat in off:
            found = [gradient(rounded, pack_forests(forests, size, flat=flat)) for size in (2048, 300)]
            off[flat] += sum(float((each - truth).norm() / truth.norm()) for each in found)
    assert off[False] <= 1.05 * off[True]


def gradient(trainer: Trainer, packs) -> torch.Tensor:
    """Of all weights, of a batch of these packs."""
    trainer.forward_backward(Batch.from_packs(0, packs))
    trainer.master_weights.upcast_gradients()
    return torch.cat(
        [master.grad.flatten() for master in trainer.master_weights.parameters() if master.grad is not None]
    )


@pytest.mark.parametrize("shape", CONFIGS)
def test_identical_attempts_give_exactly_twice_the_gradient_of_one(shape):
    """Bit for bit: both entries of a place add up to twice one before anything is rounded."""
    one = attempt(Random(0), "a", [-1, 0, 0, 1])
    twin = replace(one, name="b", notes=tuple(replace(note, trace_id="b") for note in one.notes))
    alone, both = build_forest([one.sample()]), build_forest([one.sample(), twin.sample()])
    assert len(both) == len(alone)
    module = policy(CONFIGS[shape])
    single, double = (train_forest(module, [forest], alone.count_by_component()) for forest in (alone, both))
    for name, gradient in single.gradients.items():
        assert torch.equal(double.gradients[name], 2 * gradient), name


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hybrid_model_gets_chains_with_the_flat_gradients(seed):
    ours, plain = policy(HYBRID, seed), made(HYBRID, "eager", seed)
    assert ours.layout is PackLayout.CHAINS
    attempts = [attempt(Random(seed), "a", [-1, 0, 0, 0, 1, 1, 4]), attempt(Random(seed + 1), "b", [-1, 0, 1])]
    forests = [build_forest([each.sample()]) for each in attempts]
    packs = pack_forests(forests, 120, PackLayout.CHAINS)
    assert len(packs) > 1
    counts = total(packs)
    assert_equal(train_forest(ours, packs, counts), train_flat(plain, attempts, counts))


@pytest.mark.parametrize("shape", ["llama", "mixed"])
def test_recomputed_activations_change_nothing(shape):
    forest = build_forest([each.sample() for each in merged(Random(0), 3, [-1, 0, 1])])
    module = policy(CONFIGS[shape])
    before = train_forest(module, [forest], forest.count_by_component())
    module.model.gradient_checkpointing_enable({"use_reentrant": False})
    after = train_forest(module, [forest], forest.count_by_component())
    for name, gradient in before.gradients.items():
        assert torch.equal(after.gradients[name], gradient), name
