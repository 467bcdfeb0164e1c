"""The radix tree: each path is laid out once, and paths that start at different roots share no token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ramify.trace.forest_builder import RadixPosition, RadixTree

KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), KEYS), max_size=12))
def test_each_prefix_of_each_root_is_laid_out_once(insertions):
    tree = RadixTree()
    roots = [tree.add_root(), tree.add_root()]
    paths = [(root, list[int](), position) for root, position in enumerate(roots)]  # root, keys, end
    for start, cut, keys in insertions:  # after the first `cut` keys of an earlier path
        root, prefix, end = paths[start % len(paths)]
        depth = cut % (len(prefix) + 1)
        position = tree.insert(RadixPosition(end.segment, depth), np.array(keys, np.int32), len(paths) - 2, 0)
        paths.append((root, [*prefix[:depth], *keys], position))
    layout, token_ids = tree.lay_out([np.array(keys, np.int32) for _, _, keys in insertions])
    indices: dict[tuple[int, tuple[int, ...]], int] = {}
    for root, path, end in paths:
        path_indices = np.empty(len(path), np.int32)
        layout.write_indices(path_indices, end, 0)
        assert token_ids[path_indices].tolist() == path
        for depth, index in enumerate(path_indices.tolist(), 1):
            assert indices.setdefault((root, tuple(path[:depth])), index) == index
    assert sorted(indices.values()) == list(range(len(token_ids)))
    assert len(layout.segments) == len(tree.segments)
