"""Parse the content of a message of a dataset: text, or parts of text and images.

An image is given inside its part (OpenAI's `image_url`, or `image`, `path` or `url` of a part of type `image`), or the
part only says `{"type": "image"}` and the row has a column with its images in order. It is a data URL, a file below
the directory of the dataset, bytes, or a table with `bytes` or `path`, as Hugging Face datasets store images. Nothing
is downloaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ramify.core.config.schema import is_dict
from ramify.core.errors import RequestInvalid
from ramify.infer.dialects.media import IMAGE_PART_TYPES, build_dataset_reader, find_image_value
from ramify.infer.dialects.message_parser import ContentPart, MessageParser
from ramify.trace import Media, MediaPart


class ContentParser:
    """Parses the contents of one dataset, whose files are below `directory`. Equal images are kept once."""

    def __init__(self, directory: Path) -> None:
        self._read_url = build_dataset_reader(directory)
        self._known: dict[str, Media] = {}

    def parse(self, content: Any, row_images: Iterator[Any], media: dict[str, Media]) -> str | tuple[ContentPart, ...]:
        """Parse a content and add its images to `media`; `row_images` are those of the row that are not used yet.

        Raises RequestInvalid or ImageInvalid.
        """
        parser = _RowParser(media=media, read_url=self._read_url, row_images=row_images, known=self._known)
        return parser.parse_content(content)


@dataclass(slots=True)
class _RowParser(MessageParser):
    """Parses the contents of one row. An image part that holds no image takes the next one of the row."""

    row_images: Iterator[Any] = field(default_factory=lambda: iter(()))
    known: dict[str, Media] = field(default_factory=dict[str, Media])

    def parse_part(self, entry: Any) -> ContentPart:
        if is_dict(entry) and entry.get("type") in IMAGE_PART_TYPES and find_image_value(entry) is None:
            image = next(self.row_images, None)
            if image is None:
                raise RequestInvalid(
                    "a message has more images than its row; set data.images_column, or put them into parts"
                )
            entry = {"type": "image", "image": image}
        return super(_RowParser, self).parse_part(entry)

    def add_media(self, media: Media) -> MediaPart:
        return super(_RowParser, self).add_media(self.known.setdefault(media.hash, media))
