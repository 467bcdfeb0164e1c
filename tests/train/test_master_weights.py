"""How float32 weights are rounded to the bfloat16 that a model computes with."""

import pytest
import torch

from ramify.train.master_weights import round_to_bfloat16


def from_bits(*bits: int) -> torch.Tensor:
    """Return the float32 numbers with these bits."""
    return torch.tensor(bits, dtype=torch.uint32).view(torch.float32)


@pytest.mark.parametrize(
    ("bits", "high"),
    [
        (0x3F807FFF, 0x3F80),
        (0x3F808000, 0x3F81),  # torch rounds this tie to 0x3F80
        (0x3F818000, 0x3F82),
        (0xBF808000, 0xBF81),
        (0x00000001, 0x0000),
        (0x80000001, 0x8000),
        (0x00008000, 0x0001),
        (0x807F8000, 0x8080),  # the largest denormal number becomes a normal one
        (0x7F7F8000, 0x7F80),  # beyond the largest number of bfloat16 is infinity
        (0xFF800000, 0xFF80),
        (0x7FFFFFFF, 0x7FC0),  # not a number, as CUDA writes it
    ],
)
def test_ties_are_rounded_away_from_zero(bits, high):
    rounded = round_to_bfloat16(from_bits(bits))
    assert rounded.view(torch.uint16).tolist() == [high]


def test_other_numbers_are_rounded_as_torch_does():
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    values = values[values.view(torch.int32) & 0xFFFF != 0x8000]
    assert torch.equal(round_to_bfloat16(values), values.bfloat16())
