"""Products with quantized matrices: few rows in one kernel, many rows with parts that are dequantized first.

The kernel reads codes and dequantizes them in registers to the numbers of `dequantize_matrix`, rounded as these are, so
a product differs from the product with the dequantized matrix only in the order of its sums. A program computes all
rows for some outputs, so each weight is dequantized once. Matrices with few outputs are split along their columns, too;
the sums of the parts are added in order.
"""
# ruff: noqa: ANN001, ANN202, N803, N806 - of kernels, whose arguments are pointers and constants

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.model.kernels.quantization import MAX_BLOCK, QuantizedMatrix, dequantize_matrix, get_levels

DEQUANTIZED_PART_BYTES = 64 << 20  # of a matrix at a time: what caches hold for the product that follows
COLUMNS_PER_STEP = 128
ELEMENTS_PER_PROGRAM = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """The sizes of a program for at most `rows` rows."""

    rows: int
    outputs: int
    max_programs: int  # columns are split into parts up to this many programs
    num_warps: int
    num_stages: int


TILES = (Tile(16, 64, 256, 4, 4), Tile(64, 128, 256, 8, 3), Tile(128, 128, 128, 8, 2))


@triton.jit
def _look_up(codes, LEVELS):
    """Return the levels of a vector of 4-bit codes."""
    return tl.gather(tl.load(LEVELS + tl.arange(0, 16)), codes.to(tl.int32), 0)


