"""What a step tells: sums over its entries, grouped by environment and by the age of the weights that sampled.

Every row leaves a small table of sums on the device, made by scattering whole columns; they are fetched once, at the
end of the step, and added up by name. Sums of several ranks add up the same way, so `Sums` is what ranks exchange.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.model.device_copy import copy_to_device
from ramify.trace import Forest
from ramify.train.model_inputs import ModelInputs
from ramify.train.policy import PolicyOutput


class MetricKey(NamedTuple):
    """Entries of one environment sampled by weights `age` steps old; None where that is unknown."""

    env: str
    staleness: int | None


# One row per group: entries, entries with a sampler logprob, Σ(ρ − lr − 1), Σ entropy, masked entries; then entries by
# their |lr|, counted between EDGES, as counts add up where a quantile does not; last, max |lr|
SUM_COLUMNS = ("entries", "sampled", "mismatch_kl", "entropy", "masked")
LOG_RATIO_EDGES = 2.0 ** (np.arange(-64, 13) / 4)  # 1.5e-5 to 8, each a fifth above the one before
NUM_COLUMNS = len(SUM_COLUMNS) + len(LOG_RATIO_EDGES) + 1 + 1
QUANTILE = 0.999


@dataclass(slots=True)
class MetricSums:
    """The part of a step's metrics that adds up."""

    component_losses: dict[str, float] = field(default_factory=dict)
    rows_by_key: dict[MetricKey, np.ndarray] = field(default_factory=dict)  # WIDTH numbers each
    tokens: int = 0
    padding: int = 0
    flat_tokens: int = 0
    flops: float = 0.0

    @classmethod
    def merge(cls, parts: Iterable["MetricSums"]) -> "MetricSums":
        total = cls()
        for part in parts:
            for name, value in part.component_losses.items():
                total.component_losses[name] = total.component_losses.get(name, 0.0) + value
            for group, row in part.rows_by_key.items():
                total.rows_by_key[group] = _merge_rows(total.rows_by_key.get(group), row)
            total.tokens += part.tokens
            total.padding += part.padding
            total.flat_tokens += part.flat_tokens
            total.flops += part.flops
        return total


def _merge_rows(left: np.ndarray | None, right: np.ndarray) -> np.ndarray:
    if left is None:
        return right
    both = left + right
    both[-1] = max(left[-1], right[-1])
    return both


