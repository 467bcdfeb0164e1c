"""The vision tower of a vision-language model: from processed images to what the decoder reads at their placeholders.

The features of an image are one tensor, [1 + deepstack layers, image tokens, width]. Row 0 replaces the embeddings of
the image tokens; row i is added to the hidden states after the decoder's layer i - 1 (deepstack of Qwen3-VL; other
models have only row 0). The tower is run by itself and not inside the model's forward, so that an image is encoded
once, however many sequences hold it. "Tower" includes the projection to the decoder's width.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ramify.core.errors import RequestInvalid
from ramify.model.device_copy import copy_to_device
from ramify.model.images.processed_image import ProcessedImage
from ramify.model.pack_layout import VISION_MODEL_TYPES


class VisionTower:
    """The modules of a model that encode images, and the token that stands for a part of an image.

    `family` names the image family. `has_grid_positions` says whether image tokens have three positions (time, height,
    width) in the decoder.
    """

    family = ""
    has_grid_positions = False

    def __init__(self, model: Any, modules: Sequence[nn.Module]) -> None:
        self.image_token_id: int = model.config.image_token_id
        self.modules = list(modules)
        prefixes = [name for name, module in model.named_modules() if any(module is part for part in self.modules)]
        self.prefixes = tuple(f"{name}." for name in prefixes)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the weights."""
        return (parameter for module in self.modules for parameter in module.parameters())

    @property
    def is_trained(self) -> bool:
        """Whether a weight of the tower is trained."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def contains_weight(self, name: str) -> bool:
        """Return whether a name in the model's state dict belongs to the tower."""
        return name.startswith(self.prefixes)

    def check(self, image: ProcessedImage) -> None:
        """Raise RequestInvalid unless the tower can encode the image into `image.num_tokens` tokens."""
        if image.family != self.family:
            raise RequestInvalid(f"image {image.hash[:8]} was processed for {image.family}, the model is {self.family}")
        try:
            num_tokens = self.count_tokens(image)
        except (KeyError, ValueError, IndexError) as error:
            raise RequestInvalid(f"image {image.hash[:8]} was not processed for this model: {error}") from error
        if num_tokens != image.num_tokens:
            raise RequestInvalid(f"image {image.hash[:8]} has {num_tokens} tokens, not {image.num_tokens}")

    def count_tokens(self, image: ProcessedImage) -> int:
        """Return the number of tokens of an image. Raises KeyError or ValueError if its arrays do not fit."""
        raise NotImplementedError

    def encode(self, images: Sequence[ProcessedImage]) -> list[Tensor]:
        """Return the features of each image, [1 + deepstack layers, image tokens, width]."""
        raise NotImplementedError

    def count_flops(self, image: ProcessedImage) -> float:
        """Return the FLOPs of encoding an image: two per weight of a matrix and row that the matrix multiplies."""
        raise NotImplementedError

    def _to_device(self, arrays: Sequence[Any]) -> list[Tensor]:
        return copy_to_device(arrays, next(self.parameters()).device)


