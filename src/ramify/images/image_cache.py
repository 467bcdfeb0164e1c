"""Processed images, each computed once while it stays in a cache of bounded size."""

import threading

from ramify.images.image_family import ImageFamily
from ramify.images.processed_image import ProcessedImage
from ramify.trace import Media

MAX_CACHE_BYTES = 64 * 2**20


class ImageCache:
    """Processes images for one family. When the arrays exceed `max_bytes`, the least recently used are dropped."""

    def __init__(self, family: ImageFamily, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.family = family
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: dict[str, ProcessedImage] = {}
        self._lock = threading.Lock()  # large prompts are rendered in threads

    def process(self, media: Media) -> ProcessedImage:
        """Return the processed image of `media`. Raises ImageInvalid."""
        with self._lock:
            image = self._images.pop(media.hash, None)
            if image is not None:
                self._images[media.hash] = image
                return image
        image = self.family.process(media)
        with self._lock:
            if media.hash not in self._images:
                self._images[media.hash] = image
                self._num_bytes += image.num_bytes
            while self._num_bytes > self._max_bytes and len(self._images) > 1:
                self._num_bytes -= self._images.pop(next(iter(self._images))).num_bytes
        return image
