"""Describe images in words, for a model that takes no images, or none in the results of tools.

A tool may return an image, such as a screenshot or a plot, whatever the model. Such a model gets a description of it
instead. An image in a prompt is not replaced but rejected later: such a task cannot be solved without seeing it.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ramify.infer.dialects.media import URI_LIST_MIME
from ramify.trace import Media, MediaPart, Message
from ramify.trace.image_header import read_image_header


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
    header = read_image_header(image.data)
    size = [] if header is None else [f"{header.width} x {header.height} pixels"]
    facts = [image.mime, *size, f"{len(image.data)} bytes"]
    return f"[an image: {', '.join(facts)}; you cannot see images]"
