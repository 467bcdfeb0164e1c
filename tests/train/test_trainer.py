"""One optimizer step: what it depends on, what it does not, and what it tells."""

import math
import subprocess
import sys
from collections import defaultdict
from copy import deepcopy
from random import Random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, Qwen3NextConfig

from ramify.errors import DeadlineExceeded, WeightsRefused
from ramify.model.pack_layout import PackLayout, describe_pack_layout
from ramify.model.resolve import resolve_model_path
from ramify.model.tree_attention import BLOCK_SIZE
from ramify.trace import AnnotatedTrace, Annotation, Message, Trace, VersionRun, build_forest, make_padding_forest
from ramify.train import Batch, Trainer, TrainerConfig, build_trainer, load_loss, pack_forests
from ramify.train.build import choose_trainer_dtype
from ramify.train.config import OptimConfig, ScheduleConfig
from ramify.train.distributed import Ranks
from ramify.train.flops import FlopsModel
from ramify.train.master_weights import MasterWeights
from ramify.train.metrics import MetricSums, StepMetrics
from ramify.train.model_inputs import bucket_length, build_model_inputs
from ramify.train.optim import OptimizersContainer, compute_lr_factor, is_hidden_matrix
from ramify.train.policy import load_policy
from tests.train.models import CONFIGS, HYBRID, VOCAB, made, policy

MEASURED = ("train/seconds", "train/tokens_per_second", "train/mfu")
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def sample(
    rng: Random, name: str, prompt: list[int], env: str = "e", step: int = 0, temperature: float = 1.0
) -> AnnotatedTrace:
    trace = Trace(id=name)
    trace.add_node(-1, Message("user"), np.array(prompt, np.int32))
    size = rng.randrange(4, 12)
    half = size // 2
    trace.add_node(
        0,
        Message("assistant"),
        np.array([rng.randrange(VOCAB) for _ in range(size)], np.int32),
        sampled_span=(0, size),
        logprobs=[rng.uniform(-5.0, -2.0) for _ in range(size)],
        versions=[VersionRun("p", 0, step, half), VersionRun("p", 0, step + 1, size - half)],
    )
    note = Annotation(name, 1, advantage=rng.choice([-1.0, 1.0]), ce=rng.choice([0.0, 0.5]))
    return AnnotatedTrace(trace, (note,), temperature, env)


def forests(seed: int = 0, count: int = 4):
    rng = Random(seed)
    found = []
    for number in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(20)]
        env, heat = ("math", "code")[number % 2], (1.0, 0.8)[number % 2]
        found.append(build_forest([sample(rng, f"g{number}a{i}", prompt, env, i % 3, heat) for i in range(5)]))
    return found


def trainer(shape: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **settings) -> Trainer:
    return Trainer(policy(CONFIGS[shape], seed), TrainerConfig(optim=settings), dtype=dtype)


def weights(made: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in made.master_weights.named_parameters()}


