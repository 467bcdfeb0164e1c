"""Metrics of a step: sums over its entries, by environment and by the staleness of the weights that sampled.

Every pack leaves a small table of sums on the device, computed by scattering columns. The tables are copied to the host
once, at the end of the step, and added up by key. Sums of several ranks add up the same way, so ranks exchange
`MetricSums`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.model.active_parameters import WeightCounts
from ramify.model.device_copy import copy_to_device
from ramify.model.experts import ATTENTION_LAYER_TYPES
from ramify.model.recurrent_layers import count_state_products
from ramify.trace import Forest
from ramify.train.model_inputs import ModelInputs
from ramify.train.policy_model import PolicyOutput

FLOPS_FORMULA = (
    "6·(weights in layers)·tokens + 6·vocabulary·width·scored + 12·heads·head_dim·Σ over layers of visible pairs"
    " + 18·(elements of gated delta states)·tokens + 12·(elements of Mamba-2 states)·tokens"
)


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """FLOPs of a model, forward and backward: the one formula behind every MFU that is reported.

    Each matrix product counts once: two operations per weight and token in the forward pass, four in the backward pass,
    or two for a weight that is not trained. The head counts for the pairs that it scores, attention for the visible
    pairs. A gated delta rule multiplies its state by three vectors per token, Mamba-2 by two; what chunks compute
    beyond that does not count. Recomputed activations and padding do not count.
    """

    per_token: float
    per_scored_token: float
    per_visible_pair: float  # of one attention layer
    layer_windows: tuple[int, ...]  # the sliding window of each attention layer; 0 if it has none

    @classmethod
    def from_model(cls, model: Any) -> "FlopsModel":
        """Read the sizes of a transformers model."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None) or 0  # 0 if no layer attends
        head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        window = getattr(config, "sliding_window", None) or 0
        layer_types = getattr(config, "layer_types", None)
        if not layer_types:  # all attention layers have the window, if there is one
            blocks = getattr(config, "layers_block_type", None) or ["attention"] * config.num_hidden_layers
            layer_types = ["sliding_attention" for block in blocks if block == "attention"]
        weights = WeightCounts.from_model(model)
        return cls(
            per_token=6.0 * weights.active - 2.0 * weights.frozen + 6.0 * count_state_products(model),
            per_scored_token=(6.0 if model.get_output_embeddings().weight.requires_grad else 4.0) * weights.head,
            per_visible_pair=12.0 * heads * head_dim,
            layer_windows=tuple(
                window if layer_type == "sliding_attention" else 0
                for layer_type in layer_types
                if layer_type in ATTENTION_LAYER_TYPES or layer_type == "hybrid"  # recurrent layers have no pairs
            ),
        )

    def count_flops(self, forest: Forest) -> float:
        """Return the FLOPs of training on a forest."""
        visible = forest.position_ids[: forest.num_tokens].astype(np.int64) + 1  # a token sees its path
        pairs = sum(
            num_layers * int((np.minimum(visible, window) if window else visible).sum())
            for window, num_layers in Counter(self.layer_windows).items()
        )
        scored = len(forest.unique_head_inputs()[0])
        return self.per_token * forest.num_tokens + self.per_scored_token * scored + self.per_visible_pair * pairs


class MetricKey(NamedTuple):
    """Identifies the entries of one environment that were sampled by weights `staleness` steps old."""

    env: str
    staleness: int | None  # None if the version is unknown


# A row of sums: entries, entries with a sampler logprob, Σ(ρ − log ρ − 1), Σ entropy, masked entries; entries with a
# reference logprob, Σ(log π − log π_ref), Σ min(1, π_ref / π), Σ −log π_ref, Σ w, Σ −w·log π_ref with the importance
# weight w = min(π_ref / π, MAX_WEIGHT); then a histogram of |log ρ| between LOG_RATIO_EDGES, since counts add up where
# quantiles do not; last, max |log ρ|.
SAMPLER_COLUMNS = ("entries", "sampled", "mismatch_kl", "entropy", "masked")
REFERENCE_COLUMNS = ("referenced", "reference_kl", "reference_agreement", "reference_cross_entropy")
WEIGHTED_COLUMNS = ("reference_weight", "reference_entropy")
SUM_COLUMNS = (*SAMPLER_COLUMNS, *REFERENCE_COLUMNS, *WEIGHTED_COLUMNS)
MAX_WEIGHT = 10.0
LOG_RATIO_EDGES = 2.0 ** (np.arange(-64, 13) / 4)  # 1.5e-5 to 8, each a fifth above the one before
NUM_COLUMNS = len(SUM_COLUMNS) + len(LOG_RATIO_EDGES) + 1 + 1
QUANTILE = 0.999


