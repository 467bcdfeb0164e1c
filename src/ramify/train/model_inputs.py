"""Build the tensors that a model reads from a pack.

A forest goes through the model as one row of tokens, and attention follows its tree. A model that cannot return to an
earlier token, such as a recurrent one, gets a grid of chains instead: one row for every root-to-leaf path. In both
cases the head reads hidden states by flat index, and the entries of the loss point to the pairs that the head scored.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ramify.core.errors import ModelUnsupported
from ramify.model.device_copy import copy_to_device
from ramify.model.forest_recurrence import ForestRecurrence
from ramify.model.images import ImageSpan, ProcessedImage, compute_positions
from ramify.model.pack_layout import PackLayout
from ramify.model.tree_attention import BLOCK_SIZE, AttentionSettings, TreeMask
from ramify.model.vision import VisionTower
from ramify.trace import Forest, Media, concat_forests, make_padding_forest
from ramify.trace.forest import LOSS_COMPONENTS
from ramify.train.lm_head import ROW_MULTIPLE
from ramify.train.losses import Entries

LoadImage = Callable[[Media], ProcessedImage]


class StepImages:
    """The encoded images of some packs, by hash: the tower encodes each once, and gradients go back through it once.

    The packs read copies of the features that are cut off from the tower's graph and add up gradients there, in
    float32. After the last pack `backward` takes the sums through the tower.
    """

    def __init__(self, tower: VisionTower, media: Iterable[Media], load_image: LoadImage) -> None:
        self.tower = tower
        self.images = {item.hash: load_image(item) for item in {item.hash: item for item in media}.values()}
        with torch.set_grad_enabled(torch.is_grad_enabled() and tower.is_trained):
            encoded = tower.encode(list(self.images.values())) if self.images else []
        self._encoded = dict(zip(self.images, encoded))
        self._features = {
            hash: features.detach().float().requires_grad_(features.requires_grad)
            for hash, features in self._encoded.items()
        }

    def __len__(self) -> int:
        return len(self.images)

    def gather(self, forest: Forest) -> tuple[np.ndarray, Tensor]:
        """Return the indices of a pack's image tokens, and their features in this order. Raises ModelUnsupported."""
        rows = [self._find_rows(forest, span.start, span.stop) for span in forest.media]
        features = [self._features[span.media.hash] for span in forest.media]
        for span, indices, image in zip(forest.media, rows, features):
            if len(indices) != image.shape[1]:
                raise ModelUnsupported(
                    f"image {span.media.hash[:8]} has {len(indices)} placeholder tokens, but the model encodes it "
                    f"into {image.shape[1]}: was the trace made for another model?"
                )
        return np.concatenate(rows), torch.cat(features, dim=1)

    def compute_positions(self, forest: Forest) -> np.ndarray:
        """Return the positions [3, tokens] of a pack for a model whose image tokens lie on a grid."""
        spans: list[ImageSpan] = []
        for span in forest.media:
            rows = self._find_rows(forest, span.start, span.stop)
            spans.append(ImageSpan(int(rows[0]), int(rows[-1]) + 1, self.images[span.media.hash].grid))
        return compute_positions(forest.position_ids, spans, forest.subtree_end)

    def _find_rows(self, forest: Forest, start: int, stop: int) -> np.ndarray:
        return start + np.flatnonzero(forest.token_ids[start:stop] == self.tower.image_token_id)

    def count_flops(self) -> float:
        """Return the FLOPs of encoding the images, and of the backward pass through the tower if it is trained."""
        factor = 3.0 if self.tower.is_trained else 1.0
        return factor * sum(map(self.tower.count_flops, self.images.values()))

    def backward(self) -> None:
        """Take the gradients that the packs have left at the features through the tower."""
        pairs = [
            (features, copy.grad.to(features.dtype))
            for features, copy in zip(self._encoded.values(), self._features.values())
            if copy.grad is not None
        ]
        if pairs:
            outputs, gradients = zip(*pairs)
            torch.autograd.backward(outputs, gradients)


CPU = torch.device("cpu")
TOP_COMPONENT = "ref_kl"  # the component that may use the likeliest tokens of the reference


