"""Positions on three axes equal transformers' Qwen3-VL, in sequences and in forests."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from ramify.model.images import ImageSpan, compute_positions
from ramify.trace import AnnotatedTrace, Annotation, Media, MediaRef, Message, ModelCall, Trace, build_forest

# Text of some tokens, then an image of some rows and columns, repeatedly. An image is always followed by a text token,
# the end of the image, as in every Qwen template.
LAYOUTS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)), max_size=4)


@pytest.fixture(scope="module")
def model() -> Qwen3VLModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
    config = Qwen3VLConfig(
        text_config={**sizes, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 16},
        vision_config={**sizes, "depth": 1, "num_heads": 1, "out_hidden_size": 16, "deepstack_visual_indexes": [0]},
    )
    return Qwen3VLModel(config)


def place_images(layout: list[tuple[int, int, int]]) -> tuple[list[ImageSpan], int]:
    images: list[ImageSpan] = []
    position = 0
    for num_text_tokens, rows, columns in layout:
        start = position + num_text_tokens
        position = start + rows * columns
        images.append(ImageSpan(start, position, (1, rows, columns)))
    return images, position + 2


def compute_with_transformers(model, images: list[ImageSpan], num_tokens: int) -> np.ndarray:
    types = torch.zeros(1, num_tokens, dtype=torch.int)
    for image in images:
        types[0, image.start : image.stop] = 1
    grids = torch.tensor([[1, 2 * image.grid[1], 2 * image.grid[2]] for image in images]) if images else None
    positions, _ = model.get_rope_index(torch.zeros(1, num_tokens, dtype=torch.long), types, image_grid_thw=grids)
    return positions[:, 0].numpy()


@given(layout=LAYOUTS)
def test_positions_of_a_sequence_equal_those_of_transformers(model, layout):
    images, num_tokens = place_images(layout)
    positions = compute_positions(np.arange(num_tokens), images)
    assert np.array_equal(positions, compute_with_transformers(model, images, num_tokens))


def test_text_continues_after_the_longer_side_of_an_image():
    positions = compute_positions(np.arange(10), [ImageSpan(2, 8, (1, 2, 3))])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


GRIDS = {"a": (1, 2, 3), "b": (1, 3, 1), "c": (1, 2, 2)}
MEDIA = {name: Media.from_bytes(name.encode(), "image/png") for name in GRIDS}
PAD = 9


def build_trace(name: str, content: str) -> tuple[AnnotatedTrace, list[int], list[ImageSpan]]:
    """A prompt whose letters a, b and c are images and whose digits are text, and a reply of two tokens."""
    token_ids: list[int] = []
    spans: list[tuple[str, int, int]] = []
    for letter in content:
        start = len(token_ids)
        if letter in GRIDS:
            token_ids += [PAD] * int(np.prod(GRIDS[letter]))
            spans.append((letter, start, len(token_ids)))
        else:
            token_ids.append(int(letter))
    trace = Trace(id=name)
    refs = [MediaRef(0, trace.add_media(MEDIA[letter]), start, stop) for letter, start, stop in spans]
    prompt = trace.graph.add_node(-1, Message("user", content), token_ids, media=refs)
    reply_ids = [7, ord(name) % 5]
    reply = trace.graph.add_node(
        prompt, Message("assistant", "!"), reply_ids, sampled_span=(0, 2), logprobs=[-0.5, -0.5], call=ModelCall(name)
    )
    images = [ImageSpan(start, stop, GRIDS[letter]) for letter, start, stop in spans]
    return AnnotatedTrace(trace, (Annotation(name, reply, advantage=1.0),)), token_ids + reply_ids, images


@pytest.mark.parametrize(
    "contents",
    [
        ["1a2b3", "1a2b3"],
        ["1a2b3", "1a2c3"],  # a fork between two images
        ["1a2b3", "1b2a3", "11", "1a2b3c4"],
        ["12", "1a3"],
        ["a1", "b1"],
    ],
)
def test_positions_in_a_forest_equal_those_of_its_paths(contents):
    traces = [build_trace(chr(65 + index), content) for index, content in enumerate(contents)]
    forest = build_forest([trace for trace, _, _ in traces])
    grids = {MEDIA[name].hash: grid for name, grid in GRIDS.items()}
    images = [ImageSpan(item.start, item.stop, grids[item.media.hash]) for item in forest.media]
    positions = compute_positions(forest.position_ids, images, forest.subtree_end)

    mask = forest.build_attention_mask()
    for _, token_ids, spans in traces:
        expected = compute_positions(np.arange(len(token_ids)), spans)
        ends = [index for index in range(len(mask)) if list(forest.token_ids[mask[index]]) == token_ids[:-1]]
        path_positions = [positions[:, np.flatnonzero(mask[end])] for end in ends]
        assert any(np.array_equal(actual, expected[:, :-1]) for actual in path_positions)
