"""The segments that recurrent layers read follow the paths of the forest."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ramify.model.forest_segments import ForestSegments
from ramify.trace import build_forest, concat_forests, make_padding_forest, split_forest
from tests.support.forests import Size, group


@st.composite
def packs(draw):
    """Packs of whole trees and of pieces, with padding between them."""
    rng = draw(st.randoms(use_true_random=False))
    parts = []
    for number in range(rng.randint(0, 3)):
        forest = build_forest([attempt.sample() for attempt in group(rng, Size(traces=3, nodes=6), f"g{number}-")])
        parts += split_forest(forest, rng.choice((0, 10, 1000)))
        parts.append(make_padding_forest(rng.choice((0, 3))))
    return concat_forests(parts)


@given(packs())
def test_a_token_sees_its_segment_and_the_segments_above(pack):
    segments = ForestSegments.from_forest(pack)
    mask = np.zeros((len(pack), len(pack)), bool)
    for segment, start in enumerate(segments.start):
        path, above = [segment], segment
        while (above := segments.parent[above]) >= 0:
            path.append(above)
        for token in range(start, segments.stop[segment]):
            for ancestor in path:
                mask[token, segments.start[ancestor] : min(segments.stop[ancestor], token + 1)] = True
    is_token = np.zeros(len(pack), bool)
    for row in pack.segments:
        is_token[row["start"] : row["start"] + row["length"]] = True
    np.testing.assert_array_equal(mask[is_token], pack.build_attention_mask()[is_token])


@given(packs())
def test_segments_are_as_long_as_they_can_be_and_hold_every_token_once(pack):
    segments = ForestSegments.from_forest(pack)
    np.testing.assert_array_equal(np.append(segments.start, len(pack)), np.append(0, segments.stop))
    assert (segments.start < segments.stop).all()
    assert (segments.parent < np.arange(len(segments))).all()
    num_children = np.bincount(segments.parent + 1, minlength=len(segments) + 1)[1:]
    assert (num_children != 1).all()
