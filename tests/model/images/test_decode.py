"""Bad images raise ImageInvalid before they cost memory or time."""

import resource

import numpy as np
import pytest
from PIL import Image

from ramify.core.errors import ImageInvalid
from ramify.model.images import decode_image
from ramify.model.images.decode import MAX_BYTES, check_image
from ramify.trace.image_header import MAX_JPEG_MARKERS, describe_image, read_image_header
from tests.support.images import encode_image, make_animation, make_pixels, make_png_header

PNG = encode_image(make_pixels(40, 30))
JPEG = encode_image(make_pixels(40, 30), "JPEG")
BAD_IMAGES = {
    "truncated png": (PNG[: len(PNG) // 2], "damaged or incomplete png"),
    "truncated jpeg": (JPEG[: len(JPEG) // 2], "damaged or incomplete jpeg"),
    "header only": (PNG[:20], "expected a complete png, jpeg, webp image, found 20 bytes of format 'unknown'"),
    "bomb": (make_png_header(10_000, 10_000), "10000 × 10000 pixels are more than the limit"),
    "no pixels": (make_png_header(0, 5), "0 × 5 pixels"),
    "svg": (b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'></svg>", "format 'svg'"),
    "gif": (make_animation("GIF"), "format 'gif'"),
    "animated png": (make_animation("PNG"), "an animation of 3 frames"),
    "animated webp": (make_animation("WEBP"), "an animation of 3 frames"),
    "text": (b"hello", "format 'unknown'"),
    "nothing": (b"", "found 0 bytes"),
    "too many bytes": (PNG + bytes(MAX_BYTES), "more than the limit"),
    "damaged checksum": (PNG[:40] + b"\0\0\0\0" + PNG[44:], "damaged or incomplete png"),
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_a_bad_image_is_refused_by_name(kind):
    data, message = BAD_IMAGES[kind]
    with pytest.raises(ImageInvalid, match=message) as caught:
        decode_image(data)
    assert caught.value.blame == "policy" and not caught.value.retryable


def test_a_bomb_is_refused_without_decoding_it():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ImageInvalid):
        decode_image(make_png_header(30_000, 30_000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kilobytes


def test_a_jpeg_of_fill_bytes_and_markers_is_not_walked_byte_by_byte():
    fill = b"\xff" * 2**20
    assert read_image_header(JPEG[:2] + fill + JPEG[2:]) == read_image_header(JPEG)
    assert read_image_header(JPEG[:2] + fill) is None
    restart = b"\xff\xd0"  # a marker without a length
    assert read_image_header(JPEG[:2] + 10 * restart + JPEG[2:]) == read_image_header(JPEG)
    assert read_image_header(JPEG[:2] + 2 * MAX_JPEG_MARKERS * restart + JPEG[2:]) is None


@pytest.mark.parametrize(
    "format, options",
    [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": Image.Exif().tobytes(), "icc_profile": b"x" * 200}),
    ],
)
def test_the_header_is_read_without_pillow(format, options):
    data = encode_image(make_pixels(123, 45), format, **options)
    header = read_image_header(data)
    assert (header.format, header.width, header.height) == (format.lower(), 123, 45)
    check_image(data)
    assert decode_image(data).shape == (45, 123, 3)


def test_pixels_are_those_of_the_file():
    pixels = make_pixels(20, 10)
    assert np.array_equal(decode_image(encode_image(pixels)), pixels)


def test_an_image_is_described_in_a_few_words():
    assert describe_image(PNG, "3f2a99") == "[image 40×30 png 3f2a]"
    assert describe_image(b"", "3f2a99") == "[image 3f2a]"
