"""Normalization of the loss: how the entries of a source are averaged.

The trainer divides each component by its number of entries in the batch, so every token counts the same. Another mean
is a factor of the weights, which is computed from the whole batch when it is formed: neither packing nor the number of
ranks changes it, and a source keeps its share of the loss whatever the other sources use.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ramify.trace import Forest
from ramify.trace.forest import LOSS_COMPONENTS

NormalizationType = Literal["token", "sequence", "fixed"]


@dataclass(frozen=True, slots=True)
class LossNormalization:
    """How the entries of a source are averaged; `tokens` is the length that `fixed` divides by."""

    type: NormalizationType = "token"
    tokens: int = 1


TOKEN_MEAN = LossNormalization()


def normalize_forests(
    forests: Sequence[Forest], sources: Sequence[str], normalizations: Sequence[LossNormalization]
) -> list[Forest]:
    """Return the forests of a batch, with their weights scaled by the normalization of each forest's source."""
    result = list(forests)
    for source in dict.fromkeys(sources):
        indices = [index for index, name in enumerate(sources) if name == source]
        normalization = normalizations[indices[0]]
        if normalization.type != "token":
            for index, forest in zip(indices, _normalize([forests[index] for index in indices], normalization)):
                result[index] = forest
    return result


def _normalize(forests: Sequence[Forest], normalization: LossNormalization) -> list[Forest]:
    """Return all forests of one source in a batch, with scaled weights."""
    weights: list[dict[str, np.ndarray]] = [{} for _ in forests]
    for component in LOSS_COMPONENTS:
        columns = [getattr(forest.targets, component) for forest in forests]
        rollouts = [forest.expand_call_column("trace") for forest in forests]
        # Entries of each rollout, by forest; a rollout is a trace of its group.
        lengths = [
            np.bincount(rollout[column != 0], minlength=len(forest.traces))
            for forest, column, rollout in zip(forests, columns, rollouts)
        ]
        num_entries = sum(int(length.sum()) for length in lengths)
        num_rollouts = sum(int(np.count_nonzero(length)) for length in lengths)
        for values, column, rollout, length in zip(weights, columns, rollouts, lengths):
            divisor = (
                length[rollout] if normalization.type == "sequence" else np.full(len(column), normalization.tokens)
            )
            factor = num_entries / (max(1, num_rollouts) * np.maximum(1, divisor))
            values[component] = (column * factor).astype(np.float32)
    return [replace(forest, targets=replace(forest.targets, **values)) for forest, values in zip(forests, weights)]
