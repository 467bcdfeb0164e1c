"""Matrices in 8 and 4 bits are close to the original, and exact where they can be."""

import pytest
import torch

from ramify.core.errors import ModelUnsupported
from ramify.model.kernels.quantization import NF4_LEVELS, dequantize_matrix, quantize_matrix


@pytest.mark.parametrize(("mode", "bits", "limit"), [("8bit", 8, 0.007), ("4bit", 4, 0.095)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_and_size(mode, bits, limit, dtype):
    matrix = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    quantized = quantize_matrix(matrix, mode)
    restored = dequantize_matrix(quantized)
    assert restored.dtype == dtype and restored.shape == matrix.shape
    assert (restored - matrix).float().norm() <= limit * matrix.float().norm()
    assert quantized.codes.nbytes == matrix.numel() * bits // 8
    assert quantized.scales.shape == (256, 8)


@pytest.mark.parametrize("mode", ["8bit", "4bit"])
def test_zeros_stay_zeros_and_a_quantized_matrix_is_restored_exactly(mode):
    matrix = torch.zeros(3, 48)
    matrix[1] = 2.0 * torch.tensor(NF4_LEVELS * 3)  # blocks of 16
    matrix[2, :16] = torch.arange(-127, -111).float()
    restored = dequantize_matrix(quantize_matrix(matrix, mode))
    assert not restored[0].any() and not restored[2, 16:].any()
    exact = restored[1] == matrix[1] if mode == "4bit" else restored[2] == matrix[2]
    assert exact.all()
    assert torch.equal(dequantize_matrix(quantize_matrix(restored, mode)), restored)


def test_a_matrix_of_odd_width_is_refused():
    with pytest.raises(ModelUnsupported, match="has 9"):
        quantize_matrix(torch.ones(2, 9), "4bit")
