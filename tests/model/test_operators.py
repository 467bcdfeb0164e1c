"""The operators in C are those of torch, and where they cannot be had nothing is lost and the reason is known."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from ramify.infer.request import EngineRequest, SamplingParams
from ramify.infer.sampler import sample_tokens
from ramify.model import native, operators
from ramify.model.native import CLibraryUnavailable
from ramify.model.operators import (
    CompiledDecoderOps,
    DecoderOps,
    DecoderSizes,
    DecoderWeights,
    LayerWeights,
    build_compiled_ops,
)
from ramify.model.paged_attention import AttentionMetadata, AttentionTile, KVPool

SHAPES = [(5, 5, 32), (9, 3, 64), (4, 1, 8), (6, 2, 10)]  # heads, kv_heads, head_dim
HIDDEN, INNER, VOCAB = 24, 40, 50
ROWS, BLOCK_SIZE, MOST = 7, 4, 5


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sizes(shape: tuple[int, int, int]) -> DecoderSizes:
    return DecoderSizes(*shape, hidden=HIDDEN, inner=INNER, eps=1e-6, scaling=shape[2] ** -0.5)


def made_up(shape: tuple[int, int, int], *, extras: bool = False, dtype: torch.dtype = torch.float32) -> LayerWeights:
    """A layer of random numbers, with `extras` also what only some models have."""
    heads, kv_heads, head_dim = shape
    torch.manual_seed(1)

    def some(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype) / size[0] ** 0.5

    row, found = (heads + 2 * kv_heads) * head_dim, heads * head_dim
    bias, q_norm, k_norm, out_bias = (some(n) if extras else None for n in (row, head_dim, head_dim, HIDDEN))
    products = some(HIDDEN, row), some(found, HIDDEN), some(HIDDEN, 2 * INNER), some(INNER, HIDDEN)
    qkv, out, gate_up, down = products
    return LayerWeights(some(HIDDEN), qkv, bias, q_norm, k_norm, out, out_bias, some(HIDDEN), gate_up, down)


def around(shape: tuple[int, int, int], *layers: LayerWeights, extras: bool = False) -> DecoderWeights:
    """A model of these layers."""
    torch.manual_seed(2)
    dtype = layers[0].norm.dtype
    turns = torch.randn(MOST * BLOCK_SIZE, 2 * shape[2], dtype=dtype)
    embedding, head = (torch.randn(VOCAB, HIDDEN, dtype=dtype) for _ in range(2))
    norm, bias = torch.rand(HIDDEN, dtype=dtype), torch.randn(VOCAB, dtype=dtype)
    return DecoderWeights(embedding, turns, norm, head, bias if extras else None, layers)


def compiled_or_skip(shape: tuple[int, int, int], model: DecoderWeights) -> CompiledDecoderOps:
    try:
        return build_compiled_ops(sizes(shape), model)
    except CLibraryUnavailable as reason:
        pytest.skip(str(reason))


def both(shape: tuple[int, int, int], layer: LayerWeights) -> tuple[DecoderOps, CompiledDecoderOps]:
    return DecoderOps(sizes(shape)), compiled_or_skip(shape, around(shape, layer))


def a_step(
    shape: tuple[int, int, int], counts: list[int], layers: int = 1
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Sequences of different lengths with so many new tokens each, in a pool full of numbers."""
    _, kv_heads, head_dim = shape
    torch.manual_seed(0)
    sequences, queries = len(counts), max(counts)
    blocks = torch.randperm(sequences * MOST).view(sequences, MOST) + 1
    last = torch.randint(queries - 1, MOST * BLOCK_SIZE, (sequences,))
    last[0], last[-1] = counts[0] - 1, MOST * BLOCK_SIZE - 1
    within = torch.minimum(torch.arange(queries), torch.tensor(counts).unsqueeze(1) - 1)
    positions = (last - torch.tensor(counts) + 1).unsqueeze(1) + within
    real = (torch.arange(queries) < torch.tensor(counts).unsqueeze(1)).flatten()
    begins = torch.tensor([sum(counts[:index]) for index in range(sequences)]).unsqueeze(1)
    slots = (blocks.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()[real]
    pool = KVPool(layers, sequences * MOST + 1, BLOCK_SIZE, kv_heads, head_dim, torch.float32, "cpu")
    for layer in pool.layers:
        layer.normal_()
    rows = sum(counts)
    tile = AttentionTile(0, rows, sequences, queries, blocks.flatten(), positions)
    if min(counts) < queries:
        tile.pad_index, tile.unpad_index = (begins + within).flatten(), real.nonzero().flatten()
    return torch.randn(rows, HIDDEN), torch.randn(rows, 2 * head_dim), AttentionMetadata(pool, slots, [tile])


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("counts", [[1] * ROWS, [3] * 3, [5, 2, 4], [1] * 70], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layer_is_the_same_in_c(shape, counts, extras):
    layer, found = made_up(shape, extras=extras), []
    for each in both(shape, layer):
        hidden, turns, step = a_step(shape, counts)
        qkv = each.project_qkv(layer, hidden, turns, step, 0)
        seen = each.attend(qkv, step, 0)
        found.append((qkv, step.pool.layers[0], seen, each.project_out_and_mlp(layer, seen, hidden)))
    assert_close(found[1], found[0], rtol=1e-4, atol=2e-5)


def test_rows_are_normed_the_same_in_c():
    layer = made_up(SHAPES[0])
    in_torch, in_c = both(SHAPES[0], layer)
    for scale in (1e-3, 1.0, 60.0):
        hidden = scale * torch.randn(3, HIDDEN)
        assert_close(in_c.norm(hidden, layer.norm), in_torch.norm(hidden, layer.norm), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("counts", [[1] * ROWS, [5, 2, 4], [3] * 40], ids=str)
@pytest.mark.parametrize("all_rows", [True, False])
def test_a_whole_step_is_the_same_in_c(counts, extras, all_rows):
    shape, found = SHAPES[1], []
    layers = [made_up(shape), made_up(shape, extras=True)]
    model = around(shape, *layers, extras=extras)
    rows = torch.arange(sum(counts)) if all_rows else torch.tensor(counts).cumsum(0) - 1
    for each in (DecoderOps(sizes(shape)), compiled_or_skip(shape, model)):
        _, _, step = a_step(shape, counts, layers=len(layers))
        places = step.tiles[0].query_positions.flatten()
        positions = places if step.tiles[0].unpad_index is None else places[step.tiles[0].unpad_index]
        ids = torch.arange(sum(counts)) % VOCAB
        found.append((each.forward(model, ids, positions, step, rows), *step.pool.layers))
    assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_many_keys_with_several_queries_are_left_to_torch(monkeypatch):
    shape, layer = SHAPES[0], made_up(SHAPES[0])
    in_torch, in_c = both(shape, layer)
    monkeypatch.setattr(operators, "FEW_KEYS", 4)
    hidden, turns, step = a_step(shape, [5, 2, 4])
    qkv = in_torch.project_qkv(layer, hidden, turns, step, 0)
    assert torch.equal(in_c.attend(qkv, step, 0), in_torch.attend(qkv, step, 0))


def test_a_row_gives_the_same_bits_in_any_company():
    """What `batch_invariant` promises."""
    shape, layer = SHAPES[0], made_up(SHAPES[0])
    _, in_c = both(shape, layer)
    hidden, turns, step = a_step(shape, [1] * ROWS)
    qkv = in_c.project_qkv(layer, hidden, turns, step, 0)
    together = in_c.attend(qkv, step, 0)
    for row in range(ROWS):
        tile = step.tiles[0]
        alone = AttentionTile(
            0, 1, 1, 1, tile.block_table.view(ROWS, -1)[row].clone(), tile.query_positions[row : row + 1]
        )
        assert torch.equal(
            in_c.attend(qkv[row : row + 1], AttentionMetadata(step.pool, step.slot_mapping, [alone]), 0)[0],
            together[row],
        )


@pytest.mark.parametrize("vocab", [7, 64, 288, 5000])
def test_the_same_tokens_are_drawn_in_c(vocab):
    _, in_c = both(SHAPES[0], made_up(SHAPES[0]))
    torch.manual_seed(0)
    logits = 4 * torch.randn(200, vocab)
    asked = [SamplingParams(temperature=0.5 + row % 3, seed=row - 9) for row in range(200)]
    requests = [EngineRequest([1] * (1 + row % 5), each, 9) for row, each in enumerate(asked)]
    expected, found = sample_tokens(logits, requests), sample_tokens(logits, requests, in_c.sample_tokens)
    assert found[0] == expected[0]
    assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


def test_what_is_drawn_does_not_depend_on_what_others_ask_for():
    _, in_c = both(SHAPES[0], made_up(SHAPES[0]))
    torch.manual_seed(0)
    logits = torch.randn(6, 288)
    asked = [SamplingParams(seed=row, top_k=3 * (row % 2), top_logprobs=row % 3) for row in range(6)]
    requests = [EngineRequest([1], each, 9) for each in asked]
    together = list(zip(*sample_tokens(logits, requests, in_c.sample_tokens)))
    alone = [next(zip(*sample_tokens(logits[row : row + 1], [requests[row]], in_c.sample_tokens))) for row in range(6)]
    assert together == alone


@pytest.mark.parametrize("vocab", [1, 7, 64, 97])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_draw_some_token(vocab, bad):
    _, in_c = both(SHAPES[0], made_up(SHAPES[0]))
    requests = [EngineRequest([1], SamplingParams(seed=row), 9) for row in range(5)]
    for draw in (None, in_c.sample_tokens):
        tokens, _ = sample_tokens(torch.full((5, vocab), bad), requests, draw)
        assert all(0 <= token < vocab for token in tokens)


def test_a_kept_library_that_was_cut_short_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.load_c_library.cache_clear()
    try:
        compiled_or_skip(SHAPES[2], around(SHAPES[2], made_up(SHAPES[2])))
        (kept,) = (tmp_path / "ramify").iterdir()
        kept.unlink()
        kept.write_bytes(b"")
        native.load_c_library.cache_clear()
        build_compiled_ops(sizes(SHAPES[2]), around(SHAPES[2], made_up(SHAPES[2])))
        assert kept.stat().st_size > 0
    finally:
        native.load_c_library.cache_clear()


def test_without_a_home_it_says_so(monkeypatch):
    compiled_or_skip(SHAPES[2], around(SHAPES[2], made_up(SHAPES[2])))

    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    native.load_c_library.cache_clear()
    try:
        with pytest.raises(CLibraryUnavailable, match="set XDG_CACHE_HOME"):
            build_compiled_ops(sizes(SHAPES[2]), around(SHAPES[2], made_up(SHAPES[2])))
    finally:
        native.load_c_library.cache_clear()


def test_loading_them_leaves_arithmetic_as_it_was():
    both(SHAPES[0], made_up(SHAPES[0]))
    assert torch.tensor(1e-40).mul(1).item() > 0, "subnormal numbers are gone"


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no-such-compiler is not there"), ("false", "false failed")]
)
def test_without_a_compiler_it_says_so(monkeypatch, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    native.load_c_library.cache_clear()
    try:
        with pytest.raises(CLibraryUnavailable, match=reason):
            build_compiled_ops(sizes((2, 2, 8)), around((2, 2, 8), made_up((2, 2, 8))))
    finally:
        native.load_c_library.cache_clear()


def test_other_types_and_more_threads_are_for_torch():
    with pytest.raises(CLibraryUnavailable, match="bfloat16 on cpu"):
        build_compiled_ops(sizes(SHAPES[0]), around(SHAPES[0], made_up(SHAPES[0], dtype=torch.bfloat16)))
    torch.set_num_threads(2)
    with pytest.raises(CLibraryUnavailable, match="2 threads"):
        build_compiled_ops(sizes(SHAPES[0]), around(SHAPES[0], made_up(SHAPES[0])))
