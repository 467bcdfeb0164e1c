"""Small random models and batches, and training of the same model path by path as the reference."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    Gemma2Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    MiniMaxConfig,
    MistralConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from ramify.model.pack_layout import choose_pack_layout
from ramify.trace import Annotation, Forest, build_forest
from ramify.train.batch import Batch, pack_forests
from ramify.train.distributed import Ranks
from ramify.train.losses import load_loss
from ramify.train.model_inputs import build_model_inputs
from ramify.train.policy_model import PolicyModel, get_attention_name
from tests.support.forests import COMPONENTS, Attempt, Planned

SINGLE_RANK = Ranks(torch.device("cpu"))
VOCAB = 50
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # so that attention matters
    "pad_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "sliding": MistralConfig(**SIZES, sliding_window=9),
    "mixed": Qwen3Config(
        **SIZES,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "sinks": GptOssConfig(
        **SIZES, head_dim=16, sliding_window=9, attention_bias=False, num_local_experts=4, num_experts_per_tok=2
    ),
    "softcaps": Gemma2Config(
        **SIZES, head_dim=16, sliding_window=9, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
}
DELTA_NET = {
    **SIZES,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MAMBA2_SIZES = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 32,
}
HYBRIDS = {  # as published, but narrower and with fewer layers
    "qwen3_5": Qwen3_5TextConfig(
        **DELTA_NET,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    ),
    "qwen3_next": Qwen3NextConfig(
        **DELTA_NET,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        norm_topk_prob=True,
        partial_rotary_factor=0.5,
    ),
    "olmo_hybrid": OlmoHybridConfig(**{**DELTA_NET, "linear_num_value_heads": 2, "linear_value_head_dim": 32}),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **SIZES,
        **MAMBA2_SIZES,
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=96,
        embedding_multiplier=3.0,
        residual_multiplier=0.5,
        attention_multiplier=0.25,
        logits_scaling=2.0,
    ),
    "lfm2": Lfm2Config(**SIZES, block_auto_adjust_ff_dim=False, conv_L_cache=3, layer_types=["conv", "full_attention"]),
}
FALCON_H1 = {
    **SIZES,
    **MAMBA2_SIZES,
    "mamba_d_ssm": 96,
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 2.0,
    "ssm_multipliers": [0.5, 2.0, 0.7, 1.5, 0.8],
    "lm_head_multiplier": 0.5,
}
MAMBA2_HYBRIDS = {  # with the Mamba-2 layers of granitemoehybrid
    "bamba": BambaConfig(**SIZES, **MAMBA2_SIZES, attn_layer_indices=[1]),
    "nemotron_h": NemotronHConfig(
        **{**SIZES, "num_hidden_layers": 3},
        layers_block_type=["mamba", "attention", "mlp"],
        head_dim=12,
        mamba_num_heads=6,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=32,
    ),
    "falcon_h1": FalconH1Config(**FALCON_H1),
    "falcon_h1_norm": FalconH1Config(**FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False),
}
SEQUENTIAL = MiniMaxConfig(  # its layers read rows only
    **SIZES,
    head_dim=12,
    num_local_experts=2,
    num_experts_per_tok=2,
    layer_types=["linear_attention", "full_attention"],
)


def build_model(config, attention: str, seed: int = 0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):  # decays as in a trained model: what a prefix leaves behind matters to its branches
            torch.nn.init.uniform_(weight, -5.0, -1.0)
    return model


def copy_weights(trainer) -> dict[str, torch.Tensor]:
    """Return the master weights of a trainer in float32, by name."""
    masters = trainer.master_weights
    return {name: masters.to_float32(parameter).clone() for name, parameter in masters.named_parameters()}


def build_policy(config, seed: int = 0, loss: str = "dppo") -> PolicyModel:
    layout = choose_pack_layout(config)
    return PolicyModel(build_model(config, get_attention_name(layout), seed), layout, load_loss(loss))


@dataclass
class TrainResult:
    gradients: dict[str, torch.Tensor]
    loss: float
    abs_loss: float  # the sum of the absolute losses of all entries
    tokens: int  # computed by the model


def get_gradients(module) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}


def train_forest(module: PolicyModel, packs: Iterable[Forest], counts: dict[str, int]) -> TrainResult:
    module.zero_grad(set_to_none=True)
    loss, tokens = 0.0, 0
    for pack in packs:
        inputs = build_model_inputs(pack, layout=module.layout, attention=module.attention)
        output = module(inputs, counts)
        output.loss.backward()
        loss, tokens = loss + float(output.loss.detach()), tokens + inputs.input_ids.numel()
    return TrainResult(get_gradients(module.model), loss, 0.0, tokens)


def train_flat(
    model,
    attempts: Sequence[Attempt],
    counts: dict[str, int],
    build_image_inputs: Callable[[list[int], list[bytes]], dict[str, torch.Tensor]] = lambda ids, images: {},
) -> TrainResult:
    """Train every root-to-leaf path of every attempt by itself, with the attention and head of transformers.

    `build_image_inputs` returns the model's inputs for the images of a path.
    """
    model.zero_grad(set_to_none=True)
    loss, abs_loss, tokens = 0.0, 0.0, 0
    for attempt in attempts:
        trained_nodes: set[int] = set()
        for leaf in attempt.leaves():
            path = attempt.path(leaf)
            ids = [token for node in path for token in attempt.nodes[node].tokens]
            entries = [
                (attempt.depth(note.node) + offset, get_sampler_logprob(attempt.nodes[note.node], offset), values)
                for note in attempt.notes
                if note.node in path and note.node not in trained_nodes
                for offset, values in attempt.values(note)
            ]
            trained_nodes.update(path)
            if not entries:
                continue
            positions = torch.tensor([position for position, _, _ in entries])
            images = [data for node in path for _, _, data in attempt.nodes[node].images]
            image_inputs = build_image_inputs(ids, images)
            logits = model(torch.tensor([ids]), use_cache=False, **image_inputs).logits[0] / attempt.temperature
            logprob = logits.log_softmax(-1)[positions - 1, torch.tensor(ids)[positions]]
            columns = {name: torch.tensor([values[name] for _, _, values in entries]) for name in entries[0][2]}
            sampler = torch.tensor([sampler_logprob for _, sampler_logprob, _ in entries])
            losses = compute_losses(logprob, sampler, columns, counts)
            losses.sum().backward()
            abs_loss += float(losses.detach().abs().sum())
            loss, tokens = loss + float(losses.detach().sum()), tokens + len(ids)
    return TrainResult(get_gradients(model), loss, abs_loss, tokens)


def compute_losses(logprob, sampler, columns, counts) -> torch.Tensor:
    """Return w/N times the loss of each component of each entry, with dppo for `rl`."""
    log_ratio = logprob - torch.where(sampler.isnan(), logprob.detach(), sampler)
    ratio, gap = log_ratio.exp(), (logprob.exp() - sampler.exp()).detach()
    masked = ((columns["advantage"] > 0) & (gap > 0.2)) | ((columns["advantage"] < 0) & (gap < -0.2))
    ref_gap = torch.where(columns["ref_logprob"].isnan(), 0.0, columns["ref_logprob"] - logprob.detach())
    distance = torch.where(columns["ref_logprob"].isnan(), 0.0, columns["ref_logprob"] - logprob)
    losses = {
        "rl": torch.where(masked, 0.0, -columns["advantage"] * ratio + 1e-3 * log_ratio**2),
        "ce": -logprob,
        "ref_kl": -ref_gap * ratio + 1e-3 * log_ratio**2,
        "kl": distance.exp() - distance - 1,
    }
    return torch.stack([columns[name] / max(1, counts[name]) * losses[name] for name in COMPONENTS])


def get_sampler_logprob(node: Planned, offset: int) -> float:
    start, stop = node.sampled
    return node.logprobs[offset - start] if start <= offset < stop else np.nan


def assert_same_gradients(actual: TrainResult, flat: TrainResult, tolerance: float = 1e-5) -> None:
    assert actual.gradients.keys() == flat.gradients.keys()
    for name, gradient in flat.gradients.items():
        assert gradient.norm() > 0, name
        error = (actual.gradients[name] - gradient).norm() / gradient.norm()
        assert error <= tolerance, f"{name}: {error}"
    assert abs(actual.loss - flat.loss) <= tolerance * flat.abs_loss


def count_entries(forests: Iterable[Forest]) -> dict[str, int]:
    counts = [forest.count_by_component() for forest in forests]
    return {name: sum(count[name] for count in counts) for name in COMPONENTS}


def build_attempt(rng: Random, name: str, parents: list[int], temperature: float = 1.0, tokens: int = 10) -> Attempt:
    """Build a random attempt in which roots are prompts and all other nodes are sampled.

    Advantages, ce and (at temperature 1) ref_kl and kl are mixed.
    """
    nodes: list[Planned] = []
    for parent in parents:
        ids = tuple(rng.randrange(VOCAB) for _ in range(tokens))
        logprobs = tuple(rng.uniform(-5.0, -0.1) for _ in range(tokens - 2))
        nodes.append(Planned(parent, ids) if parent < 0 else Planned(parent, ids, (2, tokens), logprobs))
    annotations = tuple(
        Annotation(
            name,
            node,
            advantage=rng.choice([-1.0, 0.5, 2.0]),
            ce=rng.choice([0.0, 0.1]),
            ref_kl=0.2 if temperature == 1 else 0.0,
            ref_logprobs=-3.0,
            kl=0.1 if temperature == 1 else 0.0,
        )
        for node, parent in enumerate(parents)
        if parent >= 0
    )
    return Attempt(name, tuple(nodes), annotations, temperature)


def build_group(rng: Random, count: int, parents: list[int], tokens: int = 10) -> list[Attempt]:
    """Build attempts at one prompt whose first replies start with the same tokens; their temperatures differ."""
    first = build_attempt(rng, "a0", parents, tokens=tokens)
    attempts = [first]
    for index in range(1, count):
        other = build_attempt(rng, f"a{index}", parents, (1.0, 0.7)[index % 2], tokens)
        shared = first.nodes[1].tokens[: tokens // 2] + other.nodes[1].tokens[tokens // 2 :]
        nodes = (first.nodes[0], replace(other.nodes[1], tokens=shared), *other.nodes[2:])
        attempts.append(replace(other, nodes=nodes))
    return attempts


def random_batches(count: int, pack_tokens: int = 128) -> list[Batch]:
    """Build batches of unequal trees: some steps have one small tree, some have several large ones."""
    batches = []
    for step in range(count):
        rng = Random(step)
        groups = [build_group(rng, rng.randint(1, 5), [-1, 0, 1, 0]) for _ in range(rng.randint(1, 3))]
        forests = [build_forest([attempt.sample() for attempt in group]) for group in groups]
        batches.append(Batch.from_packs(step, pack_forests(forests, pack_tokens)))
    return batches