@dataclass(slots=True, eq=False)
class HeadInputs:
    """What the LM head scores, and what the losses read. A pair is a hidden state and the token it predicts."""

    hidden_index: Tensor  # [pairs] flat index of the hidden state
    target_ids: Tensor  # [pairs] the token to predict
    temperature: Tensor  # [pairs]
    pair_index: Tensor  # [entries] the pair that scores each entry
    top_ids: Tensor  # [pairs, k] the reference's likeliest tokens; 0 where there is none
    reference_top_logprob: Tensor  # [entries, k] their logprobs; -inf where there is none
    component_entries: dict[str, Tensor]  # component: indices of its entries
    component_weights: dict[str, Tensor]  # component: their weights
    all_entries: Entries  # without `logprob`, which is empty

    def select_entries(self, component: str, logprob: Tensor, top_logprob: Tensor | None = None) -> Entries:
        """Return the entries of a component, given the logprob of every entry and of its likeliest tokens."""
        index, entries = self.component_entries[component], self.all_entries
        if component != TOP_COMPONENT or top_logprob is None or not top_logprob.shape[1]:
            top_logprob = None
        return Entries(
            logprob.index_select(0, index),
            entries.sampler_logprob[index],
            entries.advantage[index],
            entries.reference_logprob[index],
            entries.sequence_index[index],
            entries.num_sequences,
            None if top_logprob is None else top_logprob.index_select(0, index),
            None if top_logprob is None else self.reference_top_logprob[index],
        )


@dataclass(slots=True, eq=False)
class ImageInputs:
    """The image tokens of a pack."""

    rows: Tensor  # [image tokens] their flat indices, sorted
    features: Tensor  # [1 + deepstack layers, image tokens, width] what the vision tower made of the images


@dataclass(eq=False)
class ModelInputs:
    """The inputs of one forward and backward pass."""

    forest: Forest
    input_ids: Tensor  # [rows, length]
    position_ids: Tensor  # [rows, length], or [3, rows, length]
    tree_mask: TreeMask | None  # None if the rows are causal chains
    token_index: np.ndarray | None  # [tokens] flat index of each token, if there are several rows
    images: ImageInputs | None = None  # None if the pack holds no image

    @cached_property
    def recurrence(self) -> ForestRecurrence:
        """What recurrent layers read; built on first use, because most models have none."""
        return ForestRecurrence(self.forest, self.input_ids.device)

    @cached_property
    def head_inputs(self) -> HeadInputs:
        """Built on first use: a GPU runs the layers meanwhile and does not wait."""
        return _build_head_inputs(self.forest, self.token_index, self.input_ids.device)


def build_model_inputs(
    forest: Forest,
    *,
    layout: PackLayout = PackLayout.FOREST,
    device: torch.device = CPU,
    attention: AttentionSettings = AttentionSettings(),  # noqa: B008 - immutable
    images: StepImages | None = None,
) -> ModelInputs:
    """Build the inputs of a pack on the device. On a GPU it is padded, because the kernels work on blocks of tokens.

    `images` must hold the images of the pack. Raises ModelUnsupported if it is None and the pack has images, or if a
    pack of chains has images.
    """
    if forest.media and images is None:
        raise ModelUnsupported("a pack holds images, and the model reads none: train a vision-language model on it")
    if forest.media and layout is PackLayout.CHAINS:
        problem = "the model has recurrent layers, and images are not trained in chains"
        raise ModelUnsupported(f"a pack holds images, but {problem}: train a model without such layers on it")
    if device.type == "cuda" and (num_padding := -len(forest) % BLOCK_SIZE):
        forest = concat_forests([forest, make_padding_forest(num_padding)])
    if layout is PackLayout.CHAINS:
        ids, position, token_index = _build_chain_grid(forest)
        tree_mask = None
    else:
        position = forest.position_ids
        if images is not None and images.tower.has_grid_positions and forest.media:
            position = images.compute_positions(forest)
        ids, position, token_index = forest.token_ids[None], position[..., None, :], None
        tree_mask = TreeMask(forest.subtree_end, forest.position_ids, device, attention)
    input_ids, position_ids = copy_to_device([array.astype(np.int64) for array in (ids, position)], device)
    return ModelInputs(forest, input_ids, position_ids, tree_mask, token_index, _select_images(forest, images, device))


def _select_images(forest: Forest, images: StepImages | None, device: torch.device) -> ImageInputs | None:
    """Return the inputs for the images of a pack; None if it holds none."""
    if images is None or not forest.media:
        return None
    rows, features = images.gather(forest)
    return ImageInputs(copy_to_device([rows], device)[0], features)