@triton.jit
def _dequantize(
    CODES, SCALES, LEVELS, OUT, WIDTH, BLOCK: tl.constexpr, IN_PAIRS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Dequantize SIZE codes or pairs of codes of a row that has WIDTH of them."""
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    PER_BLOCK: tl.constexpr = BLOCK // 2 if IN_PAIRS else BLOCK
    mask, block = index < WIDTH, index // PER_BLOCK
    codes = tl.load(CODES + row * WIDTH + index, mask=mask, other=0)
    scales = tl.load(SCALES + row * (WIDTH // PER_BLOCK) + block, mask=mask, other=0.0).to(tl.float32)
    targets = OUT + row * (WIDTH // PER_BLOCK * BLOCK) + block * BLOCK + index % PER_BLOCK
    if IN_PAIRS:
        first, second = _look_up(codes & 15, LEVELS) * scales, _look_up(codes >> 4, LEVELS) * scales
        tl.store(targets, first.to(OUT.dtype.element_ty), mask=mask)
        tl.store(targets + PER_BLOCK, second.to(OUT.dtype.element_ty), mask=mask)
    else:
        tl.store(targets, (codes.to(tl.float32) * scales).to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["NUM_ROWS"])
def _multiply(
    ROWS, CODES, SCALES, LEVELS, OUT, NUM_ROWS, NUM_OUTPUTS, COLUMNS, PART_COLUMNS,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    """Multiply all rows with N rows of the matrix, by one part of the columns, K columns at a time.

    The product is computed as [outputs, rows]: outputs fill the larger side of the tensor cores' tiles. Rows and
    outputs beyond the end are clamped to the last one, and the store masks them. Masked loads would make Triton load a
    scale for every element instead of once per block.
    """
    output, row = tl.program_id(0) * N + tl.arange(0, N), tl.arange(0, M)
    matrix_row = tl.minimum(output, NUM_OUTPUTS - 1).to(tl.int64)[:, None]
    input_row = tl.minimum(row, NUM_ROWS - 1)[None, :]
    start = tl.program_id(1) * PART_COLUMNS
    stop = tl.minimum(start + PART_COLUMNS, COLUMNS)
    PER_BYTE: tl.constexpr = 2 if IN_PAIRS else 1
    PER_BLOCK: tl.constexpr = BLOCK // PER_BYTE
    index = tl.arange(0, K // PER_BYTE)
    block, column = index // PER_BLOCK, index // PER_BLOCK * BLOCK + index % PER_BLOCK
    codes_row = CODES + matrix_row * (COLUMNS // PER_BYTE) + index[None, :]
    scales_row = SCALES + matrix_row * (COLUMNS // BLOCK) + block[None, :]
    inputs_row = ROWS + input_row * COLUMNS + column[:, None]
    sums = tl.zeros([N, M], dtype=tl.float32)
    for first in range(start, stop, K):
        codes = tl.load(codes_row + first // PER_BYTE)
        scales = tl.load(scales_row + first // BLOCK).to(tl.float32)
        inputs = tl.load(inputs_row + first)
        if IN_PAIRS:
            others = tl.load(inputs_row + (first + PER_BLOCK))
            weights = _look_up_matrix(codes & 15, LEVELS) * scales
            sums = tl.dot(weights.to(ROWS.dtype.element_ty), inputs, sums, input_precision="ieee")
            weights = _look_up_matrix(codes >> 4, LEVELS) * scales
            sums = tl.dot(weights.to(ROWS.dtype.element_ty), others, sums, input_precision="ieee")
        else:
            weights = codes.to(tl.float32) * scales
            sums = tl.dot(weights.to(ROWS.dtype.element_ty), inputs, sums, input_precision="ieee")
    targets = OUT + (tl.program_id(1) * NUM_ROWS + row[None, :]).to(tl.int64) * NUM_OUTPUTS + output[:, None]
    mask = (output < NUM_OUTPUTS)[:, None] & (row < NUM_ROWS)[None, :]
    tl.store(targets, sums.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _look_up_matrix(codes, LEVELS):
    """Return the levels of a matrix of 4-bit codes."""
    SIZE: tl.constexpr = codes.shape[0] * codes.shape[1]
    return _look_up(codes.reshape([SIZE]), LEVELS).reshape(codes.shape)


@triton.jit
def _sum_parts(PARTS, OUT, SIZE, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the parts in their order."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < SIZE
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(PARTS + part * SIZE + index, mask=mask, other=0.0)
    tl.store(OUT + index, total.to(OUT.dtype.element_ty), mask=mask)


def dequantize(matrix: QuantizedMatrix) -> Tensor:
    """Return the matrix, in the dtype of its scales."""
    codes, scales = matrix
    num_rows, width = codes.shape
    out = torch.empty(num_rows, matrix.num_columns, dtype=scales.dtype, device=scales.device)
    _dequantize[(num_rows, triton.cdiv(width, ELEMENTS_PER_PROGRAM))](
        codes, scales, get_levels(codes.device), out, width,
        BLOCK=matrix.block, IN_PAIRS=matrix.is_in_pairs, SIZE=ELEMENTS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return out


def measure_error(matrix: QuantizedMatrix) -> float:
    """Return the largest relative error of products with a matrix: for each tile, and for more rows."""
    errors, tiles = list[float](), _list_tiles(matrix.scales)
    for count in [*(tile.rows for tile in tiles), tiles[-1].rows + 1]:
        generator = torch.Generator(matrix.scales.device).manual_seed(count)
        rows = matrix.scales.new_empty(count, matrix.num_columns).normal_(generator=generator)
        products = [torch.mm(rows, dequantize_matrix(part).t()) for part in _split_matrix(matrix)]
        expected = torch.cat(products, 1).float()
        difference = (multiply(rows, matrix).float() - expected).norm()
        errors.append(float(difference / expected.norm().clamp_min(1e-30)))
    return float(torch.tensor(errors).max())  # unlike Python's, it keeps NaN


def _list_tiles(tensor: Tensor) -> tuple[Tile, ...]:
    """Return the tiles for the dtype of a tensor: numbers of float32 take twice the memory."""
    return TILES if tensor.element_size() == 2 else TILES[:1]


def multiply(rows: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Return `rows` [rows, columns] times the transposed matrix."""
    if 0 < len(rows) <= _list_tiles(rows)[-1].rows and matrix.block == MAX_BLOCK:
        return _multiply_few(rows, matrix)
    out, start = rows.new_empty(len(rows), len(matrix.codes)), 0
    for part in _split_matrix(matrix):
        columns = slice(start, start := start + len(part.codes))
        torch.mm(rows, dequantize(part).t(), out=out[:, columns])
    return out


def _split_matrix(matrix: QuantizedMatrix) -> list[QuantizedMatrix]:
    """Return the rows of a matrix in parts that are dequantized at a time."""
    size = max(1, DEQUANTIZED_PART_BYTES // (matrix.num_columns * matrix.scales.element_size()))
    return [QuantizedMatrix(*part) for part in zip(matrix.codes.split(size), matrix.scales.split(size))]


def _multiply_few(rows: Tensor, matrix: QuantizedMatrix) -> Tensor:
    tile, is_half = next(tile for tile in TILES if len(rows) <= tile.rows), rows.element_size() == 2
    codes, columns, num_outputs = matrix.codes, matrix.num_columns, len(matrix.codes)
    num_programs = triton.cdiv(num_outputs, tile.outputs)
    step = math.gcd(columns, COLUMNS_PER_STEP if is_half else MAX_BLOCK)
    num_steps = columns // step
    steps_per_part = triton.cdiv(num_steps, max(1, tile.max_programs // num_programs))
    num_parts = triton.cdiv(num_steps, steps_per_part)
    out = rows.new_empty(len(rows), num_outputs)
    parts = out if num_parts == 1 else rows.new_empty(num_parts, *out.shape, dtype=torch.float32)
    _multiply[(num_programs, num_parts)](
        rows.contiguous(), codes, matrix.scales, get_levels(codes.device), parts,
        len(rows), num_outputs, columns, steps_per_part * step,
        M=tile.rows, N=tile.outputs, K=step, BLOCK=matrix.block, IN_PAIRS=matrix.is_in_pairs,
        num_warps=tile.num_warps, num_stages=tile.num_stages if is_half else 1,
    )  # fmt: skip
    if num_parts > 1:
        _sum_parts[(triton.cdiv(out.numel(), ELEMENTS_PER_PROGRAM),)](
            parts, out, out.numel(), NUM_PARTS=num_parts, BLOCK=ELEMENTS_PER_PROGRAM, num_warps=4
        )
    return out
