"""The images of the engine: uploaded once per server, encoded once per version of the vision tower.

Both caches are bounded. An uploaded image that was dropped is asked for again (`ImageMissing`); features that were
dropped are computed again. A request holds its own images, so it can be computed again at any time, for example with
new weights.
"""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ramify.core.bounded_cache import BoundedCache
from ramify.core.errors import ImageMissing, RequestInvalid
from ramify.infer.metrics import EngineCounters
from ramify.model.images import ImageSpan, ProcessedImage, compute_positions
from ramify.model.vision import VisionTower

USE_TIMEOUT = 30.0  # seconds from the upload of an image to the request that uses it


class ImageReference(NamedTuple):
    """An image of a prompt: its hash, and the prompt tokens [start, stop) that stand for it.

    `image` is the image itself; without it, the image must have been uploaded.
    """

    hash: str
    start: int
    stop: int
    image: ProcessedImage | None = None


@dataclass(frozen=True, slots=True)
class EngineImage:
    """An image of a prompt, and the prompt tokens [start, stop) that stand for it.

    `token_indices` are the ones that get the image's features; the others are separators.
    """

    image: ProcessedImage
    start: int
    stop: int
    token_indices: npt.NDArray[np.int64]


class UploadedImages:
    """Processed images by hash. When they exceed `max_bytes`, the least recently used are dropped. Thread-safe.

    An image that was not used since its last upload is kept for `use_timeout`, as long as all images together stay
    below twice `max_bytes`: the request that it was uploaded for is about to be sent.
    """

    def __init__(self, tower: VisionTower, max_bytes: int, use_timeout: float = USE_TIMEOUT) -> None:
        self._tower, self._max_bytes, self._use_timeout = tower, max_bytes, use_timeout
        self._images: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._unused_since: dict[str, float] = {}  # monotonic time of the last upload, of images not used since
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, image: ProcessedImage) -> None:
        """Keep an image. Raises RequestInvalid if the model cannot read it, or if it is larger than the cache."""
        self._tower.check(image)
        if image.num_bytes > self._max_bytes:
            problem = f"image {image.hash[:8]} has {image.num_bytes} bytes, the cache only {self._max_bytes}"
            raise RequestInvalid(f"{problem}: raise inference.image_cache_mib")
        with self._lock:
            if image.hash not in self._images:
                self._images[image.hash] = image
                self._num_bytes += image.num_bytes
            self._images.move_to_end(image.hash)
            self._unused_since[image.hash] = time.monotonic()
            self._evict(lambda hash: not self._is_reserved(hash), self._max_bytes)
            self._evict(lambda hash: True, 2 * self._max_bytes)

    def resolve(self, references: Sequence[ImageReference], prompt_token_ids: list[int]) -> tuple[EngineImage, ...]:
        """Return the images of a prompt. Raises ImageMissing, which names all missing images, or RequestInvalid."""
        for item in references:
            if item.image is not None:
                self._tower.check(item.image)
        uploaded = self._find([item.hash for item in references if item.image is None])
        images = [uploaded[item.hash] if item.image is None else item.image for item in references]
        prompt_images: list[EngineImage] = []
        previous_stop = 0
        for (hash, start, stop, _), image in zip(references, images):
            if not previous_stop <= start < stop <= len(prompt_token_ids):
                problem = f"image {hash[:8]} has tokens [{start}, {stop})"
                expected = f"after the previous image and inside the prompt of {len(prompt_token_ids)} tokens"
                raise RequestInvalid(f"images: {problem}; expected them {expected}")
            ids = np.array(prompt_token_ids[start:stop])
            indices = start + np.flatnonzero(ids == self._tower.image_token_id)
            if len(indices) != image.num_tokens:
                problem = f"image {hash[:8]} has {len(indices)} image tokens in the prompt, expected {image.num_tokens}"
                raise RequestInvalid(f"images: {problem}")
            prompt_images.append(EngineImage(image, start, stop, indices))
            previous_stop = stop
        return tuple(prompt_images)

    def _is_reserved(self, hash: str) -> bool:
        return time.monotonic() - self._unused_since.get(hash, -math.inf) < self._use_timeout

    def _evict(self, may_drop: Callable[[str], bool], max_bytes: int) -> None:
        """Drop images that may be dropped, the least recently used first, until `max_bytes` are left."""
        if self._num_bytes <= max_bytes:
            return
        for hash in list(self._images):
            if self._num_bytes <= max_bytes:
                break
            if may_drop(hash):
                self._num_bytes -= self._images.pop(hash).num_bytes
                self._unused_since.pop(hash, None)

    def _find(self, hashes: Sequence[str]) -> dict[str, ProcessedImage]:
        with self._lock:
            if missing := [hash for hash in dict.fromkeys(hashes) if hash not in self._images]:
                raise ImageMissing(f"upload these images first: {', '.join(missing)}", missing)
            for hash in hashes:
                self._images.move_to_end(hash)
                self._unused_since.pop(hash, None)
            return {hash: self._images[hash] for hash in hashes}

    def compute_positions(self, images: Sequence[EngineImage], num_prompt_tokens: int) -> npt.NDArray[np.int64] | None:
        """Return the positions [3, prompt tokens] of a prompt, or None if they count its tokens."""
        if not images or not self._tower.has_grid_positions:
            return None
        spans = [
            ImageSpan(int(item.token_indices[0]), int(item.token_indices[-1]) + 1, item.image.grid) for item in images
        ]
        return compute_positions(np.arange(num_prompt_tokens), spans)


class ImageEncoder:
    """Encodes images, and keeps their features until the tower changes, up to `max_bytes`."""

    def __init__(self, tower: VisionTower, max_bytes: int, counters: EngineCounters) -> None:
        self._tower, self._counters = tower, counters
        self._features: BoundedCache[str, Tensor] = BoundedCache(max_bytes, measure=lambda features: features.nbytes)

    def get_features(self, images: Sequence[ProcessedImage]) -> dict[str, Tensor]:
        """Return the features of these images by hash; those that are not kept are encoded together."""
        kept = ((image.hash, self._features.get(image.hash)) for image in images)
        features_by_hash = {hash: features for hash, features in kept if features is not None}
        new = {image.hash: image for image in images if image.hash not in features_by_hash}
        if new:
            self._counters.encoded_images += len(new)
            for hash, features in zip(new, self._tower.encode(list(new.values()))):
                features_by_hash[hash] = features.clone()  # not a view that keeps the features of all of them
                self._features.put(hash, features_by_hash[hash])
        return features_by_hash

    def clear(self) -> None:
        """Drop all features: the tower has changed."""
        self._features.clear()
