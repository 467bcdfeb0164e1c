"""Images in texts for people: `[image 100×100 png 3f2a]` instead of bytes or base64."""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from typing import Any, cast

from ramify.run.store.image_store import ImageStore
from ramify.trace import MediaPart, Message, Trace
from ramify.trace.image_header import describe_image

DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,([A-Za-z0-9+/=]*)")


def label_images(trace: Trace, images: ImageStore | None = None) -> dict[str, str]:
    """Return a label for each image of a trace, by hash; `images` is the store of its run."""
    return {
        media.hash: describe_image(media.data or (images.read_start(media) if images else b""), media.hash)
        for media in trace.graph.media
    }


def format_content(message: Message, labels: Mapping[str, str]) -> str:
    """Return the content of a message as a text, with labels for images."""
    if isinstance(message.content, str):
        return message.content
    return "".join(
        labels.get(part.hash, f"[image {part.hash[:4]}]") if isinstance(part, MediaPart) else part.text
        for part in message.content
    )


def elide_data_urls(value: Any) -> Any:
    """Return plain data in which every image in base64 is replaced by its label."""
    if isinstance(value, str):
        return DATA_URL.sub(_label_data_url, value) if "data:image/" in value else value
    if isinstance(value, Mapping):
        return {key: elide_data_urls(item) for key, item in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [elide_data_urls(item) for item in cast(list[Any], value)]
    return value


def _label_data_url(match: re.Match[str]) -> str:
    try:
        data = base64.b64decode(match[1], validate=True)
    except (binascii.Error, ValueError):
        return "[image]"
    return describe_image(data, hashlib.sha256(data).hexdigest())
