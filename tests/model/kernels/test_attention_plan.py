"""A plan makes every row read exactly the keys that it sees, and common blocks once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.model.kernels import attention_plan
from ramify.model.kernels.attention_plan import (
    HEADER_INTS,
    ITEM_INTS,
    SPARE_KEYS,
    AttentionPlan,
    KernelShape,
    build_plan,
    find_shared_runs,
    order_by_prefix,
)

SIZE = 4


@st.composite
def steps(draw):
    """Draw decoding sequences whose block tables form a tree, then chunks of prompts."""
    free = iter(range(1, 10_000))
    paths = [[next(free)]]
    for _ in range(draw(st.integers(0, 10))):
        parent = draw(st.sampled_from(paths))
        paths.append([*parent, *(next(free) for _ in range(draw(st.integers(1, 6))))])
    leaves = draw(st.lists(st.sampled_from(paths), min_size=1, max_size=12))
    tables = [np.array([*path, next(free)]) for path in leaves]
    tables = [tables[index] for index in order_by_prefix(tables)]
    starts = [SIZE * (len(table) - 1) + draw(st.integers(0, SIZE - 1)) for table in tables]
    stops = [start + 1 for start in starts]
    for start, count in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(2, 40)), max_size=3)):
        starts, stops = [*starts, start], [*stops, start + count]
        tables.append(np.array([next(free) for _ in range(-(-(start + count) // SIZE))]))
    return tables, starts, stops


def list_pieces(plan: AttentionPlan):
    """Yield (first row, number of rows, block table, range of keys, first partial) of the items."""
    count = plan.num_other_items + plan.num_chunk_items
    assert plan.num_other_items == plan.data[0] + plan.data[1]
    for row, num_rows, table, start, stop, partial in (
        plan.data[HEADER_INTS : HEADER_INTS + ITEM_INTS * count].reshape(-1, ITEM_INTS).tolist()
    ):
        yield row, num_rows, plan.data[table:], start, stop, partial


@given(steps(), st.sampled_from([1, 16, 400]), st.sampled_from([1, 5, 16]), st.sampled_from([0, 8, 32]), st.booleans())
def test_every_row_reads_its_keys_once(step, num_programs, rows_per_item, rows_per_chunk_item, share):
    tables, starts, stops = step
    shape = KernelShape(num_programs, 2, rows_per_item, SIZE, share, rows_per_chunk_item)
    positions = [position for start, stop in zip(starts, stops) for position in range(start, stop)]
    owners = [index for index, (start, stop) in enumerate(zip(starts, stops)) for _ in range(start, stop)]
    saved, attention_plan.MIN_SAVED_KEYS = attention_plan.MIN_SAVED_KEYS, SIZE
    try:
        plan = build_plan(tables, starts, stops, len(positions) + 3, shape)
    finally:
        attention_plan.MIN_SAVED_KEYS = saved
    seen: list[list[int]] = [[] for _ in positions]
    partials: list[list[int]] = [[] for _ in positions]
    for row, num_rows, table, start, stop, partial in list_pieces(plan):
        assert 1 <= num_rows <= max(rows_per_item, rows_per_chunk_item)
        for offset in range(num_rows):
            keys = range(start, min(stop, positions[row + offset] + 1))
            assert [table[key // SIZE] for key in keys] == [tables[owners[row + offset]][key // SIZE] for key in keys]
            seen[row + offset] += keys
            partials[row + offset] += [partial + offset] if partial >= 0 else []
    assert [sorted(keys) for keys in seen] == [list(range(position + 1)) for position in positions]
    rows_at, partials_at = plan.data[2:4].tolist()
    bounds = plan.data[rows_at:partials_at].reshape(-1, 2)
    merged = [sorted(plan.data[partials_at + first : partials_at + last].tolist()) for first, last in bounds]
    assert merged == [sorted(row) for row in partials] + [[]] * 3
    assert plan.num_merged_rows == max((row + 1 for row, own in enumerate(partials) if own), default=0)
    num_chunk_rows = sum(stop - start for start, stop in zip(starts, stops) if stop - start > 1)
    assert bool(plan.num_chunk_items) == (rows_per_chunk_item > 0 and num_chunk_rows > 0)
    every_partial = [partial for row in partials for partial in row]
    assert sorted(every_partial) == list(range(plan.num_partials))
    if not share:
        assert plan.shared_keys == 0


def test_prompt_of_a_group_is_read_once():
    prompt = list(range(1, 101))
    tables = [np.array([*prompt, 200 + attempt]) for attempt in range(16)]
    shape = KernelShape(num_programs=1, kv_heads=8, rows_per_item=16, block_size=16)
    plan = build_plan(tables, [1600] * 16, [1601] * 16, 16, shape)
    assert plan.shared_keys == 15 * 1600
    shared = [piece for piece in list_pieces(plan) if piece[1] == 16]
    assert sum(stop - start for *_, start, stop, _ in shared) == 1600
    own = [(start, stop) for _, num_rows, _, start, stop, _ in list_pieces(plan) if num_rows == 1]
    assert own == [(1600, 1601 + SPARE_KEYS)] * 16


def test_runs_are_nested_like_the_tree():
    trunk, left, right = list(range(1, 41)), list(range(41, 81)), list(range(81, 121))
    tables = [np.array([*trunk, *side, 900 + index]) for index, side in enumerate((left, left, right, right))]
    shape = KernelShape(num_programs=1, kv_heads=1, rows_per_item=16, block_size=16)
    assert sorted(find_shared_runs(tables, shape)) == [(0, 2, 40, 80), (0, 4, 0, 40), (2, 4, 40, 80)]


@pytest.mark.parametrize("num_blocks", [1, 15])
def test_short_common_prefixes_are_not_shared(num_blocks):
    tables = [np.array([*range(1, 1 + num_blocks), 100 + index]) for index in range(2)]
    assert find_shared_runs(tables, KernelShape(1, 1, 16, 16)) == []