def _build_head_inputs(forest: Forest, token_index: np.ndarray | None, device: torch.device) -> HeadInputs:
    hidden_index, target_ids, temperature, pair_index = _list_scored_pairs(forest)
    hidden_index = hidden_index if token_index is None else token_index[hidden_index]
    multiple = ROW_MULTIPLE if device.type == "cuda" else 1
    targets = forest.targets
    component_entries = {
        name: index for name in LOSS_COMPONENTS if len(index := np.flatnonzero(getattr(targets, name) != 0))
    }
    columns = [
        _pad_pairs(hidden_index, multiple).astype(np.int64),
        _pad_pairs(target_ids, multiple).astype(np.int64),
        _pad_pairs(temperature, multiple),
        targets.logprob,
        targets.advantage,
        targets.ref_logprob,
        targets.call.astype(np.int64),
        pair_index,
        _pad_pairs(_list_top_ids(forest, len(hidden_index), pair_index), multiple),
        np.ascontiguousarray(targets.ref_top["logprob"]),
        *component_entries.values(),
        *(getattr(targets, name)[index] for name, index in component_entries.items()),
    ]
    tensors = iter(copy_to_device(columns, device))
    hidden, target, temperatures, sampler, advantage, reference, sequence, pairs, top_ids, top_logprob = islice(
        tensors, 10
    )
    return HeadInputs(
        hidden_index=hidden,
        target_ids=target,
        temperature=temperatures,
        pair_index=pairs,
        top_ids=top_ids,
        reference_top_logprob=top_logprob,
        component_entries=dict(zip(component_entries, tensors)),
        component_weights=dict(zip(component_entries, tensors)),
        all_entries=Entries(torch.empty(0), sampler, advantage, reference, sequence, len(forest.calls)),
    )


def _list_scored_pairs(forest: Forest) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return hidden index, target token and temperature of each pair, and the pair of each entry."""
    hidden_index, target_ids, pair_index = forest.unique_head_inputs()
    temperature = forest.calls["temperature"]
    if (temperature == temperature[:1]).all():
        return hidden_index, target_ids, np.repeat(temperature[:1], len(hidden_index)), pair_index
    temperatures, temperature_index = np.unique(temperature, return_inverse=True)
    count = len(temperatures)
    codes, pair_index = np.unique(pair_index * count + temperature_index[forest.targets.call], return_inverse=True)
    return hidden_index[codes // count], target_ids[codes // count], temperatures[codes % count], pair_index


def _list_top_ids(forest: Forest, num_pairs: int, pair_index: np.ndarray) -> np.ndarray:
    """Return the reference's likeliest tokens of each pair [pairs, k]; entries of a pair have the same context."""
    top = forest.targets.ref_top
    top_ids = np.zeros((num_pairs, top.shape[1]), np.int64)
    if top_ids.size:
        top_ids[pair_index] = np.maximum(top["token"], 0)
    return top_ids


def _pad_pairs(column: np.ndarray, multiple: int) -> np.ndarray:
    """Pad a column of pairs to a multiple, with pairs that no entry points to.

    At least one pair remains, so that a pack without targets takes part in every collective of the backward pass.
    """
    num_padding = -len(column) % multiple if len(column) else multiple
    return np.concatenate([column, np.ones((num_padding, *column.shape[1:]), column.dtype)])


def _build_chain_grid(forest: Forest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids and positions of the chains, one per row, and the flat index of each token."""
    starts = forest.segments["start"][forest.segments["parent"] < 0]
    lengths = np.diff(np.append(starts, forest.num_tokens))
    rows, width = max(1, len(starts)), int(lengths.max(initial=2))  # `_pad_pairs` points into a filler's row, at 1
    offset = np.arange(forest.num_tokens) - np.repeat(starts, lengths)
    if not np.array_equal(offset, forest.position_ids[: forest.num_tokens]):
        raise ValueError("the model reads chains, but the forest has forks: pack it with PackLayout.CHAINS")
    token_index = np.repeat(np.arange(len(starts)), lengths) * width + offset
    ids = np.zeros(rows * width, np.int64)
    ids[token_index] = forest.token_ids[: forest.num_tokens]
    return ids.reshape(rows, width), np.broadcast_to(np.arange(width), (rows, width)), token_index
