"""One optimizer step: what it depends on, what it does not, and its metrics."""

import math
from collections import defaultdict
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, MambaConfig, Qwen3NextConfig

from ramify.core.errors import ConfigInvalid, DeadlineExceeded, WeightsRefused
from ramify.model.pack_layout import PackLayout, describe_pack_layout
from ramify.model.precision import cpu_has_bfloat16
from ramify.model.resolve import resolve_model_path
from ramify.trace import AnnotatedTrace, Annotation, Message, Trace, VersionSpan, build_forest, make_padding_forest
from ramify.train import Batch, Trainer, TrainerConfig, build_trainer, load_loss, pack_forests
from ramify.train.build import choose_step_sizes, choose_trainer_dtype
from ramify.train.checkpoint_manifest import SavedOptimizer
from ramify.train.config import OptimConfig, ScheduleConfig
from ramify.train.distributed import Ranks
from ramify.train.master_weights import MasterWeights, round_to_bfloat16
from ramify.train.metrics import FlopsModel, MetricSums, StepMetrics
from ramify.train.model_inputs import build_model_inputs
from ramify.train.optim import OptimizersContainer, compute_lr_factor, is_hidden_matrix
from ramify.train.policy_model import load_policy
from tests.support.training import (
    CONFIGS,
    HYBRIDS,
    MAMBA2_HYBRIDS,
    SEQUENTIAL,
    SINGLE_RANK,
    VOCAB,
    build_model,
    build_policy,
    copy_weights,
)

TIMINGS = ("train/seconds", "train/copy_wait_seconds", "train/tokens_per_second", "train/mfu")
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def build_trace(
    rng: Random, name: str, prompt: list[int], env: str = "e", step: int = 0, temperature: float = 1.0
) -> AnnotatedTrace:
    trace = Trace(id=name)
    trace.graph.add_node(-1, Message("user"), np.array(prompt, np.int32))
    size = rng.randrange(4, 12)
    half = size // 2
    trace.graph.add_node(
        0,
        Message("assistant"),
        np.array([rng.randrange(VOCAB) for _ in range(size)], np.int32),
        sampled_span=(0, size),
        logprobs=[rng.uniform(-5.0, -2.0) for _ in range(size)],
        versions=[VersionSpan("p", 0, step, half), VersionSpan("p", 0, step + 1, size - half)],
    )
    annotation = Annotation(name, 1, advantage=rng.choice([-1.0, 1.0]), ce=rng.choice([0.0, 0.5]))
    return AnnotatedTrace(trace, (annotation,), temperature, env)


def build_forests(seed: int = 0, count: int = 4):
    rng = Random(seed)
    forests = []
    for group in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(20)]
        env, temperature = ("math", "code")[group % 2], (1.0, 0.8)[group % 2]
        traces = [build_trace(rng, f"g{group}a{i}", prompt, env, i % 3, temperature) for i in range(5)]
        forests.append(build_forest(traces))
    return forests


def make_trainer(shape: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **settings) -> Trainer:
    return Trainer(build_policy(CONFIGS[shape], seed), TrainerConfig(optim=settings), dtype=dtype)


def test_a_step_does_not_depend_on_how_the_batch_was_packed():
    packings = [
        pack_forests(build_forests(), 10_000),
        pack_forests(build_forests(), 50),
        [*pack_forests(build_forests(), 60), make_padding_forest(30)],
    ]
    assert len(packings[0]) == 1 < len(packings[1])
    first, *others = (make_trainer(lr=1e-3).step(Batch.from_packs(3, packs)) for packs in packings)
    for metrics in others:
        assert metrics.loss == pytest.approx(first.loss, rel=1e-5)
        assert metrics.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
        assert metrics.sums.flat_tokens == first.sums.flat_tokens
    assert first.token_ratio > 2


