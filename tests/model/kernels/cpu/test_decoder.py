"""The decoder operators in C compute what the PyTorch reference does, and report why they are unavailable."""

import ctypes
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from ramify.infer.request import EngineRequest, SamplingParams
from ramify.infer.sampler import sample_tokens
from ramify.model.kernels.cpu import c_library, decoder
from ramify.model.kernels.cpu.c_library import CLibraryUnavailable, find_torch_symbol
from ramify.model.kernels.cpu.decoder import CompiledDecoderOps
from ramify.model.kernels.decoder_ops import DecoderOps, DecoderSizes, DecoderWeights, LayerWeights
from ramify.model.kernels.paged_attention import AttentionMetadata, AttentionTile, KVPool

SHAPES = [(5, 5, 32), (9, 3, 64), (4, 1, 8), (6, 2, 10)]  # heads, kv_heads, head_dim
HIDDEN, INNER, VOCAB = 24, 40, 50
ROWS, BLOCK_SIZE, BLOCKS_PER_SEQUENCE = 7, 4, 5
MAX_KEYS = BLOCK_SIZE * BLOCKS_PER_SEQUENCE


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a test that needs more sets them
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_loaded_libraries():
    c_library.load_c_library.cache_clear()
    yield
    c_library.load_c_library.cache_clear()


def build_sizes(shape: tuple[int, int, int]) -> DecoderSizes:
    return DecoderSizes(*shape, hidden=HIDDEN, inner=INNER, eps=1e-6, scaling=shape[2] ** -0.5)


def random_layer(
    shape: tuple[int, int, int], *, extras: bool = False, dtype: torch.dtype = torch.float32
) -> LayerWeights:
    """A layer of random numbers; with `extras` also the biases and norms that only some models have."""
    heads, kv_heads, head_dim = shape
    torch.manual_seed(1)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype) / size[0] ** 0.5

    qkv_width, attention_width = (heads + 2 * kv_heads) * head_dim, heads * head_dim
    qkv_bias, q_norm, k_norm, out_bias = (
        random(n) if extras else None for n in (qkv_width, head_dim, head_dim, HIDDEN)
    )
    return LayerWeights(
        norm=random(HIDDEN),
        qkv=random(HIDDEN, qkv_width),
        qkv_bias=qkv_bias,
        q_norm=q_norm,
        k_norm=k_norm,
        out=random(attention_width, HIDDEN),
        out_bias=out_bias,
        mlp_norm=random(HIDDEN),
        gate_up=random(HIDDEN, 2 * INNER),
        down=random(INNER, HIDDEN),
    )


def random_weights(shape: tuple[int, int, int], *layers: LayerWeights, head_bias: bool = False) -> DecoderWeights:
    """A model of these layers, or of one random layer."""
    layers = layers or (random_layer(shape),)
    torch.manual_seed(2)
    dtype = layers[0].norm.dtype
    rope_table = torch.randn(MAX_KEYS, 2 * shape[2], dtype=dtype)
    embedding, head = (torch.randn(VOCAB, HIDDEN, dtype=dtype) for _ in range(2))
    norm, bias = torch.rand(HIDDEN, dtype=dtype), torch.randn(VOCAB, dtype=dtype)
    return DecoderWeights(embedding, rope_table, norm, head, bias if head_bias else None, layers)


def compile_or_skip(shape: tuple[int, int, int], weights: DecoderWeights | None = None) -> CompiledDecoderOps:
    try:
        return CompiledDecoderOps(build_sizes(shape), weights or random_weights(shape))
    except CLibraryUnavailable as reason:
        pytest.skip(str(reason))


def torch_and_c(shape: tuple[int, int, int], layer: LayerWeights) -> tuple[DecoderOps, CompiledDecoderOps]:
    return DecoderOps(build_sizes(shape)), compile_or_skip(shape, random_weights(shape, layer))


