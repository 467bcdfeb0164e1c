"""Processed images equal the output of the transformers processors, and unsupported families are refused by name."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from ramify.core.errors import ConfigInvalid, ImageInvalid, ModelUnsupported
from ramify.infer.dialects.media import media_to_url
from ramify.model.images import ImageCache, ProcessedImage, load_image_family
from ramify.trace import Media
from tests.support.images import (
    encode_image,
    make_media,
    make_pixels,
    write_idefics3_config,
    write_model_config,
    write_qwen3_vl_config,
)

SIZES = [(100, 100), (1, 1), (31, 90), (333, 47), (640, 480), (64, 32), (33, 33)]
TURNED_EXIF = Image.Exif()
TURNED_EXIF[0x0112] = 6  # the orientation: turned by 90 degrees
FORMATS = {
    "png": {},
    "jpeg": {"format": "JPEG", "quality": 80},
    "webp": {"format": "WEBP", "quality": 80},
    "gray": {"mode": "L"},
    "palette": {"mode": "P"},
    "transparent": {"mode": "RGBA"},
    "black and white": {"mode": "1"},
    "cmyk": {"format": "JPEG", "mode": "CMYK"},
    "turned": {"format": "JPEG", "exif": TURNED_EXIF.tobytes()},
}


def open_media(media: Media) -> Image.Image:
    """Open an image as the library opens those that it is given by address: turned upright, in RGB."""
    return load_image(media_to_url(media))


def sample(width: int, height: int, kind: str = "png") -> Media:
    return Media.from_bytes(encode_image(make_pixels(width, height), **FORMATS[kind]), "image/png")


def process_with_idefics3(media: Media, **options) -> tuple[np.ndarray, int, int]:
    processor = Idefics3ImageProcessorPil(**options)
    result = processor(open_media(media), return_row_col_info=True, return_tensors="np")
    assert result["pixel_attention_mask"].all()  # every tile is full, so the mask is left out
    return result["pixel_values"][0], result["rows"][0][0], result["cols"][0][0]


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_arrays_of_the_library(kind, tmp_path):
    media = sample(75, 43, kind)
    idefics3 = load_image_family(write_idefics3_config(tmp_path / "i")).process(media)
    expected, _, _ = process_with_idefics3(media, size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    assert np.array_equal(idefics3.arrays["pixel_values"], expected)

    qwen = load_image_family(write_qwen3_vl_config(tmp_path / "q")).process(media)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 1024, "longest_edge": 65536}, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    expected = processor(open_media(media), return_tensors="np")
    assert set(qwen.arrays) == set(expected)
    assert all(np.array_equal(qwen.arrays[name], expected[name]) for name in expected)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("width, height", SIZES)
def test_idefics3_equals_the_library(width, height, splits, tmp_path):
    media = sample(width, height)
    family = load_image_family(write_idefics3_config(tmp_path, longest_edge=90, splits=splits))
    image = family.process(media)
    expected, rows, columns = process_with_idefics3(
        media, size={"longest_edge": 90}, max_image_size={"longest_edge": 32}, do_image_splitting=splits
    )
    assert np.array_equal(image.arrays["pixel_values"], expected)
    text = get_image_prompt_string(rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>")
    assert family.placeholder_text(image) == text
    assert image.num_tokens == text.count("<image>")


@pytest.mark.parametrize("longest_edge", [4500, 32, 8])
def test_idefics3_limits_the_longest_edge_like_the_library(longest_edge, tmp_path):
    media = sample(40, 2)
    family = load_image_family(write_idefics3_config(tmp_path, tile=512, longest_edge=longest_edge))
    expected, _, _ = process_with_idefics3(
        media, size={"longest_edge": longest_edge}, max_image_size={"longest_edge": 512}
    )
    assert np.array_equal(family.process(media).arrays["pixel_values"], expected)


@pytest.mark.parametrize("width, height", [*SIZES, (700, 500), (17, 1600)])
def test_qwen3_vl_equals_the_library(width, height, tmp_path):
    media = sample(width, height)
    family = load_image_family(write_qwen3_vl_config(tmp_path))
    image = family.process(media)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 1024, "longest_edge": 65536}, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    expected = processor(open_media(media), return_tensors="np")
    assert all(np.array_equal(image.arrays[name], expected[name]) for name in expected)
    _, rows, columns = expected["image_grid_thw"][0]
    assert image.grid == (1, rows // 2, columns // 2)
    assert family.placeholder_text(image) == "<|image_pad|>" * image.num_tokens
    assert image.num_tokens == rows * columns // 4


def test_qwen3_vl_uses_the_library_s_defaults(tmp_path):
    directory = write_model_config(tmp_path, {"model_type": "qwen3_vl", "vision_config": {}}, {"min_pixels": 5000})
    media = sample(30, 40)
    image = load_image_family(directory).process(media)
    expected = Qwen2VLImageProcessorPil(min_pixels=5000)(open_media(media), return_tensors="np")
    assert all(np.array_equal(image.arrays[name], expected[name]) for name in expected)


def test_a_shape_that_qwen3_vl_cannot_take_is_refused(tmp_path):
    with pytest.raises(ImageInvalid, match="402 × 2"):
        load_image_family(write_qwen3_vl_config(tmp_path)).process(sample(402, 2))


def test_a_text_model_has_no_image_family(tmp_path):
    assert load_image_family(write_model_config(tmp_path, {"model_type": "llama"}, {})) is None


def test_other_families_are_refused_by_name(tmp_path):
    with pytest.raises(ModelUnsupported, match=r"'llava'.*idefics3, smolvlm and qwen3_vl"):
        load_image_family(write_model_config(tmp_path / "a", {"model_type": "llava", "vision_config": {}}, {}))
    with pytest.raises(ModelUnsupported, match=r"'gemma3'.*later tokens of the same image"):
        load_image_family(write_model_config(tmp_path / "b", {"model_type": "gemma3", "vision_config": {}}, {}))


def test_a_wrong_number_of_tokens_per_tile_is_refused(tmp_path):
    directory = write_idefics3_config(tmp_path)
    (directory / "processor_config.json").write_text('{"image_seq_len": 9}')
    with pytest.raises(ConfigInvalid, match=r"image_seq_len = 9.*gives 4 tokens"):
        load_image_family(directory)


def test_the_image_processor_may_be_in_the_processor_config(tmp_path):
    directory = write_qwen3_vl_config(tmp_path)
    media = sample(60, 60)
    expected = load_image_family(directory).process(media)
    config = (directory / "preprocessor_config.json").read_text()
    (directory / "preprocessor_config.json").unlink()
    (directory / "processor_config.json").write_text(f'{{"image_processor": {config}}}')
    image = load_image_family(directory).process(media)
    assert np.array_equal(image.arrays["pixel_values"], expected.arrays["pixel_values"])


def test_a_processed_image_survives_the_wire(tmp_path):
    image = load_image_family(write_qwen3_vl_config(tmp_path)).process(make_media(50, 40))
    decoded = ProcessedImage.decode(image.encode())
    assert (decoded.hash, decoded.family, decoded.grid, decoded.num_tokens) == (
        image.hash,
        image.family,
        image.grid,
        image.num_tokens,
    )
    assert all(np.array_equal(decoded.arrays[name], image.arrays[name]) for name in image.arrays)


def test_each_image_is_processed_once_while_it_is_cached(tmp_path):
    family = load_image_family(write_idefics3_config(tmp_path, splits=False))
    images = [make_media(20, 20, seed=seed) for seed in range(3)]
    one_image = family.process(images[0]).num_bytes
    cache = ImageCache(family, max_bytes=2 * one_image)
    first = cache.process(images[0])
    assert cache.process(images[0]) is first
    cache.process(images[1])
    assert cache.process(images[0]) is first
    cache.process(images[2])  # drops images[1], the least recently used
    assert cache.process(images[0]) is first
    second = cache.process(images[1])
    assert cache.process(images[1]) is second


def test_threads_that_need_the_same_image_process_it_once(tmp_path):
    family = load_image_family(write_idefics3_config(tmp_path))
    cache, media = ImageCache(family), make_media(200, 200)
    with ThreadPoolExecutor(8) as threads:
        images = list(threads.map(lambda _: cache.process(media), range(16)))
    assert all(image is images[0] for image in images)


def test_layouts_outlive_the_arrays(tmp_path):
    family = load_image_family(write_qwen3_vl_config(tmp_path))
    cache = ImageCache(family, max_bytes=1)
    first, second = make_media(50, 40), make_media(80, 40)
    processed = cache.process(first)
    cache.process(second)  # drops the arrays of the first
    assert cache.find_layout(first.hash) == processed.layout == (processed.grid, processed.num_tokens)
    assert cache.get_layout(first) == processed.layout
    assert cache.process(first) is not processed
    assert cache.find_layout("0" * 64) is None
