"""Segments, chunks, tracks and ancestors follow the paths of the forest."""

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ramify.model.forest_chunks import ChunkTracks, ForestChunks, ForestSegments, find_ancestors
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
def test_every_path_is_divided_into_chunks_from_its_root(pack, size):
    segments = ForestSegments.from_forest(pack)
    chunks, paths = ForestChunks.from_segments(segments, size), list_paths(segments)
    tokens = [chunks.rows[start:stop].tolist() for start, stop in zip(chunks.start, chunks.stop)]
    assert [token for part in tokens for token in part] == chunks.rows.tolist()  # each row is in one chunk
    divided = set()
    for chunk, depth in enumerate(chunks.compute_depths().tolist()):
        path, above = tokens[chunk], chunks.previous[chunk]
        while above >= 0:
            assert len(tokens[above]) == size
            path, above = tokens[above] + path, chunks.previous[above]
        assert path == paths[path[-1]]
        assert depth == (len(path) - 1) // size
        divided.add(tuple(path))
    assert len(divided) == len(chunks)
    leaves = set(range(len(segments))) - set(segments.parent.tolist())
    expected = {tuple(path[:stop]) for path in paths for stop in range(size, len(path) + 1, size)}
    assert divided == expected | {tuple(paths[segments.stop[leaf] - 1]) for leaf in leaves}


@given(packs(), st.integers(1, 6))
def test_a_forest_has_the_chunks_of_its_flat_paths(pack, size):
    segments = ForestSegments.from_forest(pack)
    chunks, paths = ForestChunks.from_segments(segments, size), list_paths(segments)
    chunk_tokens = [chunks.rows[start:stop].tolist() for start, stop in zip(chunks.start, chunks.stop)]
    for leaf in set(range(len(segments))) - set(segments.parent.tolist()):
        path = paths[segments.stop[leaf] - 1]
        arrays = [0], [len(path)], [-1]
        flat = ForestChunks.from_segments(ForestSegments(*(np.array(array, np.int32) for array in arrays)), size)
        np.testing.assert_array_equal(flat.rows, np.arange(len(path)))
        (chunk,) = (index for index, tokens in enumerate(chunk_tokens) if tokens[-1] == path[-1])
        for start, stop in reversed([*zip(flat.start, flat.stop)]):
            assert chunk_tokens[chunk] == path[start:stop]
            chunk = chunks.previous[chunk]
        assert chunk == -1


@given(packs(), st.integers(1, 6))
def test_the_rows_of_each_token_are_listed_in_their_order(pack, size):
    chunks = ForestChunks.from_segments(ForestSegments.from_forest(pack), size)
    rows, first = chunks.group_rows()
    assert len(first) == len(pack) + 1
    for token in range(len(pack)):
        own_rows = rows[first[token] : first[token + 1]].tolist()
        assert own_rows == np.flatnonzero(chunks.rows == token).tolist() != []
    assert first[-1] == len(rows) == len(chunks.rows)
    if len(rows) == len(pack):
        np.testing.assert_array_equal(chunks.rows, np.arange(len(pack)))


def test_branches_repeat_the_unfinished_chunk_before_their_fork():
    arrays = [0, 6, 9], [6, 9, 11], [-1, 0, 0]
    segments = ForestSegments(*(np.array(array, np.int32) for array in arrays))
    chunks = ForestChunks.from_segments(segments, 4)
    tokens = [chunks.rows[start:stop].tolist() for start, stop in zip(chunks.start, chunks.stop)]
    assert tokens == [[0, 1, 2, 3], [4, 5, 6, 7], [8], [4, 5, 9, 10]]
    assert chunks.previous.tolist() == [-1, 0, 1, 0]
    tracks = ChunkTracks.from_chunks(chunks)
    assert tracks.chunk.tolist() == [0, 1, 2, 3] and tracks.first.tolist() == [0, 3, 4]


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
    segments = ForestSegments(start, start + 10, parent.astype(np.int32))
    tracks = ChunkTracks.from_chunks(ForestChunks.from_segments(segments, 64))
    assert len(tracks.round_first) - 1 == 2
