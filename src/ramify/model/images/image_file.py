"""Read an image from a file that a task or a dataset names.

The name may come from a downloaded dataset, so the file may be a device without an end, a pipe that nobody writes, or
a file that is none of the reader's business: only regular files that begin like an image are returned.
"""

import stat
from pathlib import Path

from ramify.core.errors import ImageInvalid
from ramify.model.images.decode import MAX_BYTES, check_image


def read_image_file(path: Path) -> bytes:
    """Return the bytes of an image. Raises ImageInvalid if the file cannot be read, is too large or is no image."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ImageInvalid(f"image: {path} is not a regular file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the name contains a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ImageInvalid(f"image: {path} cannot be read: {reason}") from error
    try:
        check_image(data)
    except ImageInvalid as error:
        raise ImageInvalid(f"{error.message} ({path})") from error
    return data
