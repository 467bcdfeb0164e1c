"""Small random models of the shapes that matter, and the same model run the plain way, path by path."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, LlamaConfig, MistralConfig, Qwen3Config

from ramify.model.pack_layout import choose_pack_layout
from ramify.trace import Forest
from ramify.train.losses import load_loss
from ramify.train.model_inputs import build_model_inputs
from ramify.train.policy import PolicyModel, get_attention_name
from tests.trace.forests import COMPONENTS, Attempt, Planned

VOCAB = 50
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
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
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
}
HYBRID = Lfm2Config(
    **{name: value for name, value in SIZES.items() if name != "intermediate_size"},
    intermediate_size=96,
    block_auto_adjust_ff_dim=False,
    layer_types=["conv", "full_attention", "conv"],
)


def made(config, attention: str, seed: int = 0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention, dtype=torch.float32)


def policy(config, seed: int = 0, loss: str = "dppo") -> PolicyModel:
    layout = choose_pack_layout(config)
    return PolicyModel(made(config, get_attention_name(layout), seed), layout, load_loss(loss))


@dataclass
class Result:
    gradients: dict[str, torch.Tensor]
    loss: float
    size: float  # the sum of |terms|
    tokens: int  # that the model computed


def gradients(module) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}


def train_forest(module: PolicyModel, packs: Iterable[Forest], counts: dict[str, int]) -> Result:
    module.zero_grad(set_to_none=True)
    loss, tokens = 0.0, 0
    for pack in packs:
        row = build_model_inputs(pack, layout=module.layout, sliding_windows=module.sliding_windows)
        seen = module(row, counts)
        seen.loss.backward()
        loss, tokens = loss + float(seen.loss.detach()), tokens + row.input_ids.numel()
    return Result(gradients(module.model), loss, 0.0, tokens)


def train_flat(model, attempts: Sequence[Attempt], counts: dict[str, int]) -> Result:
    """Every root-to-leaf path of every attempt by itself, through transformers' own attention and head."""
    model.zero_grad(set_to_none=True)
    loss, size, tokens = 0.0, 0.0, 0
    for attempt in attempts:
        done: set[int] = set()
        for leaf in attempt.leaves():
            path = attempt.path(leaf)
            ids = [token for node in path for token in attempt.nodes[node].tokens]
            rows = [
                (attempt.depth(note.node) + offset, logprob(attempt.nodes[note.node], offset), values)
                for note in attempt.notes
                if note.node in path and note.node not in done
                for offset, values in attempt.values(note)
            ]
            done.update(path)
            if not rows:
                continue
            places = torch.tensor([place for place, _, _ in rows])
            logits = model(torch.tensor([ids]), use_cache=False).logits[0] / attempt.temperature
            found = logits.log_softmax(-1)[places - 1, torch.tensor(ids)[places]]
            columns = {name: torch.tensor([values[name] for _, _, values in rows]) for name in rows[0][2]}
            terms = dppo_terms(found, torch.tensor([sampler for _, sampler, _ in rows]), columns, counts)
            terms.sum().backward()
            size += float(terms.detach().abs().sum())
            loss, tokens = loss + float(terms.detach().sum()), tokens + len(ids)
    return Result(gradients(model), loss, size, tokens)


def dppo_terms(found, sampler, columns, counts) -> torch.Tensor:
    """w/N times the loss of each component of each entry, as the design says it."""
    lr = found - torch.where(sampler.isnan(), found.detach(), sampler)
    ratio, gap = lr.exp(), (found.exp() - sampler.exp()).detach()
    drop = ((columns["advantage"] > 0) & (gap > 0.2)) | ((columns["advantage"] < 0) & (gap < -0.2))
    bracket = torch.where(columns["reference"].isnan(), 0.0, columns["reference"] - found.detach())
    losses = {
        "rl": torch.where(drop, 0.0, -columns["advantage"] * ratio + 1e-3 * lr**2),
        "ce": -found,
        "ref_kl": -bracket * ratio + 1e-3 * lr**2,
    }
    return torch.stack([columns[name] / max(1, counts[name]) * losses[name] for name in COMPONENTS])


def logprob(node: Planned, offset: int) -> float:
    start, stop = node.sampled
    return node.logprobs[offset - start] if start <= offset < stop else np.nan


def assert_equal(ours: Result, flat: Result, tolerance: float = 1e-5) -> None:
    assert ours.gradients.keys() == flat.gradients.keys()
    for name, gradient in flat.gradients.items():
        assert gradient.norm() > 0, name
        error = (ours.gradients[name] - gradient).norm() / gradient.norm()
        assert error <= tolerance, f"{name}: {error}"
    assert abs(ours.loss - flat.loss) <= tolerance * flat.size


def total(forests: Iterable[Forest]) -> dict[str, int]:
    found = [forest.count_by_component() for forest in forests]
    return {name: sum(each[name] for each in found) for name in COMPONENTS}
