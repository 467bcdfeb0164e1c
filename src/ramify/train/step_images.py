"""The images of a training step: the tower encodes each once, and gradients go back through it once.

The packs read copies of the features that are cut off from the tower's graph. Their backward passes add up gradients at
these copies, in float32. After the last pack `backward` takes the sums through the tower: an image that many attempts
and packs hold costs as much as one that a single attempt holds.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from ramify.core.errors import ModelUnsupported
from ramify.model.images import ImageSpan, ProcessedImage, compute_positions
from ramify.model.vision import VisionTower
from ramify.trace import Forest, Media

LoadImage = Callable[[Media], ProcessedImage]


class StepImages:
    """The encoded images of some packs, by hash."""

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
