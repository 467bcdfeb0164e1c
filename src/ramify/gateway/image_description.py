"""Describe images in words, for a model that takes no images.

A tool may return an image, such as a screenshot or a plot, whatever the model. A model that takes no images gets a
description of it instead. An image in a prompt is not replaced but rejected later: such a task cannot be solved
without seeing it.
"""

import struct
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ramify.dialects.media import URI_LIST_MIME
from ramify.trace import Media, MediaPart, Message

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def describe_tool_images(messages: Sequence[Message], media: Mapping[str, Media]) -> Sequence[Message]:
    """Return the messages with the images of tool results replaced by descriptions."""
    return [_describe_images(message, media) if message.role == "tool" else message for message in messages]


def _describe_images(message: Message, media: Mapping[str, Media]) -> Message:
    if isinstance(message.content, str):
        return message
    texts = (
        _describe_image(media.get(part.hash)) if isinstance(part, MediaPart) else part.text for part in message.content
    )
    return replace(message, content="".join(texts))


def _describe_image(image: Media | None) -> str:
    if image is None:
        return "[an image; you cannot see images]"
    if image.mime == URI_LIST_MIME:
        return f"[an image: {image.data.decode()}; you cannot see images]"
    facts = [image.mime, *_pixel_size(image.data), f"{len(image.data)} bytes"]
    return f"[an image: {', '.join(facts)}; you cannot see images]"


def _pixel_size(data: bytes) -> list[str]:
    """Return the size of a PNG as a list of one text; an empty list for other formats."""
    if not data.startswith(PNG_SIGNATURE) or len(data) < 24:
        return []
    width, height = struct.unpack(">II", data[16:24])
    return [f"{width} x {height} pixels"]
