"""Images in words, for a model that cannot see them.

A tool may return an image whether or not the model has eyes: a screenshot, a plot. A model without eyes is told that
there was one. An image in a prompt stays one, and is refused: such a task cannot be solved without eyes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ramify.gateway.media import POINTER
from ramify.trace import Media, MediaPart, Message

PNG = b"\x89PNG\r\n\x1a\n"


def describe_tool_images(messages: Sequence[Message], media: Mapping[str, Media]) -> Sequence[Message]:
    """Return the messages with the images of tool results in words."""
    if not any(message.role == "tool" and not isinstance(message.content, str) for message in messages):
        return messages
    return [_describe(message, media) if message.role == "tool" else message for message in messages]


def _describe(message: Message, media: Mapping[str, Media]) -> Message:
    if isinstance(message.content, str):
        return message
    words = (_words(media.get(part.hash)) if isinstance(part, MediaPart) else part.text for part in message.content)
    return replace(message, content="".join(words))


def _words(image: Media | None) -> str:
    if image is None:
        return "[an image; you cannot see images]"
    if image.mime == POINTER:
        return f"[an image: {image.data.decode()}; you cannot see images]"
    facts = [image.mime, *_pixels(image.data), f"{len(image.data)} bytes"]
    return f"[an image: {', '.join(facts)}; you cannot see images]"


def _pixels(data: bytes) -> list[str]:
    """Return the size of a PNG, as one entry; none for other formats."""
    if not data.startswith(PNG) or len(data) < 24:
        return []
    width, height = struct.unpack(">II", data[16:24])
    return [f"{width} x {height} pixels"]
