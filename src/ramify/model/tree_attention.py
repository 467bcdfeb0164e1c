"""Attention over a forest, as one function that any Hugging Face model can call.

**Query q sees key k iff k <= q < end[k]**; a sliding window adds `position[q] - position[k] < window`. One number per
token is the whole mask, so nothing of size [tokens, tokens] is needed: on CUDA it becomes lists of the blocks that see
each other, made from the smallest and the largest `end` of each, once per row and shared by all layers
(`ramify.model.kernels` computes by them); on a CPU it becomes tiles (`ramify.model.tiles`). A row that is nothing but
long chains needs no tree, and on CUDA has a faster kernel (`ramify.model.causal_attention`).
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import AttentionInterface

from ramify.errors import ModelUnsupported
from ramify.model.causal_attention import ChainLengths, causal_attention
from ramify.model.device_copy import copy_to_device
from ramify.model.paged_attention import reject_custom_masks
from ramify.model.tiles import CpuTreeAttention, PartialAttention, split_attention
from ramify.trace.columns import Int32Array

ATTENTION_NAME = "ramify_tree"
BLOCK_SIZE = 64  # tokens; small, because branches begin and end anywhere and leave the blocks around partly empty

LONG_LIST_FACTOR = 4  # times as many blocks as the mean of a row make a list very long


class TreeMask:
    """Who sees whom in one row, in the form its device computes it; made for each window once."""

    def __init__(
        self,
        end: Int32Array,
        position: Int32Array,
        device: torch.device,
        sliding_windows: frozenset[int] = frozenset({0}),
    ) -> None:
        depth = position if position.ndim == 1 else position[0]
        self.has_windows = any(sliding_windows)
        self.chain_lengths = None if self.has_windows or device.type == "cpu" else ChainLengths.from_ends(end)
        self.block_masks: dict[int, BlockMask] = {}
        self.partial_attentions: dict[int, list[PartialAttention]] = {}
        for window in sliding_windows:
            if device.type == "cpu":
                reach = window if window and depth.max(initial=0) >= window else 0
                self.partial_attentions[window] = split_attention(end, depth, reach)
            elif self.chain_lengths is None:
                self.block_masks[window] = BlockMask.build(end, depth, window, device)


def get_sliding_windows(config: Any) -> frozenset[int]:
    """The sliding windows that layers of a model may ask for, 0 for attention without one."""
    return frozenset({0, getattr(config.get_text_config(), "sliding_window", None) or 0})


class BlockMask(NamedTuple):
    """Who sees whom in a row that is padded to a multiple of `BLOCK`, as the kernels of a GPU read it."""

    end: Tensor  # [tokens]
    position: Tensor  # [tokens], for windows
    kv_lists: (
        Tensor  # [blocks, 3 + blocks]: a block of queries, how many blocks of keys it sees wholly, in all, and which
    )
    q_lists: Tensor  # a block of keys, and in the same way the blocks of queries that see it

    @classmethod
    def build(cls, end: Int32Array, position: Int32Array, window: int, device: torch.device) -> "BlockMask":
        """Made on the device, from the smallest and largest `end` of each block, not from pairs of tokens."""
        count = len(end) // BLOCK_SIZE
        if count * BLOCK_SIZE != len(end):
            raise ValueError(f"a row of {len(end)} tokens is not padded to a multiple of {BLOCK_SIZE}")
        number, ends = np.arange(count), end.reshape(count, BLOCK_SIZE)
        since = [number + 1, number]  # the first block of queries that sees a block of keys: wholly, at all
        until = [ends.min(1) // BLOCK_SIZE, -(-ends.max(1) // BLOCK_SIZE)]  # the first behind it that does not
        seeing = number + 1 - np.cumsum(np.bincount(until[1], minlength=count + 1))[:count]  # keys a block of queries
        order = np.stack([_launch_order(seeing), _launch_order(until[1] - number)])
        columns = [np.asarray(each, np.int32) for each in (end, position, number, since, until)]
        row_end, row_position, block, first, last, ordered = copy_to_device([*columns, order], device)
        query = block[:, None]
        seen = (first[:, None] <= query) & (query < last[:, None])  # [wholly or at all, query block, key block]
        if window:
            places = row_position.view(count, BLOCK_SIZE)
            near, far = places.amin(1), places.amax(1)
            seen &= torch.stack([far[:, None] - near, near[:, None] - far]) < window
        return cls(row_end, row_position, *_build_block_lists(seen, block, ordered))


def _launch_order(lengths: np.ndarray) -> np.ndarray:
    """Of lists: as they are, in which neighbours read the same memory, but the very long ones, which must begin early,
    come first. Windows are not counted: with one the order is a guess."""
    return np.argsort(lengths <= LONG_LIST_FACTOR * lengths.mean(), kind="stable")


def _build_block_lists(visible: Tensor, block_index: Tensor, order: Tensor) -> Tensor:
    """Both kinds of lists: of each block its number, how many it sees wholly, how many in all, and which; and of each
    how it is seen."""
    both = torch.stack([visible, visible.transpose(1, 2)])
    which = both.sum(1, dtype=torch.uint8).argsort(dim=2, descending=True, stable=True)
    counts = both.sum(3, dtype=torch.int32)
    lists = torch.cat([torch.cat([block_index.expand(2, 1, -1), counts], 1).transpose(1, 2), which.int()], 2)
    return lists.gather(1, order[..., None].expand_as(lists))


def tree_attention(
    module: Any,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: TreeMask | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every attention layer; `tree` is what was passed to the model's forward."""
    if tree is None:
        raise ModelUnsupported(f"{type(module).__name__} did not pass the tree on to its attention function")
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelUnsupported(f"{type(module).__name__} uses {name}, which the tree attention does not know")
    reject_custom_masks(module, attention_mask)
    if dropout:
        raise ModelUnsupported(f"{type(module).__name__} drops attention out, which the tree attention does not do")
    if tree.has_windows and "sliding_window" not in kwargs:
        raise ModelUnsupported(f"{type(module).__name__} does not tell its attention function about its sliding window")
    window = kwargs.get("sliding_window") or 0
    if query.device.type == "cpu":
        out: Any = CpuTreeAttention.apply(query, key, value, tree.partial_attentions[window], scaling)
    elif tree.chain_lengths is not None:
        out = causal_attention(query, key, value, tree.chain_lengths, scaling)
    else:
        return block_sparse_attention(query, key, value, tree.block_masks[window], scaling, window), None
    return out.transpose(1, 2), None


def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, scaling: float | None, window: int
) -> Tensor:
    """[1, tokens, heads, head_dim], through the kernels, which know widths that are powers of two."""
    from ramify.model.kernels import tree_attention_op  # needs Triton, which only a torch for CUDA brings

    width = query.shape[-1]
    more = max(16, 1 << (width - 1).bit_length()) - width
    rows = [F.pad(each.squeeze(0).transpose(0, 1), (0, more)).contiguous() for each in (query, key, value)]
    out, _ = tree_attention_op(*rows, *block_mask, width**-0.5 if scaling is None else scaling, window)  # pyright: ignore[reportCallIssue]
    return out[..., :width].unsqueeze(0)


AttentionInterface.register(ATTENTION_NAME, tree_attention)