class Idefics3Tower(VisionTower):
    """The tower of Idefics3 and SmolVLM: an image is one or several tiles of one size."""

    family = "idefics3"

    def __init__(self, model: Any) -> None:
        core = model.model
        super().__init__(model, [core.vision_model, core.connector])
        self.vision_model, self.connector = core.vision_model, core.connector

    def count_tokens(self, image: ProcessedImage) -> int:
        """Return the number of tokens of an image, whose tiles must be squares."""
        pixels, config = image.arrays["pixel_values"], self.vision_model.config
        tiles, channels, height, width = pixels.shape
        tokens_per_side = height // config.patch_size // self.connector.scale_factor
        side = tokens_per_side * config.patch_size * self.connector.scale_factor
        if pixels.dtype != np.float32 or channels != config.num_channels or not height == width == side > 0:
            raise ValueError(f"pixel_values are {pixels.dtype} {list(pixels.shape)}")
        return tiles * tokens_per_side**2

    def encode(self, images: Sequence[ProcessedImage]) -> list[Tensor]:
        """Return the features of each image; tiles of one size are encoded together."""
        features: dict[int, Tensor] = {}
        by_size: dict[tuple[int, ...], list[int]] = {}
        for index, image in enumerate(images):
            by_size.setdefault(image.arrays["pixel_values"].shape[1:], []).append(index)
        for indices in by_size.values():
            tiles = torch.cat(self._to_device([images[index].arrays["pixel_values"] for index in indices]))
            hidden = self.vision_model(pixel_values=tiles.to(self.vision_model.dtype)).last_hidden_state
            counts = [len(images[index].arrays["pixel_values"]) for index in indices]
            for index, part in zip(indices, self.connector(hidden).split(counts)):
                features[index] = part.flatten(0, 1).unsqueeze(0)
        return [features[index] for index in range(len(images))]

    def count_flops(self, image: ProcessedImage) -> float:
        """Return the FLOPs of encoding an image; patches attend within their tile."""
        tiles, _, height, width = image.arrays["pixel_values"].shape
        config, size = self.vision_model.config, self.vision_model.patch_size
        patches = (height // size) * (width // size)
        attention = 4.0 * config.num_hidden_layers * config.hidden_size * patches**2
        matrices = 2.0 * count_matrix_weights(self.vision_model) * patches
        return tiles * (attention + matrices) + 2.0 * count_matrix_weights(self.connector) * image.num_tokens


class Qwen3VLTower(VisionTower):
    """The tower of Qwen3-VL: an image is a list of patches on a grid of any shape."""

    family = "qwen3_vl"
    has_grid_positions = True

    def __init__(self, model: Any) -> None:
        super().__init__(model, [model.model.visual])
        self.visual = model.model.visual

    def count_tokens(self, image: ProcessedImage) -> int:
        """Return the number of tokens of an image: its patches, merged in squares."""
        patches, grid = image.arrays["pixel_values"], image.arrays["image_grid_thw"]
        config, merge = self.visual.config, self.visual.spatial_merge_size
        patch_width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        if grid.shape != (1, 3) or grid.dtype != np.int64 or (grid <= 0).any() or (grid[0, 1:] % merge).any():
            raise ValueError(f"image_grid_thw is {grid.dtype} {grid.tolist()}")
        if patches.dtype != np.float32 or patches.shape != (grid.prod(), patch_width):
            raise ValueError(f"pixel_values are {patches.dtype} {list(patches.shape)} for the grid {grid.tolist()}")
        if tuple(grid[0].tolist()) != (image.grid[0], image.grid[1] * merge, image.grid[2] * merge):
            raise ValueError(f"image_grid_thw is {grid.tolist()}, which is not {image.grid} merged tokens")
        return int(grid.prod()) // merge**2

    def encode(self, images: Sequence[ProcessedImage]) -> list[Tensor]:
        """Return the features of each image; all patches are encoded together, attention stays inside an image."""
        patches = torch.cat(self._to_device([image.arrays["pixel_values"] for image in images]))
        grids = torch.cat(self._to_device([image.arrays["image_grid_thw"] for image in images]))
        output = self.visual(patches.to(self.visual.dtype), grid_thw=grids, return_dict=True)
        features = torch.stack([output.pooler_output, *output.deepstack_features])
        return list(features.split([image.num_tokens for image in images], dim=1))

    def count_flops(self, image: ProcessedImage) -> float:
        """Return the FLOPs of encoding an image; patches attend within their image."""
        patches, config = len(image.arrays["pixel_values"]), self.visual.config
        mergers = sum(map(count_matrix_weights, (self.visual.merger, self.visual.deepstack_merger_list)))
        attention = 4.0 * config.depth * config.hidden_size * patches**2
        matrices = 2.0 * (count_matrix_weights(self.visual) - mergers) * patches
        return attention + matrices + 2.0 * mergers * image.num_tokens


def count_matrix_weights(module: nn.Module) -> int:
    """Count the weights that multiply inputs: matrices and convolutions, but not embedding tables."""
    kinds = (nn.Linear, nn.Conv2d, nn.Conv3d)
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, kinds))


def get_vision_tower(model: Any) -> VisionTower | None:
    """Return the vision tower of a transformers model; None for a text model."""
    if model.config.model_type not in VISION_MODEL_TYPES:
        return None
    return Qwen3VLTower(model) if model.config.model_type == "qwen3_vl" else Idefics3Tower(model)


def build_image_inputs(model: Any, input_ids: Tensor, image_rows: Tensor, features: Tensor) -> dict[str, Any]:
    """Return the decoder's arguments for one row of tokens, `input_ids` [1, tokens], that holds image tokens.

    `image_rows` [image tokens] are their indices in the row, sorted, and `features` [1 + deepstack layers, image
    tokens, width] what stands there.
    """
    embeddings = model.get_input_embeddings()(input_ids)
    features = features.to(embeddings.dtype)
    arguments: dict[str, Any] = {"inputs_embeds": embeddings.index_copy(1, image_rows, features[:1])}
    if len(features) > 1:
        is_image = torch.zeros_like(input_ids, dtype=torch.bool).index_fill(1, image_rows, True)
        arguments |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": list(features[1:])}
    return arguments
