"""Attention over a forest, as one function that any Hugging Face model can call.

**Query q sees key k iff k <= q < end[k]**; a sliding window adds `position[q] - position[k] < window`. One number per
token is the whole mask, so nothing of size [tokens, tokens] is needed: on CUDA it becomes the block mask of
FlexAttention, made from the smallest and the largest `end` of each block of keys, once per row and shared by all
layers; on a CPU it becomes tiles (`ramify.model.tiles`). A row that is nothing but long chains needs no tree, and on
CUDA has a faster kernel (`ramify.model.chains`).
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

from ramify.errors import ModelUnsupported
from ramify.model.chains import Chains, causal
from ramify.model.put import put
from ramify.model.tiles import Product, TiledAttention, products
from ramify.trace.columns import Ints

ATTENTION = "ramify_tree"
BLOCK = 128


class Tree:
    """Who sees whom in one row, in the form its device computes it; made for each window once."""

    def __init__(
        self, end: Ints, position: Ints, device: torch.device, windows: frozenset[int] = frozenset({0})
    ) -> None:
        depth = position if position.ndim == 1 else position[0]
        self.windowed = any(windows)
        self.chains = None if self.windowed or device.type == "cpu" else Chains.of(end)
        self.blocks: dict[int, BlockMask] = {}
        self.products: dict[int, list[Product]] = {}
        for window in windows:
            if device.type == "cpu":
                reach = window if window and depth.max(initial=0) >= window else 0
                self.products[window] = products(end, depth, reach)
            elif self.chains is None:
                self.blocks[window] = block_mask(end, depth, window, device)


def windows_of(config: Any) -> frozenset[int]:
    """The sliding windows that layers of a model may ask for, 0 for attention without one."""
    return frozenset({0, getattr(config.get_text_config(), "sliding_window", None) or 0})


def block_mask(end: Ints, position: Ints, window: int, device: torch.device) -> BlockMask:
    """The block mask of a row whose length is a multiple of `BLOCK`, without looking at its pairs one by one."""
    count = len(end) // BLOCK
    if count * BLOCK != len(end):
        raise ValueError(f"a row of {len(end)} tokens is not padded to a multiple of {BLOCK}")
    ends, places = end.reshape(count, BLOCK), position.reshape(count, BLOCK)
    first = np.arange(count)[:, None] * BLOCK
    below = np.tri(count, k=-1, dtype=bool)  # [query block, key block]: keys before all queries
    some = below & (ends.max(1)[None, :] > first)
    every = below & (ends.min(1)[None, :] >= first + BLOCK)
    if window:
        some &= places.min(1)[:, None] - places.max(1)[None, :] < window
        every &= places.max(1)[:, None] - places.min(1)[None, :] < window
    partly = (some & ~every) | np.eye(count, dtype=bool)
    row_end, row_position = (put(each.astype(np.int32), device) for each in (end, position))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < row_end[key])

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(batch, head, query, key) & (row_position[query] - row_position[key] < window)

    lists = [each for side in (partly, every, partly.T, every.T) for each in _ordered(side, device)]
    size = (len(end), len(end))
    return BlockMask(size, *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=near if window else visible)


def _ordered(blocks: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """How many blocks each line of `blocks` has, and which, those first."""
    counts = blocks.sum(1, dtype=np.int32)
    line, which = np.nonzero(blocks)
    order = np.zeros(blocks.shape, np.int32)
    order[line, np.arange(len(line)) - np.repeat(np.cumsum(counts) - counts, counts)] = which
    return put(counts, device)[None, None], put(order, device)[None, None]


@cache
def _compiled() -> Any:
    """FlexAttention outside of a compiled layer; uncompiled it would hold every pair."""
    return torch.compile(flex_attention, dynamic=False)


def tree_attention(
    module: Any,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: Tree | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every attention layer; `tree` is what was passed to the model's forward."""
    if tree is None:
        raise ModelUnsupported(f"{type(module).__name__} did not pass the tree on to its attention function")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelUnsupported(f"{type(module).__name__} uses {name}, which the tree attention does not know")
    if dropout:
        raise ModelUnsupported(f"{type(module).__name__} drops attention out, which the tree attention does not do")
    if tree.windowed and "sliding_window" not in kwargs:
        raise ModelUnsupported(f"{type(module).__name__} does not tell its attention function about its sliding window")
    window = kwargs.get("sliding_window") or 0
    if query.device.type == "cpu":
        out: Any = TiledAttention.apply(query, key, value, tree.products[window], scaling)
    elif tree.chains is not None:
        out = causal(query, key, value, tree.chains, scaling)
    else:
        attend = flex_attention if torch.compiler.is_compiling() else _compiled()
        grouped = query.shape[1] != key.shape[1]
        out = attend(query, key, value, block_mask=tree.blocks[window], scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, tree_attention)
