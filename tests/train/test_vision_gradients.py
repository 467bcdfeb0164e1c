"""Training on a forest with images gives the gradients of its paths, run one by one through plain transformers."""

from dataclasses import replace
from random import Random

import pytest
import torch

from ramify.core.errors import ConfigInvalid, ModelUnsupported
from ramify.model.lora import add_adapters
from ramify.model.pack_layout import PackLayout
from ramify.trace import build_forest
from ramify.train import Batch, Trainer, TrainerConfig, load_loss, pack_forests
from ramify.train.build import freeze_vision_tower
from ramify.train.model_inputs import build_model_inputs
from ramify.train.policy_model import PolicyModel, get_attention_name
from tests.support.forests import Attempt
from tests.support.models import FAMILIES, build_image_inputs, build_vision_model, draw_image_run, load_image
from tests.support.runs import FULL
from tests.support.training import (
    CONFIGS,
    TrainResult,
    assert_same_gradients,
    build_attempt,
    build_policy,
    count_entries,
    get_gradients,
    train_flat,
)

SEEDS = range(10 if FULL else 1)


def add_images(rng: Random, family: str, attempt: Attempt, images: dict[int, bytes]) -> Attempt:
    """Let some nodes be messages with an image, which nobody sampled."""
    nodes = list(attempt.nodes)
    for node, data in images.items():
        tokens, run = draw_image_run(rng, family, data)
        nodes[node] = replace(nodes[node], tokens=tuple(tokens), sampled=(0, 0), logprobs=(), images=(run,))
    notes = tuple(note for note in attempt.notes if note.node not in images)
    return replace(attempt, nodes=tuple(nodes), notes=notes)


def share_prompt(attempts: list[Attempt], num_nodes: int) -> list[Attempt]:
    """Give all attempts the first nodes of the first one."""
    return [replace(attempt, nodes=attempts[0].nodes[:num_nodes] + attempt.nodes[num_nodes:]) for attempt in attempts]


def shared_image(rng: Random, family: str) -> list[Attempt]:
    """Attempts at one prompt that ends with an image."""
    attempts = [build_attempt(rng, f"a{index}", [-1, 0, 1, 2]) for index in range(4)]
    return share_prompt([add_images(rng, family, attempt, {1: b"shared"}) for attempt in attempts], 2)


def forked_between_images(rng: Random, family: str) -> list[Attempt]:
    """Attempts that share one image and then see different ones, some of them the first one again; 7 is a fork."""
    parents = [-1, 0, 1, 2, 3, 4, 5, 2, 7]
    attempts = [
        add_images(rng, family, build_attempt(rng, f"a{index}", parents), {1: b"first", 3: data, 5: b"last"})
        for index, data in enumerate((b"left", b"right", b"first"))
    ]
    return share_prompt(attempts, 2)


CASES = {"shared": shared_image, "forked": forked_between_images}


def build_vision_policy(family: str, seed: int = 0) -> PolicyModel:
    model = build_vision_model(family, get_attention_name(PackLayout.FOREST) or "", seed)
    return PolicyModel(model, PackLayout.FOREST, load_loss("dppo"))


def build_trainer(family: str, policy: PolicyModel, **settings) -> Trainer:
    return Trainer(policy, TrainerConfig(**settings), load_image=load_image(family))


def train(trainer: Trainer, packs, counts) -> TrainResult:
    accumulator = trainer.forward_backward(Batch(0, packs, counts))
    sums = accumulator.to_sums(accumulator.flatten_device_values(trainer.device).tolist())
    gradients = get_gradients(trainer.policy.model)
    return TrainResult(gradients, sum(sums.component_losses.values()), 0.0, sums.tokens)


