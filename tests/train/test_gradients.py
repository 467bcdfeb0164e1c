"""Training on a forest gives the gradients of training on its paths one by one."""

from copy import deepcopy
from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import Gemma2Config, GptOssConfig, MixtralConfig, OPTConfig, Phi3Config

from ramify.core.errors import ModelUnsupported
from ramify.model.pack_layout import PackLayout
from ramify.model.precision import cpu_has_bfloat16
from ramify.trace import build_forest
from ramify.train import Batch, Trainer, TrainerConfig, pack_forests
from tests.support.forests import Attempt, Size, group
from tests.support.runs import FULL
from tests.support.training import (
    CONFIGS,
    HYBRIDS,
    SEQUENTIAL,
    SIZES,
    VOCAB,
    assert_same_gradients,
    build_attempt,
    build_group,
    build_model,
    build_policy,
    count_entries,
    train_flat,
    train_forest,
)

SEEDS = range(10 if FULL else 1)
SIZE = Size(traces=4, nodes=8, fewest=5, tokens=16, vocab=VOCAB, logprobs=(-5.0, -0.1))
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def without_images(attempt: Attempt) -> Attempt:
    return replace(attempt, nodes=tuple(replace(node, images=()) for node in attempt.nodes))


CASES = {
    "branches": lambda rng: [build_attempt(rng, "a", [-1, 0, 0, 0, 1, 1, 4, 4, 4])],
    "roots": lambda rng: [build_attempt(rng, "a", [-1, 0, -1, 2, 2, -1, 5, 0])],
    "merged": lambda rng: build_group(rng, 4, [-1, 0, 1, 1]),
    "long": lambda rng: build_group(rng, 3, [-1, 0, 1, 0], tokens=50),  # long enough for tiles of their own
}


# Random groups below are trained with every shape.
SHAPED_CASES = [(shape, case) for shape in CONFIGS for case in CASES if FULL or shape == "mixed"]


@pytest.mark.promise
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("shape", "case"), SHAPED_CASES)
def test_a_forest_and_its_packs_give_the_flat_gradients(shape, case, seed):
    config = CONFIGS[shape]
    policy, model = build_policy(config, seed), build_model(config, "eager", seed)
    attempts = CASES[case](Random(seed))
    forest = build_forest([attempt.sample() for attempt in attempts])
    counts = forest.count_by_component()
    flat = train_flat(model, attempts, counts)
    result = train_forest(policy, [forest], counts)
    assert_same_gradients(result, flat)
    assert result.tokens == len(forest) < flat.tokens
    packs = pack_forests([forest], len(forest) // 2)
    assert len(packs) > 1
    assert_same_gradients(train_forest(policy, packs, counts), flat)


NOISY_CONFIGS = {
    "dropout": OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        enable_bias=False,  # the gradient of the keys' bias is only rounding errors
    ),
    "router": MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.3),
}


@pytest.mark.parametrize("noise", NOISY_CONFIGS)
def test_dropout_and_router_noise_are_disabled(noise):
    config = NOISY_CONFIGS[noise]
    attempts = CASES["branches"](Random(0))
    forest = build_forest([attempt.sample() for attempt in attempts])
    counts = forest.count_by_component()
    model = build_model(config, "eager").eval()
    assert_same_gradients(train_forest(build_policy(config), [forest], counts), train_flat(model, attempts, counts))


SMALL = {"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2, "initializer_range": 0.1}
SMALL |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
PUBLISHED_CONFIGS = {  # the attention of gpt-oss-20b and Gemma 2 with fewer heads and layers
    "gpt-oss": GptOssConfig(
        **SMALL,
        intermediate_size=128,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=128,
        num_local_experts=8,
        num_experts_per_tok=4,
    ),
    "gemma-2": Gemma2Config(
        **SMALL,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        sliding_window=128,
        query_pre_attn_scalar=256,
    ),
}


@pytest.mark.promise
@pytest.mark.full("two minutes")
@pytest.mark.parametrize("shape", PUBLISHED_CONFIGS)
def test_with_published_attention_a_forest_is_as_near_to_float64_as_flat_paths(shape):
    config, errors = PUBLISHED_CONFIGS[shape], {True: 0.0, False: 0.0}
    for seed in range(12):
        attempts = build_group(Random(seed), 4, [-1, 0, 1, 0, 2], tokens=90)
        attempts.append(build_attempt(Random(seed), "r", [-1, 0, -1, 2, 2, -1, 5, 0], tokens=60))
        forest = build_forest([attempt.sample() for attempt in attempts])
        counts = forest.count_by_component()
        exact_model = build_model(config, "eager", seed).double()
        if shape == "gpt-oss":
            exact_model.set_experts_implementation("eager")  # which computes in float64
        exact = train_flat(exact_model, attempts, counts).gradients
        policy = build_policy(config, seed)
        for flat in errors:
            result = train_forest(policy, pack_forests([forest], 400, flat=flat), counts)
            errors[flat] += sum(
                float((result.gradients[name] - exact[name]).norm() / exact[name].norm()) for name in exact
            )
            if not flat:
                assert_same_gradients(result, train_flat(build_model(config, "eager", seed), attempts, counts), 3e-5)
    assert errors[False] <= 1.05 * errors[True]


def test_positions_beyond_the_longrope_limit_are_refused():
    factors = [1.0 + index for index in range(6)]  # one for each rotated pair of a head
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 30,
    }
    module = build_policy(Phi3Config(**SIZES, original_max_position_embeddings=30, rope_parameters=rope))
    short, long = (build_forest([build_attempt(Random(0), "a", [-1, 0], tokens=size).sample()]) for size in (10, 20))
    train_forest(module, [short], short.count_by_component())
    with pytest.raises(ModelUnsupported, match="longrope"):
        train_forest(module, [long], long.count_by_component())


