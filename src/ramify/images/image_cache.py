"""Processed images, each computed once while it stays in a cache of bounded size."""

import threading
from concurrent.futures import ThreadPoolExecutor

from ramify.images.image_family import ImageFamily
from ramify.images.processed_image import ProcessedImage
from ramify.trace import Media

MAX_CACHE_BYTES = 64 * 2**20


class ImageCache:
    """Processes images for one family, for several threads.

    When the arrays exceed `max_bytes`, the least recently used are dropped. One thread processes all images, one after
    another: this bounds the memory that it takes, and threads that need the same image get the same result.
    """

    def __init__(self, family: ImageFamily, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.family = family
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: dict[str, ProcessedImage] = {}
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")  # starts with the first image

    def process(self, media: Media) -> ProcessedImage:
        """Return the processed image of `media`. Raises ImageInvalid."""
        image = self._find(media.hash)
        return self._worker.submit(self._find_or_process, media).result() if image is None else image

    def _find_or_process(self, media: Media) -> ProcessedImage:
        image = self._find(media.hash)  # it may have been processed while this call waited
        if image is None:
            image = self.family.process(media)
            self._add(image)
        return image

    def _find(self, hash: str) -> ProcessedImage | None:
        with self._lock:
            image = self._images.pop(hash, None)
            if image is not None:
                self._images[hash] = image
            return image

    def _add(self, image: ProcessedImage) -> None:
        with self._lock:
            self._images[image.hash] = image
            self._num_bytes += image.num_bytes
            while self._num_bytes > self._max_bytes and len(self._images) > 1:
                self._num_bytes -= self._images.pop(next(iter(self._images))).num_bytes
