"""Parse the content of a message of a dataset: text, or parts of text and images.

An image is given inside its part (OpenAI's `image_url`, or `image`, `path` or `url` of a part of type `image`), or the
part only says `{"type": "image"}` and the row has a column with its images in order. It is a data URL, a file below
the directory of the dataset, bytes, or a table with `bytes` or `path`, as Hugging Face datasets store images. Nothing
is downloaded.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ramify.dialects.media import media_from_url
from ramify.images import check_image, read_image_header
from ramify.images.image_file import read_image_file
from ramify.images.image_header import MIME_TYPES
from ramify.trace import Media, MediaPart, TextPart

IMAGE_KEYS = ("image", "image_url", "path", "url")


class ContentParser:
    """Parses the contents of one dataset, whose files are below `directory`. Equal images are kept once."""

    def __init__(self, directory: Path) -> None:
        self._directory = Path(os.path.normpath(directory))
        self._known: dict[str, Media] = {}

    def parse(
        self, content: Any, row_images: Iterator[Any], media: dict[str, Media]
    ) -> str | tuple[TextPart | MediaPart, ...]:
        """Parse a content and add its images to `media`; `row_images` are those of the row that are not used yet.

        Raises ValueError, KeyError or ImageInvalid.
        """
        if content is None or isinstance(content, str):
            return content or ""
        parts: list[TextPart | MediaPart] = []
        for part in content:
            if part.get("type") == "text":
                parts.append(TextPart(part["text"]))
            elif part.get("type") in ("image", "image_url", "input_image"):
                image = self._load(next((part[key] for key in IMAGE_KEYS if part.get(key)), None), row_images)
                media[image.hash] = image
                parts.append(MediaPart(image.hash))
            else:
                raise ValueError(f"a message has a part of type {part.get('type')!r}; expected text or image")
        if any(isinstance(part, MediaPart) for part in parts):
            return tuple(parts)
        return "".join(part.text for part in parts if isinstance(part, TextPart))

    def _load(self, value: Any, row_images: Iterator[Any]) -> Media:
        """Return the image that a part holds, or the next one of the row if it holds none."""
        if value is None and (value := next(row_images, None)) is None:
            raise ValueError("a message has more images than its row; set data.images_column, or put them into parts")
        if isinstance(value, Mapping):
            table: Mapping[str, Any] = value
            value = table.get("bytes") or table.get("url") or table.get("path")
        data = self._read(value)
        check_image(data)
        header = read_image_header(data)
        image = Media.from_bytes(data, MIME_TYPES[header.format] if header else "")
        return self._known.setdefault(image.hash, image)

    def _read(self, value: Any) -> bytes:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if not isinstance(value, str) or value.startswith(("http://", "https://")):
            raise ValueError(f"an image is {value!r:.60}; expected a data URL, a file or bytes")
        if value.startswith("data:"):
            return media_from_url(value).data
        path = Path(
            os.path.normpath(self._directory / value)
        )  # symbolic links may leave: Hugging Face's cache has them
        if not path.is_relative_to(self._directory):
            raise ValueError(f"an image is {value!r:.200}; expected a file below the directory of the dataset")
        return read_image_file(path)
