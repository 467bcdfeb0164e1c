"""Recurrent layers give a forest the gradients of its paths, one by one in transformers' own code."""

from random import Random

import pytest
import torch
from torch.overrides import TorchFunctionMode

from ramify.model.lora import add_adapters
from ramify.trace import Forest, build_forest, concat_forests, make_padding_forest
from ramify.train import pack_forests
from ramify.train.recompute import recompute_layers
from tests.support.forests import Attempt
from tests.support.runs import FULL
from tests.support.training import (
    HYBRIDS,
    MAMBA2_HYBRIDS,
    TrainResult,
    assert_same_gradients,
    build_attempt,
    build_group,
    build_model,
    build_policy,
    count_entries,
    get_gradients,
    train_flat,
    train_forest,
)

pytestmark = pytest.mark.promise

TOLERANCE = 3e-5
HEADS = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
MROPE = {**ROPE, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
PUBLISHED_HEADS = {  # of the config.json of Qwen3.5-4B and -9B, of Qwen3-Next-80B-A3B, and of granite-4.0-h-tiny
    "qwen3_5": {**HEADS, "num_key_value_heads": 4, "rope_parameters": MROPE},
    "qwen3_next": {**HEADS, "num_key_value_heads": 2, "rope_parameters": ROPE},
    "granitemoehybrid": {"mamba_n_heads": 3, "mamba_expand": 4, "mamba_d_head": 64, "mamba_d_state": 128}
    | {"mamba_n_groups": 1, "mamba_chunk_size": 256},
}
CASES = {
    "branches": lambda rng: [build_attempt(rng, "a", [-1, 0, 0, 0, 1, 1, 4, 4, 4])],
    "roots": lambda rng: [build_attempt(rng, "a", [-1, 0, -1, 2, 2, -1, 5, 0], tokens=3)],  # shorter than convolutions
    "group": lambda rng: build_group(rng, 2, [-1, 0, 1, 0], tokens=50),
}
DELTA_RULE_MARKS = pytest.mark.full("has the delta rule of qwen3_5")


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        pytest.param(shape, case, marks=DELTA_RULE_MARKS if case != "group" else [])
        if shape in ("qwen3_next", "olmo_hybrid")
        else (shape, case)
        for shape in HYBRIDS
        for case in CASES
    ],
)
def test_a_forest_and_its_packs_give_the_flat_gradients(shape, case):
    attempts = CASES[case](Random(2))
    forest = build_forest([attempt.sample() for attempt in attempts])
    counts = forest.count_by_component()
    policy = build_policy(HYBRIDS[shape])
    flat = train_flat(build_model(HYBRIDS[shape], "eager"), attempts, counts)
    padded = concat_forests([forest, make_padding_forest(7)])
    assert_same_gradients(train_forest(policy, [padded], counts), flat, TOLERANCE)
    packs = pack_forests([forest], len(forest) // 2)
    assert len(packs) > 1
    assert_same_gradients(train_forest(policy, packs, counts), flat, TOLERANCE)
    recompute_layers(policy.model, 2)
    flat_packs = pack_forests([forest], 200, flat=True)
    assert_same_gradients(train_forest(policy, flat_packs, counts), flat, TOLERANCE)


@pytest.mark.full("have the Mamba-2 layers of granitemoehybrid")
@pytest.mark.parametrize("shape", MAMBA2_HYBRIDS)
def test_other_models_with_mamba2_get_the_flat_gradients(shape):
    attempts = CASES["group"](Random(2))
    forest = build_forest([attempt.sample() for attempt in attempts])
    counts = forest.count_by_component()
    flat = train_flat(build_model(MAMBA2_HYBRIDS[shape], "eager"), attempts, counts)
    policy = build_policy(MAMBA2_HYBRIDS[shape])
    assert_same_gradients(train_forest(policy, [forest], counts), flat, TOLERANCE)
    assert_same_gradients(train_forest(policy, pack_forests([forest], len(forest) // 2), counts), flat, TOLERANCE)


@pytest.mark.full("wide heads")
@pytest.mark.parametrize("shape", PUBLISHED_HEADS)
def test_heads_as_published_give_the_flat_gradients(shape):
    config = HYBRIDS[shape].__class__(**HYBRIDS[shape].to_dict() | PUBLISHED_HEADS[shape])
    attempts = CASES["group"](Random(2))
    forest = build_forest([attempt.sample() for attempt in attempts])
    counts = forest.count_by_component()
    policy = build_policy(config)
    flat = train_flat(build_model(config, "eager"), attempts, counts)
    assert_same_gradients(train_forest(policy, [forest], counts), flat, TOLERANCE)
    packs = pack_forests([forest], len(forest) // 2)
    assert_same_gradients(train_forest(policy, packs, counts), flat, TOLERANCE)


@pytest.mark.parametrize("shape", ["qwen3_5", "lfm2"])
def test_a_pack_of_several_groups_gives_the_flat_gradients(shape):
    groups = [build_group(Random(seed), 2, [-1, 0, 1, 0], tokens=9 + seed) for seed in range(3)]
    forests = [build_forest([attempt.sample() for attempt in group]) for group in groups]
    packs = pack_forests(forests, 200)
    assert len(packs) < len(groups)
    counts = count_entries(forests)
    attempts = [attempt for group in groups for attempt in group]
    flat = train_flat(build_model(HYBRIDS[shape], "eager"), attempts, counts)
    assert_same_gradients(train_forest(build_policy(HYBRIDS[shape]), packs, counts), flat, TOLERANCE)


@pytest.mark.parametrize("shape", HYBRIDS)
def test_adapters_in_recurrent_layers_get_the_gradients_of_flat_packs(shape):
    policy = build_policy(HYBRIDS[shape])
    add_adapters(policy.model, 4, 8.0, [])
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    forest = build_forest([attempt.sample() for attempt in CASES["group"](Random(0))])
    counts = forest.count_by_component()
    flat = train_forest(policy, pack_forests([forest], 1000, flat=True), counts)
    trained = {name.split(".")[3] for name in flat.gradients}
    assert {{"lfm2": "conv", "granitemoehybrid": "mamba"}.get(shape, "linear_attn")} < trained
    flat.abs_loss = abs(flat.loss)
    assert_same_gradients(train_forest(policy, [forest], counts), flat, TOLERANCE)


class Float64Mode(TorchFunctionMode):
    """Computes in float64 what code computes in float32 whatever the dtype of its inputs is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if value is torch.float32 else value for value in args]
        wide = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **wide)


def train_in_float64(model, attempts: list[Attempt], counts: dict[str, int]) -> TrainResult:
    """Train every path by itself in transformers' own code, with all of it in float64."""
    model.set_experts_implementation("eager")  # grouped products have no float64
    with Float64Mode():
        return train_flat(model.double(), attempts, counts)


@pytest.mark.parametrize(
    "shape",
    [
        "qwen3_5",
        pytest.param("qwen3_next", marks=DELTA_RULE_MARKS),
        pytest.param("olmo_hybrid", marks=DELTA_RULE_MARKS),
        "granitemoehybrid",
        pytest.param("lfm2", marks=pytest.mark.full("sums three tokens, so that errors do not grow")),
    ],
)
def test_a_forest_is_as_near_to_float64_as_flat_paths(shape):
    errors = {"forest": 0.0, "flat": 0.0}
    for seed in range(60 if FULL else 3):  # of one seed, errors differ by a fifth
        attempts = build_group(Random(seed), 2, [-1, 0, 1, 0], tokens=40)
        forest = build_forest([attempt.sample() for attempt in attempts])
        counts = forest.count_by_component()
        policy, model = build_policy(HYBRIDS[shape], seed), build_model(HYBRIDS[shape], "eager", seed)
        results = {
            "forest": train_forest(policy, [forest], counts),
            "flat": train_forest(policy, pack_forests([forest], len(forest), flat=True), counts),
        }
        exact = train_in_float64(model, attempts, counts).gradients
        for kind, result in results.items():
            errors[kind] += measure_error(result, exact)
    assert errors["forest"] <= (1.05 if FULL else 1.2) * errors["flat"]


def measure_error(result: TrainResult, exact: dict[str, torch.Tensor]) -> float:
    """Return the error of the gradient of all weights together."""
    assert {gradient.dtype for gradient in exact.values()} == {torch.float64}
    squares = sum(float((result.gradients[name] - gradient).square().sum()) for name, gradient in exact.items())
    return (squares / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5


def test_layers_of_a_kind_share_a_class_so_that_they_share_compiled_code():
    policies = [build_policy(HYBRIDS["qwen3_5"], seed) for seed in range(2)]
    layers = [layer.linear_attn for policy in policies for layer in policy.layers if hasattr(layer, "linear_attn")]
    assert len(layers) == 4
    assert len({type(layer) for layer in layers}) == 1


def build_deep_forest(turns: int) -> tuple[list[Attempt], Forest]:
    """Build what an agent of many turns leaves behind: a branch in each of them."""
    parents = [-1, *(2 * ((node - 1) // 2) for node in range(1, 2 * turns))]
    attempts = [build_attempt(Random(0), "a", parents, tokens=4)]
    forest = build_forest([attempt.sample() for attempt in attempts])
    levels: list[int] = []
    for parent in forest.segments["parent"].tolist():
        levels.append(levels[parent] + 1 if parent >= 0 else 1)
    assert max(levels) == turns
    return attempts, forest


def test_a_forest_of_many_levels_gives_the_gradients_of_flat_packs():
    _, forest = build_deep_forest(20)
    counts = forest.count_by_component()
    policy = build_policy(HYBRIDS["qwen3_5"])
    flat = train_forest(policy, pack_forests([forest], 2000, flat=True), counts)
    flat.abs_loss = abs(flat.loss)
    assert_same_gradients(train_forest(policy, [forest], counts), flat, TOLERANCE)
    assert get_gradients(policy.model).keys() == flat.gradients.keys()


@pytest.mark.full("many long paths, one by one")
@pytest.mark.parametrize("shape", HYBRIDS)
def test_a_forest_of_120_levels_gives_the_flat_gradients(shape):
    attempts, forest = build_deep_forest(120)
    counts = forest.count_by_component()
    flat = train_in_float64(build_model(HYBRIDS[shape], "eager"), attempts, counts)  # float32 is off by up to 6e-5
    assert_same_gradients(train_forest(build_policy(HYBRIDS[shape]), [forest], counts), flat, TOLERANCE)
