"""Images on their way through: bytes in the media table, data URLs on the wire.

An image that a client only points to stays a pointer: its entry holds the address, as `text/uri-list`.
"""

from __future__ import annotations

import base64
import binascii

from ramify.errors import RequestInvalid
from ramify.trace import Media

URI_LIST_MIME = "text/uri-list"


def media_from_url(url: str) -> Media:
    """The image behind a data URL, or a pointer to one elsewhere."""
    if not url.startswith("data:"):
        return Media.from_bytes(url.encode(), URI_LIST_MIME)
    head, comma, data = url.partition(",")
    mime = head.removeprefix("data:").partition(";")[0]
    if not comma or ";base64" not in head:
        raise RequestInvalid(f"image: expected a data URL in base64, found {url[:40]!r}")
    return media_from_base64(data, mime)


def media_from_base64(data: str, mime: str) -> Media:
    """The image that this text spells."""
    try:
        return Media.from_bytes(base64.b64decode(data, validate=True), mime)
    except (binascii.Error, ValueError) as error:
        raise RequestInvalid(f"image: not valid base64: {error}") from error


def media_to_url(media: Media) -> str:
    """The image as a URL."""
    if media.mime == URI_LIST_MIME:
        return media.data.decode()
    return f"data:{media.mime};base64,{base64.b64encode(media.data).decode()}"
