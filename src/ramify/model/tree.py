"""Attention over a forest, as one function that any Hugging Face model can call.

**Query q sees key k iff k <= q < end[k]**; a sliding window adds `position[q] - position[k] < window`. One number per
token is the whole mask, so nothing of size [tokens, tokens] is needed: on CUDA it becomes lists of the blocks that see
each other, made from the smallest and the largest `end` of each, once per row and shared by all layers
(`ramify.model.kernels` computes by them); on a CPU it becomes tiles (`ramify.model.tiles`). A row that is nothing but
long chains needs no tree, and on CUDA has a faster kernel (`ramify.model.chains`).
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import AttentionInterface

from ramify.errors import ModelUnsupported
from ramify.model.chains import Chains, causal
from ramify.model.paged import refuse_masks
from ramify.model.put import put
from ramify.model.tiles import Product, TiledAttention, products
from ramify.trace.columns import Int32Array

ATTENTION = "ramify_tree"
BLOCK = 64  # tokens; small, because branches begin and end anywhere and leave the blocks around partly empty

LONG = 4  # times as many blocks as the mean of a row make a list very long


class Tree:
    """Who sees whom in one row, in the form its device computes it; made for each window once."""

    def __init__(
        self, end: Int32Array, position: Int32Array, device: torch.device, windows: frozenset[int] = frozenset({0})
    ) -> None:
        depth = position if position.ndim == 1 else position[0]
        self.windowed = any(windows)
        self.chains = None if self.windowed or device.type == "cpu" else Chains.of(end)
        self.blocks: dict[int, Blocks] = {}
        self.products: dict[int, list[Product]] = {}
        for window in windows:
            if device.type == "cpu":
                reach = window if window and depth.max(initial=0) >= window else 0
                self.products[window] = products(end, depth, reach)
            elif self.chains is None:
                self.blocks[window] = Blocks.of(end, depth, window, device)


def windows_of(config: Any) -> frozenset[int]:
    """The sliding windows that layers of a model may ask for, 0 for attention without one."""
    return frozenset({0, getattr(config.get_text_config(), "sliding_window", None) or 0})


class Blocks(NamedTuple):
    """Who sees whom in a row that is padded to a multiple of `BLOCK`, as the kernels of a GPU read it."""

    end: Tensor  # [tokens]
    position: Tensor  # [tokens], for windows
    keys: Tensor  # [blocks, 3 + blocks]: a block of queries, how many blocks of keys it sees wholly, in all, and which
    queries: Tensor  # a block of keys, and in the same way the blocks of queries that see it

    @classmethod
    def of(cls, end: Int32Array, position: Int32Array, window: int, device: torch.device) -> "Blocks":
        """Made on the device, from the smallest and largest `end` of each block, not from pairs of tokens."""
        count = len(end) // BLOCK
        if count * BLOCK != len(end):
            raise ValueError(f"a row of {len(end)} tokens is not padded to a multiple of {BLOCK}")
        number, ends = np.arange(count), end.reshape(count, BLOCK)
        since = [number + 1, number]  # the first block of queries that sees a block of keys: wholly, at all
        until = [ends.min(1) // BLOCK, -(-ends.max(1) // BLOCK)]  # the first behind it that does not
        seeing = number + 1 - np.cumsum(np.bincount(until[1], minlength=count + 1))[:count]  # keys a block of queries
        order = np.stack([_order(seeing), _order(until[1] - number)])
        columns = [np.asarray(each, np.int32) for each in (end, position, number, since, until)]
        row_end, row_position, block, first, last, ordered = put([*columns, order], device)
        query = block[:, None]
        seen = (first[:, None] <= query) & (query < last[:, None])  # [wholly or at all, query block, key block]
        if window:
            places = row_position.view(count, BLOCK)
            near, far = places.amin(1), places.amax(1)
            seen &= torch.stack([far[:, None] - near, near[:, None] - far]) < window
        return cls(row_end, row_position, *_listed(seen, block, ordered))


def _order(lengths: np.ndarray) -> np.ndarray:
    """Of lists: as they are, in which neighbours read the same memory, but the very long ones, which must begin early,
    come first. Windows are not counted: with one the order is a guess."""
    return np.argsort(lengths <= LONG * lengths.mean(), kind="stable")


def _listed(seen: Tensor, number: Tensor, order: Tensor) -> Tensor:
    """Both kinds of lists: of each block its number, how many it sees wholly, how many in all, and which; and of each
    how it is seen."""
    both = torch.stack([seen, seen.transpose(1, 2)])
    which = both.sum(1, dtype=torch.uint8).argsort(dim=2, descending=True, stable=True)
    counts = both.sum(3, dtype=torch.int32)
    lists = torch.cat([torch.cat([number.expand(2, 1, -1), counts], 1).transpose(1, 2), which.int()], 2)
    return lists.gather(1, order[..., None].expand_as(lists))


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
    refuse_masks(module, attention_mask)
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
        return by_blocks(query, key, value, tree.blocks[window], scaling, window), None
    return out.transpose(1, 2), None


def by_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scaling: float | None, window: int) -> Tensor:
    """[1, tokens, heads, head_dim], through the kernels, which know widths that are powers of two."""
    from ramify.model.kernels import attend  # needs Triton, which only a torch for CUDA brings

    width = query.shape[-1]
    more = max(16, 1 << (width - 1).bit_length()) - width
    rows = [F.pad(each.squeeze(0).transpose(0, 1), (0, more)).contiguous() for each in (query, key, value)]
    out, _ = attend(*rows, *blocks, width**-0.5 if scaling is None else scaling, window)  # pyright: ignore[reportCallIssue]
    return out[..., :width].unsqueeze(0)


AttentionInterface.register(ATTENTION, tree_attention)
