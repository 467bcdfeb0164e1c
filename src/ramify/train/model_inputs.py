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
from ramify.train.lm_head import ROW_MULTIPLE
from ramify.train.losses import Entries

CPU = torch.device("cpu")


@dataclass(slots=True, eq=False)
class HeadInputs:
    """What the head scores and what each component is told."""

    hidden_index: Tensor  # [pairs] flat index of the hidden state that predicts
    target_ids: Tensor  # [pairs] what it should predict
    temperature: Tensor  # [pairs]
    pair_index: Tensor  # [entries] which pair scores the entry
    component_entries: dict[str, Tensor]  # component: the entries it applies to
    component_weights: dict[str, Tensor]  # component: their weights
    all_entries: Entries  # of all entries; `logprob` is to be filled in

    def select_entries(self, component: str, logprob: Tensor) -> Entries:
        """What the loss of a component sees, given the logprob of every entry."""
        chosen, columns = self.component_entries[component], self.all_entries
        return Entries(
            logprob[chosen],
            columns.sampler_logprob[chosen],
            columns.advantage[chosen],
            columns.reference_logprob[chosen],
            columns.sequence_index[chosen],
            columns.num_sequences,
        )


@dataclass(eq=False)
class ModelInputs:
    """One forward and backward: what the model reads, and what is done with what it says."""

    forest: Forest
    input_ids: Tensor  # [lines, length]
    position_ids: Tensor  # [lines, length], or [3, lines, length]
    tree_mask: TreeMask | None  # None where lines are plain causal chains
    token_index: np.ndarray | None  # of tokens in lines, where there are several

    @cached_property
    def head_inputs(self) -> HeadInputs:
        """Made when it is asked for: a GPU is in its layers by then, and does not wait for it."""
        return _build_head_inputs(self.forest, self.token_index, self.input_ids.device)


def bucket_length(length: int, pack_tokens: int) -> int:
    """The padded length of a compiled row: quarters of the budget, and whole budgets for a path that is over it."""
    step = pack_tokens if length > pack_tokens else -(-pack_tokens // (4 * BLOCK_SIZE)) * BLOCK_SIZE
    padded = -(-length // step) * step
    return padded if length > pack_tokens else min(padded, pack_tokens)


def build_model_inputs(
    forest: Forest,
    *,
    layout: PackLayout = PackLayout.FOREST,
    device: torch.device = CPU,
    sliding_windows: frozenset[int] = frozenset({0}),
    padded_length: int | None = None,
) -> ModelInputs:
    """The row of a pack, padded to `length`, on the device."""
    if forest.media:
        raise ModelUnsupported("images are not trained yet: a pack holds media")
    if padded_length and padded_length > len(forest):
        forest = pad_forest(forest, padded_length)
    if layout is PackLayout.CHAINS:
        ids, position, places = _build_chain_grid(forest)
        tree = None
    else:
        ids, position, places = forest.token_ids[None], forest.position_ids[..., None, :], None
        tree = TreeMask(forest.subtree_end, forest.position_ids, device, sliding_windows)
    there = copy_to_device([each.astype(np.int64) for each in (ids, position)], device)
    return ModelInputs(forest, there[0], there[1], tree, places)


def _build_head_inputs(forest: Forest, token_index: np.ndarray | None, device: torch.device) -> HeadInputs:
    source, token, temperature, pair = _list_scored_pairs(forest)
    source = source if token_index is None else token_index[source]
    step = ROW_MULTIPLE if device.type == "cuda" else 1
    source, token, temperature = (_pad_pairs(each, step) for each in (source, token, temperature))
    targets = forest.targets
    chosen = {name: np.flatnonzero(getattr(targets, name) != 0) for name in LOSS_COMPONENTS}
    chosen = {name: index for name, index in chosen.items() if len(index)}
    weights = [getattr(targets, name)[index] for name, index in chosen.items()]
    sequence = targets.sequence.astype(np.int64)
    entries = [targets.logprob, targets.advantage, targets.ref_logprob, sequence, pair, *chosen.values(), *weights]
    columns = [*(each.astype(np.int64) for each in (source, token)), temperature, *entries]
    there = iter(copy_to_device(columns, device))
    source, token, temperature, logprob, advantage, reference, sequence, pair = islice(there, 8)
    return HeadInputs(
        hidden_index=source,
        target_ids=token,
        temperature=temperature,
        pair_index=pair,
        component_entries=dict(zip(chosen, there)),
        component_weights=dict(zip(chosen, there)),
        all_entries=Entries(torch.empty(0), logprob, advantage, reference, sequence, len(forest.sequences)),
    )


def _list_scored_pairs(forest: Forest) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Source, token and temperature of what the head must score, and for each entry which of them is its own."""
    source, token, pair = forest.unique_head_inputs()
    degree = forest.sequences["temperature"]
    if (degree == degree[:1]).all():
        return source, token, np.repeat(degree[:1], len(source)), pair
    degrees, which = np.unique(degree, return_inverse=True)
    split, pair = np.unique(pair * len(degrees) + which[forest.targets.sequence], return_inverse=True)
    return source[split // len(degrees)], token[split // len(degrees)], degrees[split % len(degrees)], pair


def _pad_pairs(column: np.ndarray, multiple: int) -> np.ndarray:
    """Up to a multiple of the head's step, with pairs that no entry points at; at least one, so that a row without
    targets takes part in every collective of the backward pass."""
    return np.concatenate([column, np.ones(-len(column) % multiple if len(column) else multiple, column.dtype)])


def _build_chain_grid(forest: Forest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
