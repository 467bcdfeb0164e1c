"""Chunks, tracks and ancestors follow the paths of the forest."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ramify.model.forest_chunks import ChunkTracks, ForestChunks, find_ancestors
from ramify.model.forest_segments import ForestSegments
from tests.model.test_forest_segments import packs


def list_paths(segments: ForestSegments) -> list[list[int]]:
    """Return the path of each token, root first."""
    paths: list[list[int]] = []
    for start, stop, parent in zip(segments.start, segments.stop, segments.parent):
        above = paths[segments.stop[parent] - 1] if parent >= 0 else []
        for token in range(start, stop):
            paths.append([*above, *range(start, token + 1)])
    return paths


@given(packs(), st.integers(1, 5))
def test_ancestors_are_the_last_tokens_of_the_path(pack, count):
    segments = ForestSegments.from_forest(pack)
    ancestors = find_ancestors(segments, count)
    for token, path in enumerate(list_paths(segments)):
        expected = [*reversed(path[:-1]), *[-1] * count][:count]
        assert ancestors[token].tolist() == expected


@given(packs(), st.integers(1, 6))
def test_the_chunks_before_a_chunk_hold_its_path(pack, size):
    segments = ForestSegments.from_forest(pack)
    chunks, paths = ForestChunks.from_segments(segments, size), list_paths(segments)
    for depth, start, stop, previous in zip(chunks.compute_depths(), chunks.start, chunks.stop, chunks.previous):
        assert 0 < stop - start <= size
        above: list[int] = []
        num_above = 0
        while previous >= 0:
            above = [*range(chunks.start[previous], chunks.stop[previous]), *above]
            previous, num_above = chunks.previous[previous], num_above + 1
        assert above == paths[start][:-1]
        assert depth == num_above
    assert sum(chunks.stop - chunks.start) == len(pack)


@given(packs(), st.integers(1, 6))
def test_tracks_begin_at_roots_and_forks_and_have_few_rounds(pack, size):
    chunks = ForestChunks.from_segments(ForestSegments.from_forest(pack), size)
    tracks = ChunkTracks.from_chunks(chunks)
    np.testing.assert_array_equal(np.sort(tracks.chunk), np.arange(len(chunks)))
    round_of_track = np.searchsorted(tracks.round_first, np.arange(len(tracks.fork)), "right") - 1
    round_of_chunk = {}
    for track, (first, stop) in enumerate(pairwise(tracks.first.tolist())):
        members = tracks.chunk[first:stop]
        np.testing.assert_array_equal(chunks.previous[members[1:]], members[:-1])
        round_of_chunk |= dict.fromkeys(members.tolist(), round_of_track[track])
        before, fork = chunks.previous[members[0]], tracks.fork[track]
        if before < 0:
            assert fork == -1 and round_of_track[track] == 0
        else:
            assert tracks.fork_of_chunk[before] == fork >= 0
            assert tracks.fork_first[fork] <= track < tracks.fork_first[fork + 1]
            assert round_of_track[track] == round_of_chunk[before] + 1
    num_children = np.bincount(chunks.previous + 1, minlength=len(chunks) + 1)[1:]
    np.testing.assert_array_equal(tracks.fork_of_chunk >= 0, num_children > 1)
    if len(chunks):
        assert len(tracks.round_first) - 1 <= 1 + math.log2(len(chunks))


def test_a_trunk_of_hundreds_of_levels_has_two_rounds():
    """An agent whose turns each leave a branch behind, as thoughts that are removed from the history do."""
    levels = 300
    start = np.arange(0, 20 * levels, 10, dtype=np.int32)
    parent = np.array([-1] + [2 * ((index - 1) // 2) for index in range(1, 2 * levels)])
    segments = ForestSegments(start, start + 10, parent.astype(np.int32), np.zeros(2 * levels, np.int32))
    tracks = ChunkTracks.from_chunks(ForestChunks.from_segments(segments, 64))
    assert len(tracks.round_first) - 1 == 2
