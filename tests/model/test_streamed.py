"""Products of a few rows in C are torch's, on any number of threads, and where they cannot be had torch does them."""

import multiprocessing
import threading
from multiprocessing.connection import Connection

import pytest
import torch
from torch.testing import assert_close

from ramify.model import native, streamed
from ramify.model.native import CLibraryUnavailable
from ramify.model.operators import DecoderOps, DecoderSizes, DecoderWeights
from ramify.model.streamed import MAX_ROWS, SmallGemmDecoderOps

HIDDEN, INNER = 96, 160
SIZES = DecoderSizes(heads=3, kv_heads=1, head_dim=32, hidden=HIDDEN, inner=INNER, eps=1e-5, scaling=32**-0.5)


@pytest.fixture(autouse=True)
def threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def made_up(dtype: torch.dtype = torch.bfloat16) -> DecoderWeights:
    """Only what is looked at before a product is asked for."""
    some = torch.ones(1, dtype=dtype)
    return DecoderWeights(some, some, some, some, None, [])


def in_c() -> SmallGemmDecoderOps:
    try:
        return streamed.build_small_gemm_ops(SIZES, made_up())
    except CLibraryUnavailable as reason:
        pytest.skip(str(reason))


def numbers(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x, weight, onto = torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5, torch.randn(rows, outputs)
    return x.bfloat16(), weight.bfloat16().t(), onto.bfloat16()


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("outputs", [4, 5, 64, 203])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, MAX_ROWS, MAX_ROWS + 1])
def test_a_product_is_that_of_torch(rows, outputs, threads):
    each = in_c()
    torch.set_num_threads(threads)
    x, weight, onto = numbers(rows, 96, outputs)
    exact = x.double() @ weight.double()
    assert_close(each.matmul(x, weight).double(), exact, rtol=2**-8, atol=1e-5)
    assert_close(each.matmul(x, weight, onto).double(), exact + onto.double(), rtol=2**-8, atol=1e-5)


def test_the_number_of_threads_and_the_rows_beside_it_change_no_bit():
    each = in_c()
    x, weight, _ = numbers(MAX_ROWS, 96, 203)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found += [each.matmul(x, weight), torch.cat([each.matmul(x[row : row + 1], weight) for row in range(MAX_ROWS)])]
    assert all(torch.equal(found[0], other) for other in found)


def test_rows_that_lie_apart_are_taken_together_first():
    each = in_c()
    x, weight, _ = numbers(4, 96, 64)
    apart = torch.cat([x, x], -1)[:, :96]
    assert torch.equal(each.matmul(apart, weight), each.matmul(x, weight))


def test_more_rows_are_left_to_torch():
    each, torch_only = in_c(), DecoderOps(SIZES)
    x, weight, onto = numbers(MAX_ROWS + 1, 96, 64)
    assert torch.equal(each.matmul(x, weight, onto), torch_only.matmul(x, weight, onto))


def _in_a_child(sent: Connection) -> None:
    torch.set_num_threads(2)
    each, (x, weight, _) = in_c(), numbers(1, 96, 64)
    thread = threading.Thread(target=lambda: sent.send(each.matmul(x, weight)[0].tolist()))
    thread.start()
    thread.join()


def test_a_forked_process_has_threads_of_its_own():
    """As an engine has, which may be forked from a process that has loaded torch, and computes in its own thread."""
    fork = multiprocessing.get_context("fork")
    x, weight, _ = numbers(1, 96, 64)
    torch.set_num_threads(2)
    expected = in_c().matmul(x, weight)[0].tolist()
    received, sent = fork.Pipe(duplex=False)
    child = fork.Process(target=_in_a_child, args=(sent,))
    child.start()
    try:
        assert received.poll(30)
        assert received.recv() == expected
        child.join(30)
        assert child.exitcode == 0
    finally:
        child.kill()


def test_without_a_compiler_it_says_so(monkeypatch):
    in_c()
    monkeypatch.setenv("CC", "no-such-compiler")
    native.load_c_library.cache_clear()
    try:
        with pytest.raises(CLibraryUnavailable, match="no-such-compiler is not there"):
            streamed.build_small_gemm_ops(SIZES, made_up())
    finally:
        native.load_c_library.cache_clear()


def test_other_processors_types_and_widths_are_for_torch(monkeypatch):
    with pytest.raises(CLibraryUnavailable, match="float32 on cpu"):
        streamed.build_small_gemm_ops(SIZES, made_up(torch.float32))
    monkeypatch.setattr(streamed, "processor", lambda: ["flags : avx512_bf16"])
    with pytest.raises(CLibraryUnavailable, match="multiple of 32"):
        streamed.build_small_gemm_ops(DecoderSizes(3, 1, 10, HIDDEN, INNER, 1e-5, 0.3), made_up())
    monkeypatch.setattr(streamed, "processor", lambda: ["flags : avx2"])
    with pytest.raises(CLibraryUnavailable, match="no AVX512-BF16"):
        streamed.build_small_gemm_ops(SIZES, made_up())
