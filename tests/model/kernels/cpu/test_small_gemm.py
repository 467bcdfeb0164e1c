"""Products of a few rows in C match torch on any number of threads, and report why they are unavailable."""

import multiprocessing
import threading
from multiprocessing.connection import Connection

import pytest
import torch
from torch.testing import assert_close

from ramify.model.kernels.cpu import decoder
from ramify.model.kernels.cpu.c_library import CLibraryUnavailable
from ramify.model.kernels.cpu.decoder import MAX_ROWS, SmallGemmDecoderOps
from ramify.model.kernels.decoder_ops import DecoderOps, DecoderSizes, DecoderWeights

HIDDEN, INNER = 96, 160
SIZES = DecoderSizes(heads=3, kv_heads=1, head_dim=32, hidden=HIDDEN, inner=INNER, eps=1e-5, scaling=32**-0.5)


@pytest.fixture(autouse=True)
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def minimal_weights(dtype: torch.dtype = torch.bfloat16) -> DecoderWeights:
    """Only what is read before a product is computed."""
    number = torch.ones(1, dtype=dtype)
    return DecoderWeights(number, number, number, number, None, [])


def compile_or_skip() -> SmallGemmDecoderOps:
    try:
        return SmallGemmDecoderOps(SIZES, minimal_weights())
    except CLibraryUnavailable as reason:
        pytest.skip(str(reason))


def random_operands(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, a weight and an addend."""
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5
    return x.bfloat16(), weight.bfloat16().t(), torch.randn(rows, outputs).bfloat16()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("outputs", [4, 5, 64, 203])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, MAX_ROWS, MAX_ROWS + 1])
def test_product_matches_torch(rows, outputs, threads):
    ops = compile_or_skip()
    torch.set_num_threads(threads)
    x, weight, addend = random_operands(rows, 96, outputs)
    exact = x.double() @ weight.double()
    assert_close(ops.matmul(x, weight).double(), exact, rtol=2**-8, atol=1e-5)
    assert_close(ops.matmul(x, weight, addend).double(), exact + addend.double(), rtol=2**-8, atol=1e-5)


def test_row_has_the_same_bits_with_any_threads_and_other_rows():
    ops = compile_or_skip()
    x, weight, _ = random_operands(MAX_ROWS, 96, 203)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        single_rows = [ops.matmul(x[row : row + 1], weight) for row in range(MAX_ROWS)]
        results += [ops.matmul(x, weight), torch.cat(single_rows)]
    assert all(torch.equal(results[0], result) for result in results)


def test_rows_may_be_strided():
    ops = compile_or_skip()
    x, weight, _ = random_operands(4, 96, 64)
    strided = torch.cat([x, x], -1)[:, :96]
    assert torch.equal(ops.matmul(strided, weight), ops.matmul(x, weight))


def test_more_rows_use_torch():
    c_ops, torch_ops = compile_or_skip(), DecoderOps(SIZES)
    x, weight, addend = random_operands(MAX_ROWS + 1, 96, 64)
    assert torch.equal(c_ops.matmul(x, weight, addend), torch_ops.matmul(x, weight, addend))


def _multiply_in_thread(connection: Connection) -> None:
    torch.set_num_threads(2)
    ops, (x, weight, _) = compile_or_skip(), random_operands(1, 96, 64)
    thread = threading.Thread(target=lambda: connection.send(ops.matmul(x, weight)[0].tolist()))
    thread.start()
    thread.join()


@pytest.mark.process
def test_product_works_in_a_thread_of_a_forked_process():
    """An engine may be forked from a process that has loaded torch, and computes in its own thread."""
    fork = multiprocessing.get_context("fork")
    x, weight, _ = random_operands(1, 96, 64)
    torch.set_num_threads(2)
    expected = compile_or_skip().matmul(x, weight)[0].tolist()
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_multiply_in_thread, args=(sender,))
    child.start()
    try:
        assert receiver.poll(30)
        assert receiver.recv() == expected
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()


def test_other_cpus_dtypes_and_widths_use_torch(monkeypatch):
    with pytest.raises(CLibraryUnavailable, match="float32 on cpu"):
        SmallGemmDecoderOps(SIZES, minimal_weights(torch.float32))
    monkeypatch.setattr(decoder, "read_cpu_features", lambda: ["flags : avx512_bf16"])
    with pytest.raises(CLibraryUnavailable, match="multiple of 32"):
        SmallGemmDecoderOps(DecoderSizes(3, 1, 10, HIDDEN, INNER, 1e-5, 0.3), minimal_weights())
    monkeypatch.setattr(decoder, "read_cpu_features", lambda: ["flags : avx2"])
    with pytest.raises(CLibraryUnavailable, match="no AVX512-BF16"):
        SmallGemmDecoderOps(SIZES, minimal_weights())
