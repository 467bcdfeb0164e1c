"""From forests to the rows a model computes.

A forest goes through the model as one row of tokens whose attention knows the tree. A model that cannot step back to a
fork gets a grid instead: every root-to-leaf path is a chain in a line of its own. Either way the head reads hidden
states at flat indices, and the entries of the loss point at what the head scored.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ramify.errors import ModelUnsupported
from ramify.model.device_copy import copy_to_device
from ramify.model.pack_layout import PackLayout
from ramify.model.tree_attention import BLOCK_SIZE, TreeMask
from ramify.trace import Forest
from ramify.trace.forest import LOSS_COMPONENTS, pad_forest
from ramify.train.head import ROW_STEP
from ramify.train.losses import Entries

CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class Told:
    """What the head scores and what each component is told."""

    source: Tensor  # [pairs] flat index of the hidden state that predicts
    token: Tensor  # [pairs] what it should predict
    temperature: Tensor  # [pairs]
    pair: Tensor  # [entries] which pair scores the entry
    chosen: dict[str, Tensor]  # component: the entries it applies to
    weight: dict[str, Tensor]  # component: their weights
    columns: Entries  # of all entries; `logprob` is to be filled in

    def entries(self, component: str, logprob: Tensor) -> Entries:
        """What the loss of a component sees, given the logprob of every entry."""
        chosen, columns = self.chosen[component], self.columns
        return Entries(
            logprob[chosen],
            columns.sampler[chosen],
            columns.advantage[chosen],
            columns.reference[chosen],
            columns.sequence[chosen],
            columns.sequences,
        )


@dataclass(eq=False)
class Row:
    """One forward and backward: what the model reads, and what is done with what it says."""

    forest: Forest
    ids: Tensor  # [lines, length]
    position: Tensor  # [lines, length], or [3, lines, length]
    tree: TreeMask | None  # None where lines are plain causal chains
    places: np.ndarray | None  # of tokens in lines, where there are several

    @cached_property
    def told(self) -> Told:
        """Made when it is asked for: a GPU is in its layers by then, and does not wait for it."""
        return _told(self.forest, self.places, self.ids.device)


def bucket(length: int, budget: int) -> int:
    """The padded length of a compiled row: quarters of the budget, and whole budgets for a path that is over it."""
    step = budget if length > budget else -(-budget // (4 * BLOCK_SIZE)) * BLOCK_SIZE
    padded = -(-length // step) * step
    return padded if length > budget else min(padded, budget)


def row_of(
    forest: Forest,
    *,
    layout: PackLayout = PackLayout.FOREST,
    device: torch.device = CPU,
    windows: frozenset[int] = frozenset({0}),
    length: int | None = None,
) -> Row:
    """The row of a pack, padded to `length`, on the device."""
    if forest.media:
        raise ModelUnsupported("images are not trained yet: a pack holds media")
    if length and length > len(forest):
        forest = pad_forest(forest, length)
    if layout is PackLayout.CHAINS:
        ids, position, places = _grid(forest)
        tree = None
    else:
        ids, position, places = forest.token_ids[None], forest.position_ids[..., None, :], None
        tree = TreeMask(forest.subtree_end, forest.position_ids, device, windows)
    there = copy_to_device([each.astype(np.int64) for each in (ids, position)], device)
    return Row(forest, there[0], there[1], tree, places)


def _told(forest: Forest, places: np.ndarray | None, device: torch.device) -> Told:
    source, token, temperature, pair = _pairs(forest)
    source = source if places is None else places[source]
    step = ROW_STEP if device.type == "cuda" else 1
    source, token, temperature = (_padded(each, step) for each in (source, token, temperature))
    targets = forest.targets
    chosen = {name: np.flatnonzero(getattr(targets, name) != 0) for name in LOSS_COMPONENTS}
    chosen = {name: index for name, index in chosen.items() if len(index)}
    weights = [getattr(targets, name)[index] for name, index in chosen.items()]
    sequence = targets.sequence.astype(np.int64)
    entries = [targets.logprob, targets.advantage, targets.ref_logprob, sequence, pair, *chosen.values(), *weights]
    columns = [*(each.astype(np.int64) for each in (source, token)), temperature, *entries]
    there = iter(copy_to_device(columns, device))
    source, token, temperature, logprob, advantage, reference, sequence, pair = islice(there, 8)
    return Told(
        source=source,
        token=token,
        temperature=temperature,
        pair=pair,
        chosen=dict(zip(chosen, there)),
        weight=dict(zip(chosen, there)),
        columns=Entries(torch.empty(0), logprob, advantage, reference, sequence, len(forest.sequences)),
    )


def _pairs(forest: Forest) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Source, token and temperature of what the head must score, and for each entry which of them is its own."""
    source, token, pair = forest.unique_head_inputs()
    degree = forest.sequences["temperature"]
    if (degree == degree[:1]).all():
        return source, token, np.repeat(degree[:1], len(source)), pair
    degrees, which = np.unique(degree, return_inverse=True)
    split, pair = np.unique(pair * len(degrees) + which[forest.targets.sequence], return_inverse=True)
    return source[split // len(degrees)], token[split // len(degrees)], degrees[split % len(degrees)], pair


def _padded(column: np.ndarray, step: int) -> np.ndarray:
    """Up to a multiple of the head's step, with pairs that no entry points at; at least one, so that a row without
    targets takes part in every collective of the backward pass."""
    return np.concatenate([column, np.ones(-len(column) % step if len(column) else step, column.dtype)])


def _grid(forest: Forest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and positions of chains, one a line, and the flat place of each token."""
    starts = forest.segments["start"][forest.segments["parent"] < 0]
    lengths = np.diff(np.append(starts, forest.num_tokens))
    lines, width = max(1, len(starts)), int(lengths.max(initial=2))  # a filler is a line that `_padded` can point into
    offset = np.arange(forest.num_tokens) - np.repeat(starts, lengths)
    depth = forest.position_ids if forest.position_ids.ndim == 1 else forest.position_ids[0]
    if not np.array_equal(offset, depth[: forest.num_tokens]):
        raise ValueError("a forest with forks was given to a model that reads chains")
    places = np.repeat(np.arange(len(starts)), lengths) * width + offset
    ids = np.zeros(lines * width, np.int64)
    ids[places] = forest.token_ids[: forest.num_tokens]
    return ids.reshape(lines, width), np.broadcast_to(np.arange(width), (lines, width)), places
