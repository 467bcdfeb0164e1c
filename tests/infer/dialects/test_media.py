"""Images of data URLs and files become media; what is not an image, or too large, is refused before it is kept."""

import base64
import os
from pathlib import Path

import pytest

from ramify.core.errors import ImageInvalid
from ramify.infer.dialects.media import media_from_base64, media_to_url, parse_client_url, read_environment_url
from ramify.model.images.decode import MAX_BYTES
from tests.support.images import encode_image, make_pixels

PNG = encode_image(make_pixels(40, 30))


def test_the_type_is_that_of_the_data():
    media = media_from_base64(base64.b64encode(PNG).decode(), "image/jpeg")
    assert media.mime == "image/png" and parse_client_url(media_to_url(media)) == media


def test_base64_of_more_bytes_than_the_limit_is_refused_before_it_is_decoded():
    data = "%" * (MAX_BYTES * 4 // 3 + 8)  # not valid base64, but its length is wrong first
    with pytest.raises(ImageInvalid, match=f"more than the limit of {MAX_BYTES}"):
        media_from_base64(data, "image/jpeg")


def make_pipe(directory: Path) -> Path:
    os.mkfifo(directory / "pipe.png")
    return directory / "pipe.png"


def make_text(directory: Path) -> Path:
    (directory / "secret.png").write_text("password: 1234")
    return directory / "secret.png"


def make_large_file(directory: Path) -> Path:
    with (directory / "large.png").open("wb") as file:
        file.write(PNG)
        file.truncate(MAX_BYTES + 1)
    return directory / "large.png"


@pytest.mark.parametrize(
    "make_path, problem",
    [
        (lambda _: Path("/dev/zero"), "not a regular file"),
        (make_pipe, "not a regular file"),
        (lambda directory: directory, "not a regular file"),
        (make_text, "format 'unknown'"),
        (make_large_file, "more than the limit"),
        (lambda directory: directory / "lost.png", "No such file"),
        (lambda directory: directory / "%00.png", "cannot be read"),
    ],
)
def test_a_file_that_is_no_image_is_not_read(make_path, problem, tmp_path):
    with pytest.raises(ImageInvalid, match=problem) as caught:
        read_environment_url(f"file://{make_path(tmp_path)}")
    assert "1234" not in caught.value.message


def test_files_are_read_only_for_environments(tmp_path):
    (tmp_path / "a b.png").write_bytes(PNG)
    url = f"file://{tmp_path}/a%20b.png"
    media = read_environment_url(url)
    assert media.data == PNG and media.mime == "image/png"
    assert parse_client_url(url).data == url.encode()