@dataclass(slots=True)
class MetricSums:
    """The part of a step's metrics that adds up over packs and ranks."""

    component_losses: dict[str, float] = field(default_factory=dict)
    rows_by_key: dict[MetricKey, np.ndarray] = field(default_factory=dict)  # NUM_COLUMNS values each
    tokens: int = 0
    padding: int = 0
    flat_tokens: int = 0
    unique_tokens: int = 0  # of models with recurrent layers: tokens of the trees before packing; else 0
    flops: float = 0.0
    images: int = 0  # images that the vision tower encoded

    @classmethod
    def merge(cls, parts: Iterable["MetricSums"]) -> "MetricSums":
        """Return the sum of several."""
        total = cls()
        for part in parts:
            for name, value in part.component_losses.items():
                total.component_losses[name] = total.component_losses.get(name, 0.0) + value
            for key, row in part.rows_by_key.items():
                known = total.rows_by_key.get(key)
                total.rows_by_key[key] = row if known is None else _merge_rows(known, row)
            total.tokens += part.tokens
            total.padding += part.padding
            total.flat_tokens += part.flat_tokens
            total.unique_tokens += part.unique_tokens
            total.flops += part.flops
            total.images += part.images
        return total


def _merge_rows(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    row = left + right
    row[-1] = max(left[-1], right[-1])
    return row


class MetricAccumulator:
    """The sums of a step's packs, on the device until `to_sums`."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._packs: list[tuple[list[MetricKey], Tensor, dict[str, Tensor]]] = []  # keys, table, component losses
        self._host_sums = MetricSums()

    def add(self, inputs: ModelInputs, output: PolicyOutput, flops: float) -> None:
        """Add the sums of one pack."""
        forest = inputs.forest
        keys, key_index = assign_metric_keys(forest, self.step)
        self._packs.append((keys, _sum_by_key(inputs, output, key_index, len(keys)), output.component_losses))
        self._host_sums.tokens += forest.num_tokens
        self._host_sums.padding += inputs.input_ids.numel() - forest.num_tokens
        self._host_sums.flat_tokens += forest.flat_tokens
        self._host_sums.flops += flops

    def add_images(self, count: int, flops: float) -> None:
        """Add the images that the vision tower encoded for the packs."""
        self._host_sums.images += count
        self._host_sums.flops += flops

    def add_unique_tokens(self, count: int) -> None:
        """Add the unique tokens of the packs of a model with recurrent layers."""
        self._host_sums.unique_tokens += count

    def flatten_device_values(self, device: torch.device) -> Tensor:
        """Concatenate all device values into one tensor, as `to_sums` expects them."""
        tensors = [
            tensor.double().flatten() for _, table, losses in self._packs for tensor in (table, *losses.values())
        ]
        return torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.float64, device=device)

    def to_sums(self, device_values: Sequence[float]) -> MetricSums:
        """Return the sums, given the values of `flatten_device_values` on the host."""
        parts, remaining = [self._host_sums], np.array(device_values)
        for keys, table, losses in self._packs:
            size = table.numel()
            rows, loss_values, remaining = np.split(remaining, [size, size + len(losses)])
            parts.append(
                MetricSums(dict(zip(losses, loss_values.tolist())), dict(zip(keys, rows.reshape(table.shape))))
            )
        return MetricSums.merge(parts)


def assign_metric_keys(forest: Forest, step: int) -> tuple[list[MetricKey], np.ndarray]:
    """Return the keys of a forest's entries, and for each entry the index of its key."""
    staleness_by_version = [*(step - version.step for version in forest.versions), None]  # unknown versions are -1
    staleness_values = list(dict.fromkeys(staleness_by_version))
    count = len(staleness_values)
    staleness_index = np.array([staleness_values.index(value) for value in staleness_by_version])
    env_index = forest.expand_call_column("env").astype(np.int64)
    entry_codes = env_index * count + staleness_index[forest.targets.version]
    codes = np.flatnonzero(np.bincount(entry_codes))
    keys = [MetricKey(forest.envs[code // count], staleness_values[code % count]) for code in codes.tolist()]
    return keys, np.searchsorted(codes, entry_codes)


def _sum_by_key(inputs: ModelInputs, output: PolicyOutput, key_index: np.ndarray, num_keys: int) -> Tensor:
    """Return the sums of a pack's entries [num_keys, NUM_COLUMNS]."""
    device = output.logprob.device
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    table = torch.zeros(num_keys, NUM_COLUMNS, dtype=dtype, device=device)
    if not num_keys:
        return table
    index, edges = copy_to_device([key_index, LOG_RATIO_EDGES], device)
    log_ratio = (output.logprob - inputs.head_inputs.all_entries.sampler_logprob).to(dtype)
    sampled = (~log_ratio.isnan()).to(dtype)
    log_ratio = log_ratio.nan_to_num(0.0)
    masked = torch.zeros_like(log_ratio)
    if output.masked is not None:
        masked[inputs.head_inputs.component_entries["rl"]] = output.masked.to(dtype)
    mismatch_kl = log_ratio.exp() - log_ratio - 1
    columns = [torch.ones_like(log_ratio), sampled, mismatch_kl, output.entropy.to(dtype), masked]
    reference = inputs.head_inputs.all_entries.reference_logprob.to(dtype)
    distance = (output.logprob.to(dtype) - reference).nan_to_num(0.0)
    referenced = (~reference.isnan()).to(dtype)
    agreement = (-distance).exp().clamp(max=1.0) * referenced
    cross_entropy = -reference.nan_to_num(0.0)
    weight = (-distance).exp().clamp(max=MAX_WEIGHT) * referenced
    columns += [referenced, distance, agreement, cross_entropy, weight, weight * cross_entropy]
    table[:, : len(SUM_COLUMNS)].index_add_(0, index, torch.stack(columns, 1))
    bins = torch.bucketize(log_ratio.abs(), edges.to(dtype))
    table[:, len(SUM_COLUMNS) : -1].index_put_((index, bins), sampled, accumulate=True)
    table[:, -1].scatter_reduce_(0, index, log_ratio.abs(), "amax")
    return table


@dataclass(slots=True, frozen=True)
class StepMetrics:
    """The metrics of one optimizer step."""

    step: int
    loss: float
    grad_norm: float  # before clipping
    lr: float
    skipped: bool  # whether the gradient was not finite, so that the weights did not change
    seconds: float
    wait_seconds: float  # in which the host waited for engines that copied the weights
    peak_flops: float | None  # of the devices of all ranks, per second; None if unknown
    sums: MetricSums

    @property
    def tokens_per_second(self) -> float:
        """Forest tokens trained per second."""
        return self.sums.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization; None if the device's peak is unknown."""
        return self.sums.flops / self.seconds / self.peak_flops if self.peak_flops else None

    @property
    def token_ratio(self) -> float:
        """Flat tokens over forest tokens: what sharing prefixes saves."""
        return self.sums.flat_tokens / max(1, self.sums.tokens)

    @property
    def chain_cost(self) -> float | None:
        """Computed tokens divided by unique tokens: the cost of prefixes repeated across packs.

        None for models without recurrent layers.
        """
        return self.sums.tokens / self.sums.unique_tokens if self.sums.unique_tokens else None

    def to_dict(self) -> Mapping[str, float]:
        """Return all metrics by the names under which they are logged."""
        metrics = {
            "train/loss": self.loss,
            "train/grad_norm": self.grad_norm,
            "train/lr": self.lr,
            "train/skipped": float(self.skipped),
            "train/seconds": self.seconds,
            "train/copy_wait_seconds": self.wait_seconds,
            "train/tokens_per_second": self.tokens_per_second,
            "forest/tokens": float(self.sums.tokens),
            "forest/padding": float(self.sums.padding),
            "forest/token_ratio": self.token_ratio,
        }
        if self.sums.images:
            metrics["forest/images"] = float(self.sums.images)
        if self.mfu is not None:
            metrics["train/mfu"] = self.mfu
        if self.chain_cost is not None:
            metrics["forest/chain_cost"] = self.chain_cost
        metrics.update({f"loss/{name}": value for name, value in sorted(self.sums.component_losses.items())})
        rows = [
            (f"/{key.env}/age_{'unknown' if key.staleness is None else key.staleness}", row)
            for key, row in sorted(
                self.sums.rows_by_key.items(),
                key=lambda item: (item[0].env, -1 if item[0].staleness is None else item[0].staleness),
            )
        ]
        total = [("", reduce(_merge_rows, (row for _, row in rows)))] if rows else []
        for suffix, row in [*total, *rows]:
            metrics.update({f"{name}{suffix}": value for name, value in _compute_means(row).items()})
        return metrics


def _compute_means(row: np.ndarray) -> dict[str, float]:
    entries, sampled, kl, entropy, masked, referenced, *reference_sums = map(float, row[: len(SUM_COLUMNS)])
    means = {"entries": entries, "entropy": entropy / max(1.0, entries)}
    if sampled:
        means |= {"mismatch_kl": kl / sampled, "masked": masked / sampled, "max_log_ratio": float(row[-1])}
        means["p999_log_ratio"] = _compute_quantile(row[len(SUM_COLUMNS) : -1], float(row[-1]))
    if referenced:
        *sums, weight, weighted_sum = reference_sums
        means |= {name: value / referenced for name, value in zip(REFERENCE_COLUMNS[1:], sums, strict=True)}
        means["reference_entropy"] = weighted_sum / weight if weight else 0.0
    return means


def _compute_quantile(counts: np.ndarray, largest: float) -> float:
    """Return the first edge that all but a thousandth of the entries are below."""
    index = int(np.searchsorted(np.cumsum(counts), QUANTILE * counts.sum()))
    return min(largest, float(LOG_RATIO_EDGES[index])) if index < len(LOG_RATIO_EDGES) else largest
