"""Attention over a forest, as one function that any Hugging Face model can call.

**Query q sees key k iff k <= q < end[k]**; a sliding window adds `position[q] - position[k] < window`. One number per
token is the whole mask, so nothing of size [tokens, tokens] is needed. `TreeMask` holds it in the form that the device
needs, built once per pack and shared by all layers:

    CPU                       partial attentions         ramify.model.kernels.cpu.tree_attention
    CUDA                      lists of visible blocks    ramify.model.kernels.cuda.tree_attention
    CUDA, only long chains    lengths of the chains      cuDNN's causal kernel
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from ramify.model.device_copy import copy_to_device
from ramify.model.kernels.cpu.tree_attention import CpuTreeAttention, PartialAttention, split_attention
from ramify.model.kernels.paged_attention import reject_unsupported_arguments, unsupported_attention
from ramify.model.pack_layout import has_plain_scores
from ramify.trace.columns import Int32Array

MIN_CHAIN_TOKENS = 8192  # shorter chains are faster in the tree kernels
LENGTH_MULTIPLE = 512  # chains are padded to a multiple of it
SDPA_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class ChainLengths:
    """The lengths of a pack's chains. It is a class, because compiled code would be specialized to a list."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    @classmethod
    def from_ends(cls, end: Int32Array) -> "ChainLengths | None":
        """Return the lengths if the pack holds only long chains, with padding behind them; None otherwise."""
        lengths: list[int] = []
        start = 0
        while start < len(end) and (stop := int(end[start])) > start + 1:
            if stop < start + MIN_CHAIN_TOKENS or (end[start:stop] != stop).any():
                return None
            lengths.append(stop - start)
            start = stop
        only_padding = np.array_equal(end[start:], np.arange(start + 1, len(end) + 1))
        return cls(lengths) if lengths and only_padding else None


def _causal_attention(
    query: Tensor, key: Tensor, value: Tensor, chain_lengths: ChainLengths, scale: float | None
) -> Tensor:
    """Return the causal attention within each chain, [1, heads, tokens, head_dim], and zeros for the padding.

    Keys and values may have fewer heads than queries. cuDNN computes a pack of long chains about a third faster than
    the tree kernels. It prepares a kernel for each length, so chains are padded to a few lengths; a chain does not see
    its padding, which comes after it.
    """
    if query.dtype == torch.float32:  # no kernel shares keys between heads
        key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    lengths = chain_lengths.lengths
    padding = query.shape[2] - sum(lengths)
    grouped = query.shape[1] != key.shape[1]
    outputs: list[Tensor] = []
    with sdpa_kernel(SDPA_BACKENDS, set_priority=True):
        for length, *chain in zip(lengths, *(tensor.split([*lengths, padding], 2) for tensor in (query, key, value))):
            missing = -length % LENGTH_MULTIPLE
            q, k, v = (F.pad(tensor, (0, 0, 0, missing)) if missing else tensor for tensor in chain)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            outputs.append(out[:, :, :length])
    return torch.cat([*outputs, query.new_zeros(*query.shape[:2], padding, value.shape[-1])], 2)


causal_attention: Any = torch.compiler.disable(_causal_attention)


ATTENTION_NAME = "ramify_tree"
BLOCK_SIZE = 64  # tokens; small, because branches begin and end anywhere, which leaves blocks partly visible
LONG_LIST_FACTOR = 4  # a list is very long if it has this many times the mean number of blocks


class AttentionSettings(NamedTuple):
    """What a mask depends on: the sliding windows of the layers (0 is none), and whether scores have no cap or sink."""

    windows: frozenset[int] = frozenset({0})
    plain_scores: bool = True


def read_attention_settings(config: Any) -> AttentionSettings:
    """Return the settings of a model: the windows that its layers may request, and always full attention."""
    text_config = config.get_text_config()
    window = getattr(text_config, "sliding_window", None) or 0
    return AttentionSettings(frozenset({0, window}), has_plain_scores(text_config))


class TreeMask:
    """Which tokens of a pack see which, in the form that the device needs, for each sliding window of the model."""

    def __init__(
        self,
        end: Int32Array,
        position: Int32Array,
        device: torch.device,
        settings: AttentionSettings = AttentionSettings(),  # noqa: B008 - immutable
    ) -> None:
        self.has_windows, self.plain_scores = any(settings.windows), settings.plain_scores
        can_have_chains = device.type != "cpu" and self.plain_scores and not self.has_windows
        self.chain_lengths = ChainLengths.from_ends(end) if can_have_chains else None
        self.block_masks: dict[int, BlockMask] = {}
        self.partial_attentions: dict[int, list[PartialAttention]] = {}
        for window in settings.windows:
            if device.type == "cpu":
                effective_window = window if window and position.max(initial=0) >= window else 0
                self.partial_attentions[window] = split_attention(end, position, effective_window)
            elif self.chain_lengths is None:
                self.block_masks[window] = BlockMask.build(end, position, window, device)


def describe_tree_attention(device: torch.device) -> str:
    """Name the implementation of tree attention on `device`, for the log line at the start."""
    if device.type == "cpu":
        return "tree attention in torch"
    return "tree attention in Triton, cuDNN for long chains"


