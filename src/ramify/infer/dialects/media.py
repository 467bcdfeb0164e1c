"""Reading of images: the one reader for clients, tasks, users, tools and datasets.

`read_image` takes every form of an image. How a URL is read depends on who sent it, so each sender has its own function
for URLs. Nothing is downloaded. Files are read only for environments and datasets, never for a client: its URLs other
than data URLs are kept unread, as `text/uri-list`, for models behind an API.
"""

import base64
import binascii
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from ramify.core.errors import ImageInvalid, RequestInvalid
from ramify.model.images import check_image
from ramify.model.images.decode import check_image_size, read_image_file
from ramify.trace import Media
from ramify.trace.image_header import MIME_TYPES, read_image_header

URI_LIST_MIME = "text/uri-list"
FILE_SCHEME = "file://"
IMAGE_PART_TYPES = ("image_url", "input_image", "image")
IMAGE_KEYS = ("image_url", "image", "path", "url")
IMAGE_PART_EXAMPLE = "{'type': 'image_url', 'image_url': {'url': URL}}"
SCHEME_PATTERN = r"[A-Za-z][A-Za-z0-9+.-]+:"  # two letters or more: one is a drive, as in C:\cat.png
MEDIA_ADVICE = "for an image, use Media.from_bytes(data, 'image/png') of ramify.trace"

ReadUrl = Callable[[str], Media]


def find_image_value(part: Mapping[str, Any]) -> Any:
    """Return what an image part holds as its image; None if it holds nothing."""
    return next((part[key] for key in IMAGE_KEYS if part.get(key) is not None), None)


def read_image(value: Any, read_url: ReadUrl) -> Media:
    """Return an image that is given as a URL, a `Media`, bytes, or a table with `url`, `bytes` or `path`.

    Hugging Face datasets store images as such tables. Raises RequestInvalid for anything else, and ImageInvalid.
    """
    content = value
    if isinstance(value, Mapping):
        table = cast(Mapping[str, Any], value)
        content = next((table[key] for key in ("url", "bytes", "path") if table.get(key) is not None), None)
    if isinstance(content, Media):
        content = content.data
    if isinstance(content, str):
        return read_url(content)
    if isinstance(content, bytes | bytearray | memoryview):
        data = bytes(cast(bytes, content))
        check_image(data)
        return _build_media(data, "")
    raise RequestInvalid(f"expected an image such as {IMAGE_PART_EXAMPLE}, found {describe_value(value)}")


def describe_value(value: Any) -> str:
    """Return what was found in place of a part or an image, with advice if it is an object such as one of Pillow."""
    if value is None or isinstance(value, (str, bool, int, float, list, tuple, Mapping)):
        return f"{value!r:.80}"
    return f"a {type(value).__qualname__}; {MEDIA_ADVICE}"


def read_data_url(url: str, *, expected: str = "a data URL") -> Media:
    """Return the image of a data URL. Raises ImageInvalid."""
    if not url.startswith("data:"):
        reason = "; addresses are not fetched" if url.startswith(("http://", "https://")) else ""
        raise ImageInvalid(f"image: expected {expected}, found {url!r:.200}{reason}")
    media = parse_client_url(url)
    check_image(media.data)
    return media


def read_environment_url(url: str) -> Media:
    """Return the image of a data URL or of an image file such as `file:///data/cat.png`. Raises ImageInvalid."""
    if url.startswith(FILE_SCHEME):
        return _build_media(read_image_file(_parse_file_url(url)), "")
    return read_data_url(url, expected="a data URL or file:///PATH")


def build_dataset_reader(directory: Path) -> ReadUrl:
    """Return the function that reads the images of a dataset: data URLs, and files below its directory."""
    return partial(_read_dataset_url, Path(os.path.normpath(directory.absolute())))


def _read_dataset_url(directory: Path, url: str) -> Media:
    if not url or url.startswith(("data:", "http://", "https://")):
        return read_data_url(url, expected="a data URL or a file below the directory of the dataset")
    name = _parse_file_url(url) if url.startswith(FILE_SCHEME) else url
    path = Path(os.path.normpath(directory / name))  # symbolic links may leave: Hugging Face's cache has them
    if not path.is_relative_to(directory):
        raise ImageInvalid(
            f"image: expected a file below the directory of the dataset, {directory}, found {url!r:.200}"
        )
    return _build_media(read_image_file(path), "")


def _parse_file_url(url: str) -> Path:
    path = Path(unquote(url.removeprefix(FILE_SCHEME)))
    if not path.is_absolute():
        raise ImageInvalid(f"image: expected an absolute path, as in file:///data/cat.png, found {url!r:.200}")
    return path


def parse_client_url(url: str) -> Media:
    """Decode a data URL; keep any other URL unread, as `text/uri-list`. Raises ImageInvalid for what is not a URL."""
    if not url.startswith("data:"):
        if not re.match(SCHEME_PATTERN, url):
            expected = "a data URL such as data:image/png;base64,iVBORw0KGgo..."
            advice = "read the file and send its bytes in base64"
            raise ImageInvalid(f"image: expected {expected}, found {url!r:.80}, which is not a URL; {advice}")
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
    """Return an entry whose type is read from the data, whatever the sender says."""
    header = read_image_header(data)
    return Media.from_bytes(data, mime if header is None else MIME_TYPES[header.format])


def media_to_url(media: Media) -> str:
    """Return the URL of an image: a data URL, or the URL that the entry holds."""
    if media.mime == URI_LIST_MIME:
        return media.data.decode()
    return f"data:{media.mime};base64,{base64.b64encode(media.data).decode()}"
