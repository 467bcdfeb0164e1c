"""Processed images, each computed once while it stays in a cache of bounded size.

An env worker has one event loop for all its rollouts, and an image may take seconds. So a coroutine waits for
`process_async`, and rendering asks for the layout only, which is a few numbers and outlives the arrays.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ramify.core.bounded_cache import BoundedCache
from ramify.model.images.image_family import ImageFamily
from ramify.model.images.processed_image import ImageLayout, ProcessedImage
from ramify.trace import Media

MAX_CACHE_BYTES = 64 * 2**20
MAX_LAYOUTS = 2**16  # layouts of images in use: far more than the rollouts of a worker can have


class ImageCache:
    """Processes images for one family, for several threads.

    When the arrays exceed `max_bytes`, the least recently used are dropped. One thread processes all images, one after
    another: this bounds the memory that it takes, and threads that need the same image get the same result.
    """

    def __init__(self, family: ImageFamily, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self.family = family
        self._images = BoundedCache[str, ProcessedImage](max_bytes, measure=lambda image: image.num_bytes)
        self._layouts: BoundedCache[str, ImageLayout] = BoundedCache(MAX_LAYOUTS)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")  # starts with the first image

    def process(self, media: Media) -> ProcessedImage:
        """Return the processed image of `media`; this may take seconds. Raises ImageInvalid."""
        image = self._images.get(media.hash)
        return self._worker.submit(self._find_or_process, media).result() if image is None else image

    async def process_async(self, media: Media) -> ProcessedImage:
        """Return the processed image of `media` without blocking the event loop. Raises ImageInvalid.

        If the caller is cancelled before the image's turn comes, the image is not processed.
        """
        image = self._images.get(media.hash)
        if image is None:
            image = await asyncio.wrap_future(self._worker.submit(self._find_or_process, media))
        return image

    def get_layout(self, media: Media) -> ImageLayout:
        """Return the layout of an image, at once if it was processed before. Raises ImageInvalid."""
        layout = self.find_layout(media.hash)
        return self.process(media).layout if layout is None else layout

    def find_layout(self, hash: str) -> ImageLayout | None:
        """Return the layout of an image that was processed before, or None."""
        return self._layouts.get(hash)

    def _find_or_process(self, media: Media) -> ProcessedImage:
        image = self._images.get(media.hash)  # it may have been processed while this call waited
        if image is None:
            image = self.family.process(media)
            self._layouts.put(image.hash, image.layout)
            self._images.put(image.hash, image)
        return image
