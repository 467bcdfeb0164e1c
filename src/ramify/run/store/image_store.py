"""The directory `media/` of a run: every image once, in a file named after the hash of its bytes.

Traces, forests and batches refer to images by hash. A file is written before the first trace that refers to it is
stored, and never changes, so a reader needs no lock.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from ramify.core.errors import RunDamaged
from ramify.core.files import fsync_path, mkdir_and_fsync, replace_file, write_and_fsync
from ramify.trace import Media, MediaPart, Message, Trace
from ramify.trace.image_header import MIME_TYPES, describe_image
from ramify.trace.message import SHA256

EXTENSIONS = {mime: name for name, mime in MIME_TYPES.items()}
OTHER_EXTENSION = "bin"
MAX_HEADER_BYTES = 2**16  # the size of a JPEG may come after a thumbnail
MEDIA_DIR = "media"  # in the directory of a run


class ImageStore:
    """The images of one run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, items: Iterable[Media]) -> None:
        """Store images. They are on disk when this returns; images that are stored already are not written again."""
        missing = {media.hash: media for media in items if media.data and not self.path(media).exists()}
        if missing:
            mkdir_and_fsync(self._directory)
            for media in missing.values():
                with replace_file(self.path(media)) as partial_path:
                    write_and_fsync(partial_path, media.data)
            fsync_path(self._directory)

    def path(self, media: Media) -> Path:
        """Return the file of an image. Raises RunDamaged if its hash is none, because it is the name of the file."""
        if not SHA256.fullmatch(media.hash):
            raise RunDamaged(f"image: expected a SHA-256 as its hash, found {media.hash!r:.80}; remove its rollout")
        return self._directory / f"{media.hash}.{EXTENSIONS.get(media.mime, OTHER_EXTENSION)}"

    def read_start(self, media: Media) -> bytes:
        """Return the first bytes of an image, enough for its header; none if the file is missing."""
        try:
            with self.path(media).open("rb") as file:
                return file.read(MAX_HEADER_BYTES)
        except FileNotFoundError:
            return b""

    def read(self, media: Media) -> Media:
        """Return an image with its bytes. Raises RunDamaged if the file is missing or was changed."""
        if media.data:
            return media
        path = self.path(media)
        try:
            stored = Media.from_bytes(path.read_bytes(), media.mime)
        except FileNotFoundError as error:
            raise RunDamaged(f"image {media.hash}: {path} is missing; restore it from a copy of the run") from error
        if stored.hash != media.hash:
            raise RunDamaged(f"image {media.hash}: {path} was changed; restore it from a copy of the run")
        return stored


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
    if isinstance(value, (list, tuple)):
        return [elide_data_urls(item) for item in cast(list[Any], value)]
    return value


def _label_data_url(match: re.Match[str]) -> str:
    try:
        data = base64.b64decode(match[1], validate=True)
    except (binascii.Error, ValueError):
        return "[image]"
    return describe_image(data, hashlib.sha256(data).hexdigest())