@pytest.mark.promise
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", CONFIGS)
def test_packs_of_random_groups_give_the_flat_gradients(shape, seed):
    rng, config = Random(seed), CONFIGS[shape]
    groups = [
        [without_images(attempt) for attempt in group(rng, SIZE, f"g{index}-")] for index in range(4 if FULL else 2)
    ]
    groups.append(build_group(rng, 3, [-1, 0, 1, 0]))  # several temperatures in one pack
    forests = [build_forest([attempt.sample() for attempt in attempts]) for attempts in groups]
    packs = pack_forests(forests, 150)
    assert len(packs) > 1
    assert any(sum(not set(pack.traces).isdisjoint(forest.traces) for forest in forests) > 1 for pack in packs)
    counts = count_entries(packs)
    assert counts == count_entries(forests)
    assert min(counts.values()) > 0
    attempts = [attempt for members in groups for attempt in members]
    flat = train_flat(build_model(config, "eager", seed), attempts, counts)
    policy = build_policy(config, seed)
    assert_same_gradients(train_forest(policy, packs, counts), flat)
    flat_packs = pack_forests(forests, 150, flat=True)
    assert sum(map(len, flat_packs)) > sum(map(len, packs))
    assert_same_gradients(train_forest(policy, flat_packs, counts), flat)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", CONFIGS | HYBRIDS if FULL else ["llama"])
def test_in_bfloat16_a_forest_is_as_accurate_as_flat_paths(shape, device):
    """Shared tokens are rounded once and not in every copy: on average neither better nor worse."""
    if device == "cpu" and not cpu_has_bfloat16():
        pytest.skip("this CPU emulates bfloat16: the test would take minutes")
    module = build_policy((CONFIGS | HYBRIDS)[shape]).to(device)
    for weight in module.parameters():
        weight.data = weight.data.bfloat16().float()  # so that both dtypes hold the same weights
    exact, rounded = (
        Trainer(policy, TrainerConfig(pack_tokens=2048), dtype=dtype)
        for policy, dtype in ((module, torch.float32), (deepcopy(module), torch.bfloat16))
    )
    errors = {True: 0.0, False: 0.0}
    for seed in range(4):
        rng = Random(seed)
        groups = [build_group(rng, 6, [-1, 0, 1, 1], tokens=40)]
        groups.append([build_attempt(rng, "r", [-1, 0, -1, 2, 2, -1, 5, 0], tokens=30)])
        groups += [[without_images(attempt) for attempt in group(rng, SIZE, f"g{index}-")] for index in range(6)]
        forests = [build_forest([attempt.sample() for attempt in attempts]) for attempts in groups]
        exact_gradient = compute_gradient(exact, pack_forests(forests, 2048, flat=True))
        for flat in errors:
            gradients = [compute_gradient(rounded, pack_forests(forests, size, flat=flat)) for size in (2048, 300)]
            distances = [(gradient - exact_gradient).norm() / exact_gradient.norm() for gradient in gradients]
            errors[flat] += float(sum(distances))
    assert errors[False] <= 1.05 * errors[True]


def compute_gradient(trainer: Trainer, packs) -> torch.Tensor:
    """Return the gradient of all weights for a batch of these packs."""
    trainer.forward_backward(Batch.from_packs(0, packs))
    return torch.cat([gradient.float().flatten() for gradient in trainer.master_weights.gradients().values()])


@pytest.mark.parametrize("shape", CONFIGS)
def test_two_identical_attempts_give_exactly_twice_the_gradient_of_one(shape):
    """Exact, because the two entries of a token add up before anything is rounded."""
    one = build_attempt(Random(0), "a", [-1, 0, 0, 1])
    twin = replace(one, name="b", notes=tuple(replace(note, trace_id="b") for note in one.notes))
    alone, both = build_forest([one.sample()]), build_forest([one.sample(), twin.sample()])
    assert len(both) == len(alone)
    module = build_policy(CONFIGS[shape])
    single, double = (train_forest(module, [forest], alone.count_by_component()) for forest in (alone, both))
    for name, gradient in single.gradients.items():
        assert torch.equal(double.gradients[name], 2 * gradient), name


@pytest.mark.parametrize("seed", SEEDS)
def test_a_model_with_unknown_recurrent_layers_gets_chains_with_the_flat_gradients(seed):
    policy, model = build_policy(SEQUENTIAL, seed), build_model(SEQUENTIAL, "eager", seed)
    assert policy.layout is PackLayout.CHAINS
    parents = {"a": [-1, 0, 0, 0, 1, 1, 4], "b": [-1, 0, 1]}
    attempts = [build_attempt(Random(seed + i), name, nodes) for i, (name, nodes) in enumerate(parents.items())]
    forests = [build_forest([attempt.sample()]) for attempt in attempts]
    packs = pack_forests(forests, 120, PackLayout.CHAINS)
    assert len(packs) > 1
    counts = count_entries(packs)
    assert_same_gradients(train_forest(policy, packs, counts), train_flat(model, attempts, counts))