class BlockMask(NamedTuple):
    """The visible blocks of a pack that is padded to a multiple of `BLOCK_SIZE`, as the Triton kernels read them."""

    end: Tensor  # [tokens]
    position: Tensor  # [tokens], for windows
    kv_lists: Tensor  # [blocks, 3 + blocks]: query block, number of fully visible and of all visible key blocks, these
    q_lists: Tensor  # the same for key blocks and the query blocks that see them

    @classmethod
    def build(cls, end: Int32Array, position: Int32Array, window: int, device: torch.device) -> "BlockMask":
        """Build the lists on the device, from the smallest and largest `end` of each block, not from token pairs."""
        count = len(end) // BLOCK_SIZE
        if count * BLOCK_SIZE != len(end):
            raise ValueError(f"a pack of {len(end)} tokens is not padded to a multiple of {BLOCK_SIZE}")
        block, ends = np.arange(count), end.reshape(count, BLOCK_SIZE)
        first_query_block = [block + 1, block]  # for each key block: the first that sees all of it, that sees any of it
        end_query_block = [ends.min(1) // BLOCK_SIZE, -(-ends.max(1) // BLOCK_SIZE)]  # the first after those
        keys_per_query_block = block + 1 - np.cumsum(np.bincount(end_query_block[1], minlength=count + 1))[:count]
        order = np.stack([_launch_order(keys_per_query_block), _launch_order(end_query_block[1] - block)])
        arrays = [np.asarray(array, np.int32) for array in (end, position, block, first_query_block, end_query_block)]
        device_end, device_position, block_index, first, last, device_order = copy_to_device([*arrays, order], device)
        query_block = block_index[:, None]
        # [fully or partly visible, query block, key block]
        visible = (first[:, None] <= query_block) & (query_block < last[:, None])
        if window:
            block_positions = device_position.view(count, BLOCK_SIZE)
            min_position, max_position = block_positions.amin(1), block_positions.amax(1)
            farthest, nearest = max_position[:, None] - min_position, min_position[:, None] - max_position
            visible &= torch.stack([farthest, nearest]) < window
        mask = cls(device_end, device_position, *_build_block_lists(visible, block_index, device_order))
        for tensor in mask:  # otherwise compiled layers serve masks of one length only
            torch._dynamo.maybe_mark_dynamic(tensor, list(range(tensor.ndim)))
        return mask


def _launch_order(lengths: np.ndarray) -> np.ndarray:
    """Order block lists for launch: very long ones first, so that they do not finish last; the rest in place, so that
    neighbours share memory reads. Windows are not considered: with one the order is a guess."""
    return np.argsort(lengths <= LONG_LIST_FACTOR * lengths.mean(), kind="stable")


def _build_block_lists(visible: Tensor, block_index: Tensor, order: Tensor) -> Tensor:
    """Return both kinds of lists, [2, blocks, 3 + blocks]; `visible` is [fully or partly, query blocks, key blocks]."""
    both_directions = torch.stack([visible, visible.transpose(1, 2)])
    blocks = both_directions.sum(1, dtype=torch.uint8).argsort(dim=2, descending=True, stable=True)
    counts = both_directions.sum(3, dtype=torch.int32)
    header = torch.cat([block_index.expand(2, 1, -1), counts], 1).transpose(1, 2)
    lists = torch.cat([header, blocks.int()], 2)
    return lists.gather(1, order[..., None].expand_as(lists))


def tree_attention(
    module: Any,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree_mask: TreeMask | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention; transformers calls this in every layer, with the `tree_mask` that the model's forward got.

    `softcap` limits scores with a tanh; `s_aux` are the attention sinks of the heads.
    """
    if tree_mask is None:
        raise unsupported_attention(module, "did not pass the tree mask on to its attention function")
    reject_unsupported_arguments(module, attention_mask, kwargs)
    if dropout:
        raise unsupported_attention(module, "uses attention dropout, which tree attention does not support")
    if tree_mask.has_windows and "sliding_window" not in kwargs:
        raise unsupported_attention(module, "does not pass its sliding window on to its attention function")
    if tree_mask.plain_scores and (softcap or s_aux is not None):
        raise unsupported_attention(module, "has attention sinks or softcapped scores that its config does not show")
    window = kwargs.get("sliding_window") or 0
    if query.device.type == "cpu":
        parts = tree_mask.partial_attentions[window]
        out: Any = CpuTreeAttention.apply(query, key, value, parts, scaling, softcap or 0.0, s_aux)
    elif tree_mask.chain_lengths is not None:
        out = causal_attention(query, key, value, tree_mask.chain_lengths, scaling)
    else:
        block_mask = tree_mask.block_masks[window]
        scores = window, softcap or 0.0, s_aux
        return block_sparse_attention(query, key, value, block_mask, scaling, *scores), None
    return out.transpose(1, 2), None


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    scaling: float | None,
    window: int,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention by the Triton kernels, [1, tokens, heads, head_dim]. They need widths of powers of two."""
    from ramify.model.kernels.cuda.tree_attention import (
        tree_attention_op,  # needs Triton, which only a torch for CUDA brings
    )

    width = query.shape[-1]
    padding = max(16, 1 << (width - 1).bit_length()) - width
    inputs = [F.pad(tensor.squeeze(0).transpose(0, 1), (0, padding)).contiguous() for tensor in (query, key, value)]
    scale = width**-0.5 if scaling is None else scaling
    constants = scale, window, BLOCK_SIZE, softcap
    out, _ = tree_attention_op(*inputs, sinks, *block_mask, *constants)
    return out[..., :width].unsqueeze(0)


AttentionInterface.register(ATTENTION_NAME, tree_attention)
