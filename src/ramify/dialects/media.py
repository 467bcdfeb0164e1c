"""Conversion of images between data URLs and the media of a trace.

An image that a client gives by URL is not downloaded: its media entry holds the URL, as `text/uri-list`. Files are read
only for environments, never for a client.
"""

import base64
import binascii
from pathlib import Path
from urllib.parse import unquote

from ramify.errors import ImageInvalid
from ramify.images import read_image_header
from ramify.images.decode import check_image_size
from ramify.images.image_file import read_image_file
from ramify.images.image_header import MIME_TYPES
from ramify.trace import Media

URI_LIST_MIME = "text/uri-list"
FILE_SCHEME = "file://"


def media_from_url(url: str, *, read_files: bool = False) -> Media:
    """Return the image of a data URL, or an entry that holds any other URL.

    With `read_files`, which only environments may set, an image file such as `file:///data/cat.png` is read.
    Raises ImageInvalid.
    """
    if read_files and url.startswith(FILE_SCHEME):
        return _build_media(read_image_file(Path(unquote(url.removeprefix(FILE_SCHEME)))), "")
    if not url.startswith("data:"):
        return Media.from_bytes(url.encode(), URI_LIST_MIME)
    head, comma, data = url.partition(",")
    mime = head.removeprefix("data:").partition(";")[0]
    if not comma or ";base64" not in head:
        raise ImageInvalid(f"image: expected a data URL in base64, found {url[:40]!r}")
    return media_from_base64(data, mime)


def media_from_base64(data: str, mime: str) -> Media:
    """Return the image of a base64 text. Raises ImageInvalid."""
    check_image_size(len(data) * 3 // 4 - 2)  # padding may stand for two bytes
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageInvalid(f"image: not valid base64: {error}") from error
    return _build_media(decoded, mime)


def _build_media(data: bytes, mime: str) -> Media:
    """Return an entry whose type is that of the data, whatever the sender says."""
    header = read_image_header(data)
    return Media.from_bytes(data, mime if header is None else MIME_TYPES[header.format])


def media_to_url(media: Media) -> str:
    """Return the URL of an image: a data URL, or the URL that the entry holds."""
    if media.mime == URI_LIST_MIME:
        return media.data.decode()
    return f"data:{media.mime};base64,{base64.b64encode(media.data).decode()}"
