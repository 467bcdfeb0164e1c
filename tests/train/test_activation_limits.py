"""A trainer that runs out of memory keeps less for the backward pass, and computes the same."""

import weakref
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
import torch

from ramify.core.errors import GpuMemoryFull, PacksTooLarge
from ramify.model.pack_layout import PackLayout
from ramify.run.fencing.token import FencingToken
from ramify.trace import build_forest
from ramify.train import Batch, Trainer, TrainerConfig, build_trainer, load_loss, pack_forests
from ramify.train.activation_limits import ActivationBudget, ActivationLimits, read_limits, write_limits
from ramify.train.build import get_pack_spec
from ramify.train.policy_model import PolicyModel, PolicyOutput, get_attention_name
from ramify.train.token_stats import TokenStatsWriter, read_token_stats
from ramify.train.trial import run_trial
from tests.support.training import (
    CONFIGS,
    SEQUENTIAL,
    SINGLE_RANK,
    build_attempt,
    build_group,
    build_model,
    build_policy,
    copy_weights,
)

PACK_TOKENS = 1024
OPTIM = {"lr": 1e-3, "eps": 1e-4}
SHORTAGE = "CUDA error: out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated memory is large try this"


def build_packs(pack_tokens: int = PACK_TOKENS, layout: PackLayout = PackLayout.FOREST, seed: int = 0):
    rng = Random(seed)
    forests = [
        build_forest([attempt.sample() for attempt in build_group(rng, 3, [-1, 0, 1, 0], tokens=30)]) for _ in range(4)
    ]
    return pack_forests(forests, pack_tokens, layout)


def get_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    gradients = trainer.master_weights.gradients()
    return {name: gradients[parameter].clone() for name, parameter in trainer.master_weights.named_parameters()}


