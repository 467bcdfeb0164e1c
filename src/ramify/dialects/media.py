"""Conversion of images between data URLs and the media of a trace.

An image that a client gives by URL is not downloaded: its media entry holds the URL, as `text/uri-list`.
"""

import base64
import binascii

from ramify.errors import ImageInvalid
from ramify.trace import Media

URI_LIST_MIME = "text/uri-list"


def media_from_url(url: str) -> Media:
    """Return the image of a data URL, or an entry that holds any other URL."""
    if not url.startswith("data:"):
        return Media.from_bytes(url.encode(), URI_LIST_MIME)
    head, comma, data = url.partition(",")
    mime = head.removeprefix("data:").partition(";")[0]
    if not comma or ";base64" not in head:
        raise ImageInvalid(f"image: expected a data URL in base64, found {url[:40]!r}")
    return media_from_base64(data, mime)


def media_from_base64(data: str, mime: str) -> Media:
    """Return the image of a base64 text."""
    try:
        return Media.from_bytes(base64.b64decode(data, validate=True), mime)
    except (binascii.Error, ValueError) as error:
        raise ImageInvalid(f"image: not valid base64: {error}") from error


def media_to_url(media: Media) -> str:
    """Return the URL of an image: a data URL, or the URL that the entry holds."""
    if media.mime == URI_LIST_MIME:
        return media.data.decode()
    return f"data:{media.mime};base64,{base64.b64encode(media.data).decode()}"