def test_a_step_does_not_depend_on_how_the_batch_was_packed():
    made = [trainer(lr=1e-3), trainer(lr=1e-3), trainer(lr=1e-3)]
    packs = [
        pack_forests(forests(), 10_000),
        pack_forests(forests(), 50),
        [*pack_forests(forests(), 60), make_padding_forest(30)],
    ]
    assert len(packs[0]) == 1 < len(packs[1])
    seen = [each.step(Batch.from_packs(3, part)) for each, part in zip(made, packs)]
    for other in seen[1:]:
        assert other.loss == pytest.approx(seen[0].loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(seen[0].grad_norm, rel=1e-5)
        assert other.sums.flat_tokens == seen[0].sums.flat_tokens
    assert seen[0].token_ratio > 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_was_begun_tells_later_what_it_would_have_told_at_once(device):
    batches = [
        Batch.from_packs(number, pack_forests(forests(number), size)) for number, size in enumerate((60, 10_000, 120))
    ]
    once, later = (
        Trainer(policy(CONFIGS["llama"]).to(device), TrainerConfig(), dtype=torch.bfloat16) for _ in range(2)
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # a GPU would add in any order
    try:
        told = [once.step(each) for each in batches]
        begun = [later.start_step(each) for each in batches]
        for found, wanted in zip([each.wait_for_metrics() for each in begun], told):
            assert found.seconds > 0
            assert {**found.to_dict(), **unmeasured(wanted)} == wanted.to_dict()
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in weights(once).items():
        assert torch.equal(value, weights(later)[name]), name


class Event:
    """An event that a GPU has come to at the last of so many looks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks <= 0

    def elapsed_time(self, later: "Event") -> float:
        return 1500.0


def test_a_gpu_that_never_finishes_a_step_is_named_after_a_deadline(monkeypatch):
    monkeypatch.setattr("ramify.train.trainer.DEADLINE", 0.05)
    begun = trainer().start_step(Batch.from_packs(3, pack_forests(forests(), 60)))
    begun.started.event, begun.ended.event = Event(1), Event(math.inf)
    with pytest.raises(DeadlineExceeded, match=r"step 3 .* 0\.05 s"):
        begun.wait_for_metrics()
    begun.ended.event = Event(3)  # it may be late
    assert begun.wait_for_metrics().seconds == 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_failed_leaves_nothing_to_the_next(dtype, monkeypatch):
    batch = Batch.from_packs(0, pack_forests(forests(), 60))
    wanted = trainer(dtype=dtype).step(batch).grad_norm
    made = trainer(dtype=dtype)
    with monkeypatch.context() as patch, pytest.raises(IndexError):
        rows = [made.prepare_inputs(batch.packs[0])]  # and none for the second pack
        patch.setattr(made, "row", lambda pack: rows.pop())
        made.step(batch)
    assert made.step(batch).grad_norm == wanted


def unmeasured(metrics: StepMetrics) -> dict[str, float]:
    """What differs from one run to the next."""
    return {name: value for name, value in metrics.to_dict().items() if name in MEASURED}


def test_training_lowers_the_loss_of_what_is_trained():
    trace = sample(Random(1), "a", [1, 2, 3]).trace
    batch = Batch.from_packs(
        0, pack_forests([build_forest([AnnotatedTrace(trace, (Annotation("a", 1, rl=0.0, ce=1.0),))])], 1000)
    )
    made = trainer("qwen3", lr=1e-2)
    losses = [made.step(batch).loss for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("type", ["adamw", "muon"])
def test_bfloat16_computes_on_copies_and_keeps_what_rounds_away(type):
    exact, rounded = trainer(type=type, lr=1e-5), trainer(type=type, lr=1e-5, dtype=torch.bfloat16)
    before = weights(rounded)
    packs = pack_forests(forests(), 60)
    assert len(packs) > 1
    for step in range(3):
        exact.step(Batch.from_packs(step, packs))
        metrics = rounded.step(Batch.from_packs(step, packs))
    assert metrics.grad_norm > 0
    for name, value in weights(rounded).items():
        assert value.dtype == torch.float32
        moved, wanted = value - before[name], weights(exact)[name] - before[name]
        assert moved.abs().max() > 0, name
        assert torch.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0) > 0.7, name
        held = dict(rounded.policy.named_parameters())[name]
        assert held.dtype == torch.bfloat16
        assert torch.equal(held, value.bfloat16())


def test_gradients_of_one_pack_are_held_as_they_are_and_more_are_summed_in_float32():
    module = torch.nn.ParameterDict({name: torch.zeros(1000) for name in ("both", "later", "never")})
    masters = MasterWeights(module, torch.bfloat16)
    made = dict(masters.named_parameters())
    torch.manual_seed(0)
    given = [torch.randn(1000).bfloat16() for _ in range(3)]
    module["both"].grad = given[0]
    masters.accumulate_gradients()
    assert module["both"].grad is None
    assert made["both"].grad is None
    assert masters.gradients() == {made["both"]: given[0]}
    module["both"].grad, module["later"].grad = given[1:]
    masters.accumulate_gradients()
    total = given[0].float() + given[1]
    assert made["both"].grad is not None
    assert torch.equal(made["both"].grad, total)
    assert masters.gradients()[made["later"]] is given[2]
    assert float(masters.gradient_norm()) == pytest.approx(float(torch.cat([total, given[2].float()]).norm()), rel=1e-6)
    masters.upcast_gradients()
    assert {name: value.grad.dtype for name, value in made.items() if value.grad is not None} == {
        "both": torch.float32,
        "later": torch.float32,
    }
    masters.zero_grad()
    assert not masters.gradients()
    assert float(masters.gradient_norm()) == 0.0


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone():
    made = trainer()
    before = weights(made)
    forest = forests()[0]
    forest.targets.advantage[:] = math.inf
    metrics = made.step(Batch.from_packs(0, [forest]))
    assert metrics.skipped
    assert all(torch.equal(value, before[name]) for name, value in weights(made).items())


def test_gradients_are_clipped_to_their_norm():
    made = trainer(max_norm=1e-3)
    metrics = made.step(Batch.from_packs(0, pack_forests(forests(), 1000)))
    assert metrics.grad_norm > 1e-3
    (adamw,) = made.optimizer.optimizers  # its first moments are a tenth of the gradient it saw
    left = torch.stack([adamw.state[value]["exp_avg"].norm() for value in made.master_weights.parameters()]).norm()
    assert float(left) == pytest.approx(1e-4, rel=1e-3)


def test_metrics_equal_a_count_token_by_token():
    made = trainer("qwen3", lr=1e-9)
    packs = pack_forests(forests(), 70)
    found = made.step(Batch.from_packs(4, packs)).to_dict()
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for pack in packs:
        with torch.no_grad():
            logprob, entropy = made.policy.compute_logprobs(build_model_inputs(pack))
        masked = made.policy.losses["rl"](build_model_inputs(pack).head_inputs.select_entries("rl", logprob)).masked
        for t in range(len(pack.targets)):
            age = 4 - pack.versions[pack.targets.version[t]].step
            where = f"/{pack.envs[pack.expand_sequence_column('env')[t]]}/age_{age}"
            lr = float(logprob[t]) - float(pack.targets.logprob[t])
            for place in ("", where):
                sums[place]["mismatch_kl"].append(math.exp(lr) - lr - 1)
                sums[place]["max_log_ratio"].append(abs(lr))
                sums[place]["entropy"].append(float(entropy[t]))
                sums[place]["masked"].append(float(masked[t]))
    assert len(sums) == 1 + 2 * 4  # two envs, ages 1 to 4
    for place, columns in sums.items():
        assert found[f"entries{place}"] == len(columns["entropy"])
        for name, values in columns.items():
            wanted = max(values) if name == "max_log_ratio" else sum(values) / len(values)
            assert found[f"{name}{place}"] == pytest.approx(wanted, rel=1e-4, abs=1e-6), (name, place)
        exact = float(np.quantile(columns["max_log_ratio"], 0.999, method="inverted_cdf"))
        assert exact * 0.999 <= found[f"p999_log_ratio{place}"] <= max(1.2 * exact, 2e-5), place
    assert found["forest/token_ratio"] == sum(f.flat_tokens for f in forests()) / sum(f.num_tokens for f in packs)
    assert {"train/grad_norm", "train/tokens_per_second", "train/lr", "loss/rl", "loss/ce"} <= found.keys()


def test_sums_of_ranks_add_up_to_those_of_one():
    packs = pack_forests(forests(), 70)
    whole = Batch.from_packs(4, packs)
    one = trainer().step(whole).sums
    ranks = [trainer().step(Batch(4, part, whole.entry_counts)).sums for part in (packs[:1], packs[1:])]
    both = MetricSums.merge(ranks)
    assert both.component_losses == pytest.approx(one.component_losses)
    assert both.tokens == one.tokens
    assert both.rows_by_key.keys() == one.rows_by_key.keys()
    for group, row in one.rows_by_key.items():
        np.testing.assert_allclose(both.rows_by_key[group], row, rtol=1e-6)


@pytest.mark.parametrize("config", [CONFIGS["mixed"], HYBRID], ids=["forest", "chains"])
def test_a_row_without_targets_takes_part_and_changes_nothing(config):
    made = Trainer(policy(config), TrainerConfig())
    metrics = made.step(Batch(0, [make_padding_forest(16)], {"rl": 1, "ce": 1, "ref_kl": 1}))
    assert metrics.loss == 0.0
    assert metrics.grad_norm == 0.0
    (adamw,) = made.optimizer.optimizers
    assert all(value in adamw.state for value in made.master_weights.parameters())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_without_packs_changes_nothing(device, dtype):
    made = Trainer(policy(CONFIGS["llama"]).to(device), TrainerConfig(), dtype=dtype)
    before = weights(made)
    metrics = made.step(Batch.from_packs(0, []))
    assert (metrics.loss, metrics.grad_norm, metrics.skipped) == (0.0, 0.0, False)
    assert all(torch.equal(value, before[name]) for name, value in weights(made).items())


def test_schedules():
    def at(step: int, **settings) -> float:
        return compute_lr_factor(ScheduleConfig(**settings), step, 100)

    assert [at(s, warmup_steps=4) for s in (0, 1, 3, 4, 99)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = {"type": "linear", "warmup_steps": 20, "floor": 0.1}
    assert [at(s, **linear) for s in (20, 60, 100, 150)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert [at(s, type="cosine") for s in (0, 50, 100)] == pytest.approx([1.0, 0.5, 0.0])
    assert [at(s, type="wsd") for s in (0, 80, 90, 100)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    assert at(95, type="wsd", decay_steps=10) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="number of steps"):
        compute_lr_factor(ScheduleConfig(type="cosine"), 1, None)
    with pytest.raises(ValueError, match="decay"):
        ScheduleConfig(floor=0.1)


def test_muon_takes_the_matrices_inside_the_layers_and_adamw_the_rest():
    made = policy(CONFIGS["qwen3"])
    hidden = {name for name, value in made.named_parameters() if is_hidden_matrix(name, value)}
    assert hidden == {name for name, value in made.named_parameters() if ".layers." in name and value.ndim == 2}
    optimizer = OptimizersContainer(MasterWeights(made), OptimConfig(type="muon", weight_decay=0.1), None)
    held = [sum(len(group["params"]) for group in part.param_groups) for part in optimizer.optimizers]
    assert held == [len(hidden), len(list(made.parameters())) - len(hidden)]


def test_the_state_of_an_optimizer_goes_on_where_it_was():
    batch = [Batch.from_packs(step, pack_forests(forests(step), 100)) for step in range(3)]
    first = trainer(type="muon", lr=1e-3)
    for each in batch[:2]:
        first.step(each)
    second = trainer(type="muon", lr=1e-3, seed=5)
    with torch.no_grad():
        for (_, mine), (_, theirs) in zip(
            second.master_weights.named_parameters(), first.master_weights.named_parameters()
        ):
            mine.copy_(theirs)
    second.master_weights.copy_to_model()
    second.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
    assert first.step(batch[2]).loss == second.step(batch[2]).loss
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(first).items())


def test_the_cost_counts_each_product_once():
    made, forest = policy(CONFIGS["mixed"]), forests()[0]
    layers = sum(value.numel() for name, value in made.named_parameters() if ".layers." in name and value.ndim == 2)
    full = int((forest.position + 1).sum())
    assert full == forest.pairs
    near = int(np.minimum(forest.position + 1, 9).sum())
    wanted = 6 * layers * len(forest) + 6 * VOCAB * 48 * len(forest.heads()[0]) + 12 * 4 * 16 * (2 * full + near)
    assert FlopsModel.from_model(made.model).count_flops(forest) == wanted


def test_only_layers_that_attend_have_pairs():
    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4}
    hybrid = Qwen3NextConfig(**small, intermediate_size=32, num_experts=4, moe_intermediate_size=16)
    assert hybrid.layer_types.count("linear_attention") == 3
    assert len(FlopsModel.from_model(made(hybrid, "eager")).layer_windows) == 1
    recurrent = MambaConfig(**small, state_size=8)
    assert FlopsModel.from_model(made(recurrent, "eager")).per_visible_pair == 0.0
    trainer = Trainer(policy(recurrent), TrainerConfig(pack_tokens=512))
    assert trainer.step(Batch.from_packs(0, pack_forests(forests(), 512, trainer.policy.layout))).grad_norm > 0


def test_rows_of_a_gpu_have_few_lengths():
    assert {bucket_length(length, 16384) for length in range(1, 16385, 37)} == {4096, 8192, 12288, 16384}
    assert bucket_length(16385, 16384) == 32768
    assert {bucket_length(length, 1152) % BLOCK_SIZE for length in range(1, 5000, 11)} == {0}
    assert max(bucket_length(length, 1152) for length in range(1, 1153)) == 1152


def test_the_packaged_model_is_loaded_and_says_how_it_computes():
    said: list[str] = []
    config = TrainerConfig(threads=1, checkpoint_activations=True)
    made = build_trainer(resolve_model_path("tiny"), config, Ranks(torch.device("cpu")), log=said.append)
    assert made.policy.layout is PackLayout.FOREST
    assert said == ["forest: shared prefixes are computed once", "dtype: float32 (the default on a CPU)"]
    assert describe_pack_layout(HYBRID).startswith("chains: lfm2 has conv layers")
    assert not made.step(Batch.from_packs(0, pack_forests(forests(), 100))).skipped


def test_a_model_without_some_of_its_weights_is_not_made_up(tmp_path):
    made(CONFIGS["llama"], "eager").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(WeightsRefused, match=r"model\.norm\.weight"):
        load_policy(tmp_path, load_loss("dppo"), device=torch.device("cpu"))


def test_configuration_and_losses_load_without_torch():
    script = [
        "import sys, ramify.train as train",
        "train.TrainerConfig(loss={'id': 'gspo'})",
        "train.find_loss('ppo')",
        "print('torch' in sys.modules)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(script)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("device", "choice"), [("cuda", "bfloat16 (the default on a GPU)"), ("cpu", "float32 (the default on a CPU)")]
)
def test_the_default_dtype_depends_on_the_device_alone(device, choice):
    assert str(choose_trainer_dtype(TrainerConfig(), Ranks(torch.device(device)))) == choice
