"""The operators in C are those of torch, and where they cannot be had nothing is lost."""

import pytest
import torch
from torch.testing import assert_close

from ramify.model import operators
from ramify.model.operators import Compiled, Operators, compiled
from ramify.model.paged import KVPool, Step, Tile

SHAPES = [(5, 5, 32), (9, 3, 64), (4, 1, 8), (6, 2, 10)]  # heads, kv_heads, head_dim
ROWS, BLOCK_SIZE, MOST = 7, 4, 5


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def both(shape: tuple[int, int, int]) -> tuple[Operators, Compiled]:
    in_c = compiled(torch.zeros(1), *shape)
    if in_c is None:
        pytest.skip("no C compiler here")
    return Operators(*shape), in_c


def decoding(shape: tuple[int, int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Step]:
    """Rows that decode, each at another length, in a pool full of numbers."""
    heads, kv_heads, head_dim = shape
    torch.manual_seed(seed)
    blocks = torch.randperm(ROWS * MOST) + 1
    positions = torch.randint(0, MOST * BLOCK_SIZE, (ROWS,))
    positions[0], positions[1] = 0, MOST * BLOCK_SIZE - 1
    pool = KVPool(1, ROWS * MOST + 1, BLOCK_SIZE, kv_heads, head_dim, torch.float32, "cpu")
    pool.layers[0].normal_()
    own = blocks.view(ROWS, MOST).gather(1, (positions // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
    tile = Tile(0, ROWS, ROWS, 1, blocks, positions.unsqueeze(1))
    qkv = 3 * torch.randn(ROWS, (heads + 2 * kv_heads) * head_dim)
    return qkv, torch.randn(ROWS, 2 * head_dim), Step(pool, own * BLOCK_SIZE + positions % BLOCK_SIZE, [tile])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_step_is_the_same_in_c(shape):
    found = []
    for each in both(shape):
        qkv, turns, step = decoding(shape)
        each.turn(qkv, turns, step, 0)
        found.append((qkv, step.pool.layers[0], each.attend(qkv, step, 0, shape[2] ** -0.5)))
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_a_row_gives_the_same_bits_in_any_company():
    """What `batch_invariant` promises."""
    shape = SHAPES[0]
    _, in_c = both(shape)
    qkv, _, step = decoding(shape)
    together = in_c.attend(qkv, step, 0, 0.2)
    for row in range(ROWS):
        tile = step.tiles[0]
        alone = Tile(0, 1, 1, 1, tile.blocks.view(ROWS, -1)[row].clone(), tile.positions[row : row + 1])
        assert torch.equal(
            in_c.attend(qkv[row : row + 1], Step(step.pool, step.slots, [alone]), 0, 0.2)[0], together[row]
        )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 60.0])
def test_norm_and_gate_are_the_same_in_c(scale):
    in_torch, in_c = both(SHAPES[0])
    torch.manual_seed(0)
    hidden, weight = scale * torch.randn(3, 160), torch.randn(160)
    assert_close(in_c.norm(hidden, weight, 1e-6), in_torch.norm(hidden, weight, 1e-6), rtol=1e-5, atol=1e-5)
    assert_close(in_c.gate(hidden), in_torch.gate(hidden), rtol=1e-5, atol=1e-5)


def test_loading_them_leaves_arithmetic_as_it_was():
    both(SHAPES[0])
    assert torch.tensor(1e-40).mul(1).item() > 0, "subnormal numbers are gone"


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_torch_does_it(monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    operators._library.cache_clear()
    try:
        assert compiled(torch.zeros(1), 2, 2, 8) is None
    finally:
        operators._library.cache_clear()


def test_other_types_and_more_threads_are_for_torch():
    assert compiled(torch.zeros(1, dtype=torch.bfloat16), *SHAPES[0]) is None
    torch.set_num_threads(2)
    assert compiled(torch.zeros(1), *SHAPES[0]) is None