class MetricAccumulator:
    """Sums of a step's rows, on the device until they are asked for."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._packs: list[tuple[list[MetricKey], Tensor, dict[str, Tensor]]] = []
        self._host_sums = MetricSums()

    def add(self, inputs: ModelInputs, output: PolicyOutput, flops: float) -> None:
        forest = inputs.forest
        groups, number = assign_metric_keys(forest, self.step)
        self._packs.append((groups, _sum_by_key(inputs, output, number, len(groups)), output.component_losses))
        self._host_sums.tokens += forest.num_tokens
        self._host_sums.padding += inputs.input_ids.numel() - forest.num_tokens
        self._host_sums.flat_tokens += forest.flat_tokens
        self._host_sums.flops += flops

    def flatten_device_values(self, device: torch.device) -> Tensor:
        """All that is still on the device, in a row, for `sums`."""
        every = [tensor.double().flatten() for _, table, terms in self._packs for tensor in (table, *terms.values())]
        return torch.cat(every) if every else torch.empty(0, dtype=torch.float64, device=device)

    def to_sums(self, device_values: Sequence[float]) -> MetricSums:
        """Everything so far, with the numbers that came from the device."""
        parts, left = [self._host_sums], np.array(device_values)
        for groups, table, terms in self._packs:
            values, found, left = np.split(left, [table.numel(), table.numel() + len(terms)])
            parts.append(MetricSums(dict(zip(terms, found.tolist())), dict(zip(groups, values.reshape(table.shape)))))
        return MetricSums.merge(parts)


def assign_metric_keys(forest: Forest, step: int) -> tuple[list[MetricKey], np.ndarray]:
    """The groups of a forest's entries, and for each entry the number of its group."""
    of_version = [*(step - version.step for version in forest.versions), None]  # the version of some is -1: unknown
    ages = list(dict.fromkeys(of_version))
    age = np.array([ages.index(each) for each in of_version])[forest.targets.version]
    code = forest.expand_sequence_column("env").astype(np.int64) * len(ages) + age
    found = np.flatnonzero(np.bincount(code))
    names = [MetricKey(forest.envs[each // len(ages)], ages[each % len(ages)]) for each in found.tolist()]
    return names, np.searchsorted(found, code)


def _sum_by_key(inputs: ModelInputs, output: PolicyOutput, key_index: np.ndarray, num_keys: int) -> Tensor:
    """[groups, WIDTH], by scattering columns."""
    device = output.logprob.device
    table = torch.zeros(
        num_keys, NUM_COLUMNS, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device
    )
    if not num_keys:
        return table
    number, edges = copy_to_device([key_index, LOG_RATIO_EDGES], device)
    ratio = (output.logprob - inputs.head_inputs.all_entries.sampler_logprob).to(table.dtype)
    sampled = ~ratio.isnan()
    ratio = ratio.nan_to_num(0.0)
    masked = torch.zeros_like(ratio)
    if output.masked is not None:
        masked[inputs.head_inputs.component_entries["rl"]] = output.masked.to(masked.dtype)
    sampled = sampled.to(ratio.dtype)
    columns = [torch.ones_like(ratio), sampled, ratio.exp() - ratio - 1, output.entropy.to(ratio.dtype), masked]
    table[:, : len(SUM_COLUMNS)].index_add_(0, number, torch.stack(columns, 1))
    between = torch.bucketize(ratio.abs(), edges.to(ratio.dtype))
    table[:, len(SUM_COLUMNS) : -1].index_put_((number, between), sampled, accumulate=True)
    table[:, -1].scatter_reduce_(0, number, ratio.abs(), "amax")
    return table


@dataclass(slots=True, frozen=True)
class StepMetrics:
    """One optimizer step, measured."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool  # the gradient was not finite: the weights stayed
    seconds: float
    peak_flops: float | None
    sums: MetricSums

    @property
    def tokens_per_second(self) -> float:
        return self.sums.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        return self.sums.flops / self.seconds / self.peak_flops if self.peak_flops else None

    @property
    def token_ratio(self) -> float:
        """Flat tokens over forest tokens: what sharing prefixes saves."""
        return self.sums.flat_tokens / max(1, self.sums.tokens)

    def to_dict(self) -> Mapping[str, float]:
        """Every number under its name, as it is logged."""
        found = {
            "train/loss": self.loss,
            "train/grad_norm": self.grad_norm,
            "train/lr": self.lr,
            "train/skipped": float(self.skipped),
            "train/seconds": self.seconds,
            "train/tokens_per_second": self.tokens_per_second,
            "forest/tokens": float(self.sums.tokens),
            "forest/padding": float(self.sums.padding),
            "forest/token_ratio": self.token_ratio,
        }
        if self.mfu is not None:
            found["train/mfu"] = self.mfu
        found.update({f"loss/{name}": value for name, value in sorted(self.sums.component_losses.items())})
        every = [
            (f"/{group.env}/age_{'unknown' if group.staleness is None else group.staleness}", row)
            for group, row in self._sorted_rows()
        ]
        total: np.ndarray | None = None
        for _, row in every:
            total = _merge_rows(total, row)
        for where, row in [("", total), *every] if total is not None else []:
            found.update({f"{name}{where}": value for name, value in _compute_means(row).items()})
        return found

    def _sorted_rows(self) -> list[tuple[MetricKey, np.ndarray]]:
        return sorted(
            self.sums.rows_by_key.items(),
            key=lambda item: (item[0].env, -1 if item[0].staleness is None else item[0].staleness),
        )


def _compute_means(row: np.ndarray) -> dict[str, float]:
    entries, sampled, kl, entropy, masked = map(float, row[: len(SUM_COLUMNS)])
    found = {"entries": entries, "entropy": entropy / max(1.0, entries)}
    if sampled:
        found |= {"mismatch_kl": kl / sampled, "masked": masked / sampled, "max_log_ratio": float(row[-1])}
        found["p999_log_ratio"] = _compute_quantile(row[len(SUM_COLUMNS) : -1], float(row[-1]))
    return found


def _compute_quantile(counts: np.ndarray, largest: float) -> float:
    """The first edge that all but a thousandth of the entries are below."""
    at = int(np.searchsorted(np.cumsum(counts), QUANTILE * counts.sum()))
    return min(largest, float(LOG_RATIO_EDGES[at])) if at < len(LOG_RATIO_EDGES) else largest