def random_step(
    shape: tuple[int, int, int], counts: list[int], layers: int = 1
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Hidden states, rope and metadata of a step with `counts` new tokens of sequences of different lengths.

    The cache is full of random numbers.
    """
    _, kv_heads, head_dim = shape
    torch.manual_seed(0)
    sequences, queries, lengths = len(counts), max(counts), torch.tensor(counts).unsqueeze(1)
    blocks = torch.randperm(sequences * BLOCKS_PER_SEQUENCE).view(sequences, BLOCKS_PER_SEQUENCE) + 1
    last = torch.randint(queries - 1, MAX_KEYS, (sequences,))
    last[0], last[-1] = counts[0] - 1, MAX_KEYS - 1
    padded_offsets = torch.minimum(torch.arange(queries), lengths - 1)
    positions = last.unsqueeze(1) - lengths + 1 + padded_offsets
    is_row = (torch.arange(queries) < lengths).flatten()
    row_starts = torch.tensor([sum(counts[:index]) for index in range(sequences)]).unsqueeze(1)
    slots = (blocks.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()[is_row]
    num_blocks = sequences * BLOCKS_PER_SEQUENCE + 1
    pool = KVPool(layers, num_blocks, BLOCK_SIZE, kv_heads, head_dim, torch.float32, "cpu")
    for layer in pool.layers:
        layer.normal_()
    rows = sum(counts)
    tile = AttentionTile(0, rows, sequences, queries, blocks.flatten(), positions)
    if min(counts) < queries:
        tile.pad_index, tile.unpad_index = (row_starts + padded_offsets).flatten(), is_row.nonzero().flatten()
    return torch.randn(rows, HIDDEN), torch.randn(rows, 2 * head_dim), AttentionMetadata(pool, slots, [tile])


@pytest.mark.process
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("counts", [[1] * ROWS, [3] * 3, [5, 2, 4], [1] * 70], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_matches_torch(shape, counts, extras):
    layer, results = random_layer(shape, extras=extras), []
    for ops in torch_and_c(shape, layer):
        hidden, rope, metadata = random_step(shape, counts)
        qkv = ops.project_qkv(layer, hidden, rope, metadata, 0)
        attn_output = ops.attend(qkv, metadata, 0)
        hidden = ops.project_out_and_mlp(layer, attn_output, hidden)
        results.append((qkv, metadata.pool.layers[0], attn_output, hidden))
    assert_close(results[1], results[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("counts", [[1] * ROWS, [5, 2, 4], [3] * 40], ids=str)
@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_forward_matches_torch(counts, extras, all_rows, threads):
    torch.set_num_threads(threads)
    shape, results = SHAPES[1], []
    layers = [random_layer(shape), random_layer(shape, extras=True)]
    weights = random_weights(shape, *layers, head_bias=extras)
    logit_rows = torch.arange(sum(counts)) if all_rows else torch.tensor(counts).cumsum(0) - 1
    for ops in (DecoderOps(build_sizes(shape)), compile_or_skip(shape, weights)):
        _, _, metadata = random_step(shape, counts, layers=len(layers))
        (tile,) = metadata.tiles
        positions = tile.query_positions.flatten()
        positions = positions if tile.unpad_index is None else positions[tile.unpad_index]
        ids = torch.arange(sum(counts)) % VOCAB
        results.append((ops.forward(weights, ids, positions, metadata, logit_rows), *metadata.pool.layers))
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_several_queries_with_many_keys_use_torch(monkeypatch):
    shape, layer = SHAPES[0], random_layer(SHAPES[0])
    torch_ops, c_ops = torch_and_c(shape, layer)
    monkeypatch.setattr(decoder, "MAX_PER_QUERY_KEYS", 4)
    hidden, rope, metadata = random_step(shape, [5, 2, 4])
    qkv = torch_ops.project_qkv(layer, hidden, rope, metadata, 0)
    assert torch.equal(c_ops.attend(qkv, metadata, 0), torch_ops.attend(qkv, metadata, 0))


@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_runs_on_all_threads_of_torch(monkeypatch, shape, rows):
    num_threads: list[int] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def run_twice(work: int, argument: int, threads: int, _flags: int) -> None:
        num_threads.append(threads)
        for _ in range(2):  # the second time as a thread that finds nothing left
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)(argument)

    addresses = {"GOMP_parallel": ctypes.cast(run_twice, ctypes.c_void_p).value}
    monkeypatch.setattr(decoder, "find_torch_symbol", lambda name: addresses.get(name) or find_torch_symbol(name))
    torch.set_num_threads(3)
    layer = random_layer(shape)
    torch_ops, c_ops = torch_and_c(shape, layer)
    hidden, rope, metadata = random_step(shape, [1] * rows)
    qkv = torch_ops.project_qkv(layer, hidden, rope, metadata, 0)
    assert_close(c_ops.attend(qkv, metadata, 0), torch_ops.attend(qkv, metadata, 0), rtol=1e-4, atol=2e-5)
    assert num_threads == ([3] if rows > 1 or shape[1] > 1 else [])


@pytest.mark.parametrize("threads", [1, 3])
def test_attention_of_a_row_has_the_same_bits_in_any_batch(threads):
    """`batch_invariant` relies on it."""
    torch.set_num_threads(threads)
    shape, layer = SHAPES[0], random_layer(SHAPES[0])
    _, c_ops = torch_and_c(shape, layer)
    hidden, rope, metadata = random_step(shape, [1] * ROWS)
    qkv = c_ops.project_qkv(layer, hidden, rope, metadata, 0)
    together = c_ops.attend(qkv, metadata, 0)
    (tile,) = metadata.tiles
    for row in range(ROWS):
        block_table = tile.block_table.view(ROWS, -1)[row].clone()
        single = AttentionTile(0, 1, 1, 1, block_table, tile.query_positions[row : row + 1])
        alone = AttentionMetadata(metadata.pool, metadata.slot_mapping, [single])
        assert torch.equal(c_ops.attend(qkv[row : row + 1], alone, 0)[0], together[row])


@pytest.mark.parametrize("vocab", [7, 64, 288, 5000])
def test_sampled_tokens_match_torch(vocab):
    c_ops = compile_or_skip(SHAPES[0])
    torch.manual_seed(0)
    logits = 4 * torch.randn(200, vocab)
    params = [SamplingParams(temperature=0.5 + row % 3, seed=row - 9) for row in range(200)]
    requests = [EngineRequest([1] * (1 + row % 5), sampling, 9) for row, sampling in enumerate(params)]
    expected_tokens, expected_logprobs = sample_tokens(logits, requests)
    tokens, logprobs = sample_tokens(logits, requests, c_ops.sample_tokens)
    assert tokens == expected_tokens
    assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)


def test_sampled_tokens_do_not_depend_on_other_requests():
    c_ops = compile_or_skip(SHAPES[0])
    torch.manual_seed(0)
    logits = torch.randn(6, 288)
    params = [SamplingParams(seed=row, top_k=3 * (row % 2), top_logprobs=row % 3) for row in range(6)]
    requests = [EngineRequest([1], sampling, 9) for sampling in params]
    together = list(zip(*sample_tokens(logits, requests, c_ops.sample_tokens)))
    alone = [next(zip(*sample_tokens(logits[row : row + 1], [requests[row]], c_ops.sample_tokens))) for row in range(6)]
    assert together == alone


@pytest.mark.parametrize("vocab", [1, 7, 64, 97])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_logits_sample_a_valid_token(vocab, value):
    c_ops = compile_or_skip(SHAPES[0])
    requests = [EngineRequest([1], SamplingParams(seed=row), 9) for row in range(5)]
    for draw in (None, c_ops.sample_tokens):
        tokens, _ = sample_tokens(torch.full((5, vocab), value), requests, draw)
        assert all(0 <= token < vocab for token in tokens)


@pytest.mark.process
def test_truncated_cached_library_is_compiled_again(monkeypatch, tmp_path, no_loaded_libraries):
    compile_or_skip(SHAPES[2])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "number.c"
    source.write_text("int number(void) { return 7; }")
    c_library.load_c_library(source)
    (cached,) = (tmp_path / "ramify").iterdir()
    cached.unlink()
    cached.write_bytes(b"")
    c_library.load_c_library.cache_clear()
    assert c_library.load_c_library(source).number() == 7
    assert cached.stat().st_size > 0


@pytest.mark.process
def test_a_source_in_another_directory_is_not_compiled_again(monkeypatch, tmp_path, no_loaded_libraries):
    compile_or_skip(SHAPES[2])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("first", "second"):
        source = tmp_path / name / "number.c"
        source.parent.mkdir()
        source.write_text("int number(void) { return 7; }")
        assert c_library.load_c_library(source).number() == 7
    assert len(list((tmp_path / "ramify").iterdir())) == 1


def test_missing_home_directory_is_reported(monkeypatch, no_loaded_libraries):
    compile_or_skip(SHAPES[2])

    def fail(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", fail)
    c_library.load_c_library.cache_clear()
    with pytest.raises(CLibraryUnavailable, match="set XDG_CACHE_HOME"):
        CompiledDecoderOps(build_sizes(SHAPES[2]), random_weights(SHAPES[2]))


def test_loading_a_library_keeps_subnormal_numbers():
    compile_or_skip(SHAPES[0])
    assert torch.tensor(1e-40).mul(1).item() > 0


@pytest.mark.process
@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "no-such-compiler was not found"), ("false", "false failed")]
)
def test_missing_compiler_is_reported(monkeypatch, no_loaded_libraries, compiler, reason):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(CLibraryUnavailable, match=reason):
        CompiledDecoderOps(build_sizes((2, 2, 8)), random_weights((2, 2, 8)))


def test_bfloat16_uses_torch():
    bfloat16_weights = random_weights(SHAPES[0], random_layer(SHAPES[0], dtype=torch.bfloat16))
    with pytest.raises(CLibraryUnavailable, match="bfloat16 on cpu"):
        CompiledDecoderOps(build_sizes(SHAPES[0]), bfloat16_weights)