@pytest.mark.parametrize("device", DEVICES)
def test_steps_started_ahead_give_the_metrics_of_steps_one_by_one(device):
    sizes = (60, 10_000, 120)
    batches = [Batch.from_packs(step, pack_forests(build_forests(step), size)) for step, size in enumerate(sizes)]
    is_emulated = device == "cpu" and not cpu_has_bfloat16()
    dtype = torch.float32 if is_emulated else torch.bfloat16
    waiting, ahead = (
        Trainer(build_policy(CONFIGS["llama"]).to(device), TrainerConfig(), dtype=dtype) for _ in range(2)
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # a GPU would add in any order
    try:
        expected_metrics = [waiting.step(batch) for batch in batches]
        pending_steps = [ahead.start_step(batch) for batch in batches]
        for pending, expected in zip(pending_steps, expected_metrics):
            metrics = pending.wait_for_metrics()
            assert metrics.seconds > 0
            assert {**metrics.to_dict(), **get_timings(expected)} == expected.to_dict()
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in copy_weights(waiting).items():
        assert torch.equal(value, copy_weights(ahead)[name]), name


def get_timings(metrics: StepMetrics) -> dict[str, float]:
    """Return the metrics that differ from one run to the next."""
    return {name: value for name, value in metrics.to_dict().items() if name in TIMINGS}


class FakeCudaEvent:
    """An event that the device reaches at the last of `queries` queries."""

    def __init__(self, queries: float) -> None:
        self.queries = queries

    def query(self) -> bool:
        self.queries -= 1
        return self.queries <= 0

    def elapsed_time(self, later: "FakeCudaEvent") -> float:
        return 1500.0


def test_a_step_that_the_device_never_finishes_times_out(monkeypatch):
    monkeypatch.setattr("ramify.train.trainer.STEP_TIMEOUT", 0.05)
    pending = make_trainer().start_step(Batch.from_packs(3, pack_forests(build_forests(), 60)))
    pending.started.event, pending.ended.event = FakeCudaEvent(1), FakeCudaEvent(math.inf)
    with pytest.raises(DeadlineExceeded, match=r"step 3 .* 0\.05 s"):
        pending.wait_for_metrics()
    pending.ended.event = FakeCudaEvent(3)  # late, but within the timeout
    assert pending.wait_for_metrics().seconds == 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_failed_step_leaves_no_gradients_to_the_next(dtype, monkeypatch):
    batch = Batch.from_packs(0, pack_forests(build_forests(count=2), 60))
    assert len(batch.packs) > 1
    expected = make_trainer(dtype=dtype).step(batch).grad_norm
    trainer = make_trainer(dtype=dtype)
    with monkeypatch.context() as patch, pytest.raises(IndexError):
        inputs = [trainer.prepare_inputs(batch.packs[0])]  # and none for the second pack
        patch.setattr(trainer, "prepare_inputs", lambda *_: inputs.pop())
        trainer.step(batch)
    assert trainer.step(batch).grad_norm == expected


@pytest.mark.parametrize("type", ["adamw", pytest.param("muon", marks=pytest.mark.full("the rounding is the same"))])
def test_bfloat16_computes_with_rounded_weights_and_keeps_small_updates(type):
    exact, rounded = make_trainer(type=type, lr=1e-5), make_trainer(type=type, lr=1e-5, dtype=torch.bfloat16)
    before = copy_weights(rounded)
    packs = pack_forests(build_forests(count=2), 60)
    assert len(packs) > 1
    for step in range(2):
        exact.step(Batch.from_packs(step, packs))
        metrics = rounded.step(Batch.from_packs(step, packs))
    assert metrics.grad_norm > 0
    for name, value in copy_weights(rounded).items():
        assert value.dtype == torch.float32
        update, expected = value - before[name], copy_weights(exact)[name] - before[name]
        assert update.abs().max() > 0, name
        assert torch.cosine_similarity(update.flatten(), expected.flatten(), dim=0) > 0.7, name
        model_param = dict(rounded.policy.named_parameters())[name]
        assert model_param.dtype == torch.bfloat16
        assert torch.equal(model_param, round_to_bfloat16(value))


def test_a_gradient_that_is_not_finite_does_not_change_the_weights():
    trainer = make_trainer()
    before = copy_weights(trainer)
    forest = build_forests()[0]
    forest.targets.advantage[:] = math.inf
    metrics = trainer.step(Batch.from_packs(0, [forest]))
    assert metrics.skipped
    assert all(torch.equal(value, before[name]) for name, value in copy_weights(trainer).items())


def test_gradients_are_clipped_to_max_norm():
    trainer = make_trainer(max_grad_norm=1e-3)
    metrics = trainer.step(Batch.from_packs(0, pack_forests(build_forests(), 1000)))
    assert metrics.grad_norm > 1e-3
    (adamw,) = trainer.optimizer.optimizers  # its first moments are a tenth of the clipped gradient
    clipped_norm = torch.stack(
        [adamw.state[value]["exp_avg"].norm() for value in trainer.master_weights.parameters()]
    ).norm()
    assert float(clipped_norm) == pytest.approx(1e-4, rel=1e-3)


def add_reference_logprobs(forest):
    """Return the forest with a reference logprob for every other entry."""
    index = np.arange(len(forest.targets))
    values = np.where(index % 2, np.nan, -4.5 + 0.5 * (index % 9)).astype(np.float32)
    return replace(forest, targets=replace(forest.targets, ref_logprob=values))


def test_metrics_equal_a_count_token_by_token():
    trainer = make_trainer("qwen3", lr=1e-9)
    packs = pack_forests([add_reference_logprobs(forest) for forest in build_forests()], 70)
    metrics = trainer.step(Batch.from_packs(4, packs)).to_dict()
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    weights: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for pack in packs:
        inputs = build_model_inputs(pack)
        with torch.no_grad():
            logprob, entropy = trainer.policy.compute_logprobs(inputs)
        masked = trainer.policy.losses["rl"](inputs.head_inputs.select_entries("rl", logprob)).masked
        for t in range(len(pack.targets)):
            staleness = 4 - pack.versions[pack.targets.version[t]].step
            key = f"/{pack.envs[pack.expand_call_column('env')[t]]}/age_{staleness}"
            log_ratio = float(logprob[t]) - float(pack.targets.logprob[t])
            for suffix in ("", key):
                sums[suffix]["mismatch_kl"].append(math.exp(log_ratio) - log_ratio - 1)
                sums[suffix]["max_log_ratio"].append(abs(log_ratio))
                sums[suffix]["entropy"].append(float(entropy[t]))
                sums[suffix]["masked"].append(float(masked[t]))
                if np.isfinite(reference := float(pack.targets.ref_logprob[t])):
                    sums[suffix]["reference_kl"].append(float(logprob[t]) - reference)
                    sums[suffix]["reference_agreement"].append(min(1.0, math.exp(reference - float(logprob[t]))))
                    sums[suffix]["reference_cross_entropy"].append(-reference)
                    weight = min(10.0, math.exp(reference - float(logprob[t])))
                    weights[suffix].append((weight, -weight * reference))
    assert len(sums) == 1 + 2 * 4  # two envs, staleness 1 to 4
    for suffix, columns in sums.items():
        assert metrics[f"entries{suffix}"] == len(columns["entropy"])
        for name, values in columns.items():
            expected = max(values) if name == "max_log_ratio" else sum(values) / len(values)
            assert metrics[f"{name}{suffix}"] == pytest.approx(expected, rel=1e-4, abs=1e-6), (name, suffix)
        total_weight, weighted_entropy = map(sum, zip(*weights[suffix]))
        assert metrics[f"reference_entropy{suffix}"] == pytest.approx(weighted_entropy / total_weight, rel=1e-4)
        exact = float(np.quantile(columns["max_log_ratio"], 0.999, method="inverted_cdf"))
        assert exact * 0.999 <= metrics[f"p999_log_ratio{suffix}"] <= max(1.2 * exact, 2e-5), suffix
    flat_tokens = sum(forest.flat_tokens for forest in build_forests())
    assert metrics["forest/token_ratio"] == flat_tokens / sum(pack.num_tokens for pack in packs)
    assert len(sums[""]["reference_kl"]) > 0
    assert {"train/grad_norm", "train/tokens_per_second", "train/lr", "loss/rl", "loss/ce"} <= metrics.keys()


def test_metric_sums_of_ranks_add_up_to_those_of_one_rank():
    packs = pack_forests(build_forests(), 70)
    batch = Batch.from_packs(4, packs)
    expected = make_trainer().step(batch).sums
    rank_packs = (packs[:1], packs[1:])
    merged = MetricSums.merge(make_trainer().step(Batch(4, part, batch.entry_counts)).sums for part in rank_packs)
    assert merged.component_losses == pytest.approx(expected.component_losses)
    assert merged.tokens == expected.tokens
    assert merged.rows_by_key.keys() == expected.rows_by_key.keys()
    for key, row in expected.rows_by_key.items():
        np.testing.assert_allclose(merged.rows_by_key[key], row, rtol=1e-6)


def test_chain_cost_is_what_packs_repeat():
    forests = build_forests()
    unique = sum(forest.num_tokens for forest in forests)
    chains = pack_forests(forests, 1000, PackLayout.CHAINS)
    metrics = Trainer(build_policy(SEQUENTIAL), TrainerConfig()).step(Batch.from_packs(0, chains)).to_dict()
    assert metrics["forest/chain_cost"] == metrics["forest/tokens"] / unique
    assert metrics["forest/chain_cost"] > 1.5
    trainer = Trainer(build_policy(HYBRIDS["lfm2"]), TrainerConfig())
    batch = Batch.from_packs(0, pack_forests(forests, 1000))
    assert trainer.step(batch).to_dict()["forest/chain_cost"] == 1
    pieces = pack_forests(forests, max(map(len, forests)) - 1)  # the largest tree is split, and repeats its prompt
    metrics = trainer.step(Batch.from_packs(0, [*pieces, make_padding_forest(16)])).to_dict()
    assert metrics["forest/chain_cost"] == metrics["forest/tokens"] / unique > 1
    assert "forest/chain_cost" not in make_trainer().step(batch).to_dict()


@pytest.mark.parametrize("config", [CONFIGS["mixed"], SEQUENTIAL], ids=["forest", "chains"])
def test_a_pack_without_targets_takes_part_in_the_step_and_changes_nothing(config):
    trainer = Trainer(build_policy(config), TrainerConfig())
    metrics = trainer.step(Batch(0, [make_padding_forest(16)], {"rl": 1, "ce": 1, "ref_kl": 1, "kl": 1}))
    assert metrics.loss == 0.0
    assert metrics.grad_norm == 0.0
    (adamw,) = trainer.optimizer.optimizers
    assert all(value in adamw.state for value in trainer.master_weights.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_without_packs_changes_nothing(device, dtype):
    trainer = Trainer(build_policy(CONFIGS["llama"]).to(device), TrainerConfig(), dtype=dtype)
    before = copy_weights(trainer)
    metrics = trainer.step(Batch.from_packs(0, []))
    assert (metrics.loss, metrics.grad_norm, metrics.skipped) == (0.0, 0.0, False)
    assert all(torch.equal(value, before[name]) for name, value in copy_weights(trainer).items())


def test_the_format_of_moments_is_chosen_once():
    def choose(moments: str, saved: str | None = None, ranks: Ranks = SINGLE_RANK) -> str:
        config = TrainerConfig.model_validate({"optim": {"moments": moments}})
        optimizer = None if saved is None else SavedOptimizer("adamw", saved)
        return choose_step_sizes(resolve_model_path("tiny"), config, ranks, saved_optimizer=optimizer).optim.moments

    assert choose("auto") == "float32"
    assert choose("auto", saved="8bit") == "8bit"
    with pytest.raises(
        ConfigInvalid, match=r"optim\.moments: expected 'float32' or 'auto', as in the run's checkpoints"
    ):
        choose("8bit", saved="float32")
    two_ranks = Ranks(torch.device("cpu"), 0, 2)
    assert choose("auto", ranks=two_ranks) == "float32"
    for moments, saved in (("8bit", None), ("auto", "8bit")):
        with pytest.raises(ConfigInvalid, match=r"optim\.moments: '8bit' needs a trainer of one rank, got 2"):
            choose(moments, saved=saved, ranks=two_ranks)
    with pytest.raises(ValueError, match="needs type = 'adamw'"):
        OptimConfig(type="muon", moments="8bit")


def test_learning_rate_schedules():
    def factor_at(step: int, **settings) -> float:
        return compute_lr_factor(ScheduleConfig(**settings), step, 100)

    assert [factor_at(s, warmup_steps=4) for s in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = {"type": "linear", "warmup_steps": 20, "min_lr_factor": 0.1}
    assert [factor_at(s, **linear) for s in (20, 60, 100, 150)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert [factor_at(s, type="cosine") for s in (0, 50, 100)] == pytest.approx([1.0, 0.5, 0.0])
    assert [factor_at(s, type="wsd") for s in (0, 80, 90, 100)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    assert factor_at(95, type="wsd", decay_steps=10) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="number of steps"):
        compute_lr_factor(ScheduleConfig(type="cosine"), 1, None)
    with pytest.raises(ValueError, match="decay"):
        ScheduleConfig(min_lr_factor=0.1)


def test_muon_updates_the_matrices_inside_the_layers_and_adamw_the_rest():
    policy = build_policy(CONFIGS["qwen3"])
    hidden = {name for name, value in policy.named_parameters() if is_hidden_matrix(name, value)}
    assert hidden == {name for name, value in policy.named_parameters() if ".layers." in name and value.ndim == 2}
    container = OptimizersContainer(MasterWeights(policy), OptimConfig(type="muon", weight_decay=0.1), None)
    param_counts = [sum(len(group["params"]) for group in optimizer.param_groups) for optimizer in container.optimizers]
    assert param_counts == [len(hidden), len(list(policy.parameters())) - len(hidden)]


def test_flops_count_each_product_once():
    policy, forest = build_policy(CONFIGS["mixed"]), build_forests()[0]
    layers = sum(value.numel() for name, value in policy.named_parameters() if ".layers." in name and value.ndim == 2)
    full = int((forest.position_ids + 1).sum())
    assert full == forest.num_attention_pairs
    windowed = int(np.minimum(forest.position_ids + 1, 9).sum())
    scored = len(forest.unique_head_inputs()[0])
    expected = 6 * layers * len(forest) + 6 * VOCAB * 48 * scored + 12 * 4 * 16 * (full + windowed)
    assert FlopsModel.from_model(policy.model).count_flops(forest) == expected


def test_flops_count_three_products_of_each_gated_delta_state():
    policy = build_policy(HYBRIDS["qwen3_5"])
    layers = sum(value.numel() for name, value in policy.named_parameters() if ".layers." in name and value.ndim >= 2)
    states = 2 * 4 * 16 * 16  # of two layers with four heads
    assert FlopsModel.from_model(policy.model).per_token == 6 * layers + 6 * 3 * states


@pytest.mark.parametrize("config", [HYBRIDS["granitemoehybrid"], MAMBA2_HYBRIDS["nemotron_h"]])
def test_flops_count_two_products_of_each_mamba2_state(config):
    policy = build_policy(config)
    layers = sum(value.numel() for name, value in policy.named_parameters() if ".layers." in name and value.ndim >= 2)
    assert FlopsModel.from_model(policy.model).per_token == 6 * layers + 6 * 2 * (6 * 16 * 16)


def test_only_layers_that_attend_have_pairs():
    windows = {name: FlopsModel.from_model(build_model(config, "eager")) for name, config in MAMBA2_HYBRIDS.items()}
    assert [len(flops.layer_windows) for flops in windows.values()] == [1, 1, 2, 2]
    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4}
    hybrid = Qwen3NextConfig(**small, intermediate_size=32, num_experts=4, moe_intermediate_size=16)
    assert hybrid.layer_types.count("linear_attention") == 3
    assert len(FlopsModel.from_model(build_model(hybrid, "eager")).layer_windows) == 1
    griffin = AutoConfig.for_model("recurrent_gemma", **small, block_types=["recurrent", "attention"])
    assert FlopsModel.from_model(build_model(griffin, "eager")).layer_windows == (griffin.sliding_window,) * 2
    recurrent = MambaConfig(**small, state_size=8)
    assert FlopsModel.from_model(build_model(recurrent, "eager")).per_visible_pair == 0.0
    trainer = Trainer(build_policy(recurrent), TrainerConfig(pack_tokens=512))
    assert trainer.step(Batch.from_packs(0, pack_forests(build_forests(), 512, trainer.policy.layout))).grad_norm > 0


def test_building_a_trainer_logs_its_layout_and_dtype():
    lines: list[str] = []
    config = TrainerConfig(threads=1, recompute_layers=1)
    trainer = build_trainer(resolve_model_path("tiny"), config, SINGLE_RANK, log=lines.append)
    assert trainer.policy.layout is PackLayout.FOREST
    assert lines == [
        "forest: shared prefixes are computed once",
        "dtype: float32 (the default on a CPU)",
        "operators: tree attention in torch",
    ]
    assert describe_pack_layout(SEQUENTIAL).startswith("chains: minimax has linear_attention layers")
    assert describe_pack_layout(HYBRIDS["lfm2"]).endswith("the states of conv layers fork where it does")
    assert not trainer.step(Batch.from_packs(0, pack_forests(build_forests(), 100))).skipped


def test_a_model_with_missing_weights_is_refused(tmp_path):
    build_model(CONFIGS["llama"], "eager").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(WeightsRefused, match=r"model\.norm\.weight"):
        load_policy(tmp_path, load_loss("dppo"), device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "choice"), [("cuda", "bfloat16 (the default on a GPU)"), ("cpu", "float32 (the default on a CPU)")]
)
def test_the_default_dtype_depends_on_the_device_alone(device, choice):
    assert str(choose_trainer_dtype(TrainerConfig(), Ranks(torch.device(device)))) == choice