@pytest.mark.promise
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("case", "frozen"),
    [
        ("forked", False),
        ("forked", True),
        pytest.param("shared", False, marks=pytest.mark.full("an image is also shared in `forked`")),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forest_with_images_gives_the_flat_gradients(family, case, frozen, seed):
    attempts = CASES[case](Random(seed), family)
    forest = build_forest([attempt.sample() for attempt in attempts])
    counts = forest.count_by_component()
    model = build_vision_model(family, "eager", seed)
    policy = build_vision_policy(family, seed)
    if frozen:
        freeze_vision_tower(policy)
        assert not policy.tower.is_trained
        names = {name for name, weight in policy.model.named_parameters() if not weight.requires_grad}
        assert names
        assert all(policy.tower.contains_weight(name) for name in names)
        for name, weight in model.named_parameters():
            weight.requires_grad_(name not in names)
    flat = train_flat(model, attempts, counts, build_image_inputs(family))
    trainer = build_trainer(family, policy)
    assert_same_gradients(train(trainer, [forest], counts), flat)
    packs = pack_forests([forest], len(forest) // 2)
    assert len(packs) > 1
    assert_same_gradients(train(trainer, packs, counts), flat)
    assert_same_gradients(train(trainer, pack_forests([forest], 64, flat=True), counts), flat)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_encodes_each_image_once(family, monkeypatch):
    groups = [shared_image(Random(seed), family) for seed in range(3)]  # three groups with the same image
    groups.append(forked_between_images(Random(3), family))
    forests = [
        build_forest(
            [
                replace(
                    attempt,
                    name=f"{number}-{attempt.name}",
                    notes=tuple(replace(note, trace_id=f"{number}-{attempt.name}") for note in attempt.notes),
                ).sample()
                for attempt in group
            ]
        )
        for number, group in enumerate(groups)
    ]
    packs = pack_forests(forests, 64)
    assert len(packs) > 3
    trainer = build_trainer(family, build_vision_policy(family))
    encoded: list[str] = []
    encode = trainer.policy.tower.encode
    monkeypatch.setattr(
        trainer.policy.tower,
        "encode",
        lambda images: (encoded.extend(image.hash for image in images), encode(images))[1],
    )
    metrics = trainer.step(Batch(0, packs, count_entries(packs)))
    assert len(encoded) == len(set(encoded)) == 5
    assert metrics.to_dict()["forest/images"] == 5
    assert metrics.grad_norm > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_carries_exactly_the_images_whose_placeholders_it_holds(family):
    forest = build_forest([attempt.sample() for attempt in forked_between_images(Random(0), family)])
    for pack in pack_forests([forest], len(forest) // 3):
        placeholders = {index for span in pack.media for index in range(span.start, span.stop)}
        rows = set((pack.token_ids == 57).nonzero()[0].tolist())
        assert rows <= placeholders
        images = build_trainer(family, build_vision_policy(family)).encode_images([pack])
        assert images is not None
        assert images.gather(pack)[0].tolist() == sorted(rows)


def test_images_are_refused_by_a_text_model():
    forest = build_forest([attempt.sample() for attempt in shared_image(Random(0), "idefics3")])
    trainer = Trainer(build_policy(CONFIGS["llama"]), TrainerConfig())
    with pytest.raises(ModelUnsupported, match="vision-language"):
        trainer.step(Batch.from_packs(0, [forest]))
    with pytest.raises(ConfigInvalid, match="freeze_vision"):
        freeze_vision_tower(trainer.policy)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_leave_the_tower_alone(family):
    policy = build_vision_policy(family)
    add_adapters(policy.model, 2, 4, [], seed=0)
    trained = [name for name, weight in policy.model.named_parameters() if weight.requires_grad]
    assert trained
    assert not any(policy.tower.contains_weight(name) for name in trained)
    assert not policy.tower.is_trained


@pytest.mark.parametrize("family", FAMILIES if FULL else FAMILIES[:1])
def test_recomputed_layers_and_towers_give_equal_gradients_in_bfloat16(family):
    forest = build_forest([attempt.sample() for attempt in shared_image(Random(0), family)])
    gradients: list[dict[str, torch.Tensor]] = []
    for count in (0, 1):
        config, policy = TrainerConfig(recompute_layers=count), build_vision_policy(family)
        trainer = Trainer(policy, config, dtype=torch.bfloat16, load_image=load_image(family))
        trainer.forward_backward(Batch.from_packs(0, [forest]))
        by_parameter = trainer.master_weights.gradients()
        named = trainer.master_weights.named_parameters()
        gradients.append({name: by_parameter[item] for name, item in named if item in by_parameter})
    assert any(trainer.policy.tower.contains_weight(name.removeprefix("model.")) for name in gradients[0])
    for name, expected in gradients[0].items():
        assert torch.equal(gradients[1][name], expected), name


def test_images_in_chains_are_refused_because_of_the_recurrent_layers():
    forest = build_forest([attempt.sample() for attempt in shared_image(Random(0), "idefics3")])
    trainer = build_trainer("idefics3", build_vision_policy("idefics3"))
    images = trainer.encode_images([forest])
    with pytest.raises(ModelUnsupported, match="recurrent layers"):
        build_model_inputs(forest, layout=PackLayout.CHAINS, images=images)