@pytest.mark.parametrize(
    ("config", "layout", "compiled"),
    [
        (CONFIGS["mixed"], PackLayout.FOREST, False),
        (SEQUENTIAL, PackLayout.CHAINS, False),
        pytest.param(CONFIGS["qwen3"], PackLayout.FOREST, True, marks=pytest.mark.full("compiles for four seconds")),
    ],
)
def test_recomputed_layers_give_equal_gradients(config, layout, compiled):
    batch = Batch.from_packs(0, build_packs(128, layout)[: 1 if compiled else 2])
    gradients, num_runs = [], []
    for count in (0, 1, 2)[: 2 if compiled else 3]:
        policy, runs = build_policy(config), Counter[int]()
        for number, layer in enumerate(policy.layers):
            if compiled:
                layer.compile(backend="aot_eager")
            else:
                layer.register_forward_pre_hook(lambda *_, number=number, runs=runs: runs.update([number]))
        trainer = Trainer(policy, TrainerConfig(recompute_layers=count))
        trainer.forward_backward(batch)
        gradients.append(get_gradients(trainer))
        num_runs.append([number // len(batch.packs) for number in runs.values()])
    for name, expected in gradients[0].items():
        assert all(torch.equal(other[name], expected) for other in gradients[1:]), name
    assert compiled or num_runs == [[1, 1], [2, 1], [2, 2]]


def test_recomputed_layers_keep_fewer_activations():
    kept_bytes = []
    for count in range(3):
        trainer = Trainer(build_policy(CONFIGS["llama"]), TrainerConfig(recompute_layers=count))
        sizes: dict[int, int] = {}

        def record(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        (pack,) = build_packs(10_000)
        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            trainer.policy(trainer.prepare_inputs(pack), Batch.from_packs(0, [pack]).entry_counts)
        kept_bytes.append(sum(sizes.values()))
    assert kept_bytes[0] > 1.3 * kept_bytes[1] > 1.3**2 * kept_bytes[2]


def test_limits_are_lowered_by_recomputed_layers_and_then_by_smaller_packs():
    limits, seen = ActivationLimits(1024, 1), []
    while (lowered := limits.lower(10, 900)) is not None:
        seen.append((lowered.pack_tokens, lowered.recompute_layers))
        limits = lowered
    assert seen == [(1024, 4), (1024, 7), (1024, 10), (384, 10), (128, 10)]


class SmallDevicePolicy(PolicyModel):
    """A policy on a device with room for the activations of `room` tokens in all layers.

    For the first `num_allocations` packs there is room for anything. Before a step is repeated, what the failed
    attempt computed must be gone.
    """

    room, num_allocations = 1 << 30, 0
    num_failures = num_packs = 0
    last_loss: "weakref.ref[torch.Tensor] | None" = None
    failed_loss: "weakref.ref[torch.Tensor] | None" = None

    def forward(self, inputs, entry_counts) -> PolicyOutput:
        self.num_packs += 1
        kept = [layer for layer in self.layers if not layer.gradient_checkpointing]
        needed = inputs.input_ids.numel() * (1 + len(kept)) / (1 + len(self.layers))
        if self.num_packs > self.num_allocations and needed > self.room:
            self.num_failures, self.failed_loss = self.num_failures + 1, self.last_loss
            raise (torch.OutOfMemoryError, RuntimeError)[self.num_failures % 2](SHORTAGE)  # of torch, or of Triton
        assert self.failed_loss is None or self.failed_loss() is None
        output = super().forward(inputs, entry_counts)
        self.last_loss = weakref.ref(output.loss)
        return output


@dataclass
class Lowerings:
    """What a trainer reports when it lowers its limits."""

    lines: list[str] = field(default_factory=list)

    def __call__(self, former: ActivationLimits, lowered: ActivationLimits, reason: str) -> None:
        self.lines.append(f"{former} -> {lowered}: {reason}")


def build_small_trainer(room: int, *, num_allocations: int = 0, shape: str = "llama", **options):
    config = CONFIGS.get(shape, SEQUENTIAL)
    layout = PackLayout.CHAINS if shape == "hybrid" else PackLayout.FOREST
    policy = SmallDevicePolicy(build_model(config, get_attention_name(layout)), layout, load_loss("dppo"))
    policy.room, policy.num_allocations = room, num_allocations
    options = {"on_lowered": Lowerings(), **options}
    activations = ActivationBudget(policy, ActivationLimits(PACK_TOKENS, 0), **options)
    return Trainer(policy, TrainerConfig(pack_tokens=PACK_TOKENS, optim=OPTIM), activations=activations)


@pytest.mark.promise
@pytest.mark.parametrize(
    ("shape", "room", "recomputed"),
    [
        ("llama", 90, 2),
        pytest.param("hybrid", 90, 2, marks=pytest.mark.full("its layers are recomputed above")),
        pytest.param("llama", 700, 1, marks=pytest.mark.full("with 90, layers are recomputed first, too")),
        pytest.param("hybrid", 700, 1, marks=pytest.mark.full("with 90, layers are recomputed first, too")),
    ],
)
def test_a_failed_allocation_repeats_the_step_with_less_memory(room, recomputed, shape, tmp_path):
    layout = PackLayout.CHAINS if shape == "hybrid" else PackLayout.FOREST
    batches = [Batch.from_packs(step, build_packs(PACK_TOKENS, layout, step)) for step in range(3)]
    num_first = len(batches[0].packs)
    writer = TokenStatsWriter(tmp_path, 0)
    expected = Trainer(build_policy(CONFIGS.get(shape, SEQUENTIAL)), TrainerConfig(optim=OPTIM))
    trainer = build_small_trainer(room, num_allocations=num_first + len(batches[1].packs) - 1, shape=shape)
    trainer.token_stats = writer
    for batch in batches:
        metrics, expected_metrics = trainer.step(batch), expected.step(batch)
        writer.write(batch.step, FencingToken.from_number(0))
        for name in ("loss", "grad_norm"):
            assert getattr(metrics, name) == pytest.approx(getattr(expected_metrics, name), rel=1e-4)
        counts = [row.to_dict()["entries"] for row in (metrics, expected_metrics)]
        assert counts[0] == counts[1] == sum(len(pack.targets) for pack in batch.packs)
        assert len(read_token_stats(tmp_path, batch.step, 0).logprob) == counts[0]
    assert trainer.policy.num_failures > 0
    assert trainer.activations.limits.recompute_layers == recomputed
    assert (trainer.activations.limits.pack_tokens == PACK_TOKENS) == (recomputed == 1)
    assert get_pack_spec(trainer).pack_tokens == trainer.activations.limits.pack_tokens
    (line,) = trainer.activations.on_lowered.lines  # later steps keep the limits
    assert line.endswith(f"{trainer.activations.limits}: CUDA error: out of memory. Tried to allocate 2.00 GiB.")
    for name, value in copy_weights(expected).items():
        assert (copy_weights(trainer)[name] - value).norm() <= 1e-5 * value.norm(), name


def test_a_trial_lowers_the_limits_and_changes_nothing_else():
    trainer = build_small_trainer(90)
    before, random_state = copy_weights(trainer), torch.get_rng_state()
    run_trial(trainer)
    assert trainer.activations.limits == ActivationLimits(256, 2)
    assert len(trainer.activations.on_lowered.lines) == 1
    assert all(torch.equal(value, before[name]) for name, value in copy_weights(trainer).items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(optimizer.state for optimizer in trainer.optimizer.optimizers)
    assert not trainer.master_weights.gradients()
    tried, fresh = trainer, Trainer(build_policy(CONFIGS["llama"]), TrainerConfig(optim=OPTIM))
    tried.policy.room = 1 << 30
    batches = [Batch.from_packs(step, build_packs(128, seed=step)[:2]) for step in range(2)]
    for batch in batches:
        assert tried.step(batch).loss == fresh.step(batch).loss
    assert all(torch.equal(value, copy_weights(tried)[name]) for name, value in copy_weights(fresh).items())
    assert len(tried.activations.on_lowered.lines) == 1


def test_a_step_for_which_no_limits_suffice_fails_by_name():
    trainer = build_small_trainer(20)
    with pytest.raises(GpuMemoryFull, match=r"no room for a pack of \d+ tokens.*2\.00 GiB\.; use LoRA"):
        trainer.step(Batch.from_packs(0, build_packs()))
    path = build_forest([build_attempt(Random(0), "a", [-1, 0], tokens=300).sample()])  # cannot be split
    trainer = build_small_trainer(100)
    with pytest.raises(GpuMemoryFull, match="a pack of 600 tokens"):
        trainer.step(Batch.from_packs(0, [path]))
    assert trainer.activations.limits.pack_tokens == PACK_TOKENS


def test_one_of_several_ranks_fails_by_name_and_the_next_trainer_has_lower_limits(model, tmp_path):
    config = TrainerConfig(pack_tokens=PACK_TOKENS)
    planned = ActivationLimits(PACK_TOKENS, 0)

    def store(former: ActivationLimits, lowered: ActivationLimits, reason: str) -> None:
        write_limits(tmp_path / "checkpoints", planned, lowered)

    trainer = build_small_trainer(90, num_ranks=2, on_lowered=store)
    with pytest.raises(PacksTooLarge, match="the next trainer has packs of 1024 tokens, 1 recomputed layers"):
        trainer.step(Batch.from_packs(0, build_packs()))
    assert trainer.activations.limits == planned
    successor = build_trainer(model, config, SINGLE_RANK, checkpoints=tmp_path / "checkpoints")
    assert successor.activations.limits == ActivationLimits(PACK_TOKENS, 1)
    assert [layer.gradient_checkpointing for layer in successor.policy.layers] == [True, False]
    changed = ActivationLimits(512, 0)  # by the user, since then
    assert read_limits(tmp_path / "checkpoints", changed) == changed


def test_a_built_trainer_logs_and_stores_lowered_limits(model, tmp_path):
    lines: list[str] = []
    config = TrainerConfig(pack_tokens=PACK_TOKENS)
    trainer = build_trainer(model, config, SINGLE_RANK, checkpoints=tmp_path, log=lines.append)
    lowered = ActivationLimits(512, 2)
    trainer.activations.on_lowered(trainer.activations.limits, lowered, "no room")
    former = "packs of 1024 tokens, 0 recomputed layers"
    assert lines[-1] == f"memory: packs of 512 tokens, 2 recomputed layers instead of {former} (no room)"
    assert read_limits(tmp_path, trainer.activations.limits) == lowered
