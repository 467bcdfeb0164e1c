"""What a decoder layer does between its matrix products, twice.

`Operators` are a few torch calls each, for every device and type. On a small model those calls cost more than the
products, so for one CPU thread in float32 there is `Compiled`: the same four operators in C, compiled for the model's
shape when it is loaded (a third of a second), and attention that reads keys and values where they lie in the pool
instead of gathering them. Without a C compiler, or if anything about it fails, the torch calls do.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ramify.model.paged import Step, attend, write

COMPILE_DEADLINE = 60.0  # seconds
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-ffinite-math-only"]
FLAGS += ["-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math"]
# together -ffast-math, which would also switch off subnormal numbers in the process that loads the library


class Operators:
    """The four operators, for heads of one shape."""

    in_place = False  # whether decoding reads the pool itself, and nothing need be gathered for it

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square in float32, as the models do it."""
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, weight.shape, weight, eps)
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(hidden.shape[-1]).add_(eps).rsqrt_()
        return (hidden * scale).to(hidden.dtype).mul_(weight)

    def turn(self, qkv: Tensor, turns: Tensor, step: Step, layer: int) -> None:
        """Rotate queries and keys in place by `turns`, [rows, 2 * head_dim], and store keys and values."""
        cos, sin = turns.unsqueeze(1).chunk(2, -1)
        rotated = self.heads + self.kv_heads
        qk = qkv[:, : rotated * self.head_dim].view(-1, rotated, self.head_dim)
        torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin, out=qk)
        write(step, layer, qkv[:, self.heads * self.head_dim :])

    def attend(self, qkv: Tensor, step: Step, layer: int, scaling: float) -> Tensor:
        """What the queries find in the pool, [rows, heads * head_dim]."""
        query = qkv[:, : self.heads * self.head_dim].view(-1, self.heads, self.head_dim)
        return attend(step, layer, query, scaling).reshape(qkv.shape[0], -1)

    def gate(self, gate_up: Tensor) -> Tensor:
        """SiLU of the left half times the right half."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


class Compiled(Operators):
    """The same in C; only for contiguous float32 in the memory of the CPU."""

    in_place = True

    def __init__(self, library: ctypes.CDLL, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__(heads, kv_heads, head_dim)
        self._norm = _typed(library.norm, "pppiif")
        self._turn = _typed(library.turn, "ppppi")
        self._attend = _typed(library.attend, "pppiippif")
        self._gate = _typed(library.gate, "ppii")

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(hidden)
        self._norm(hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), *hidden.shape, eps)
        return out

    def turn(self, qkv: Tensor, turns: Tensor, step: Step, layer: int) -> None:
        pool = step.pool.layers[layer]
        self._turn(qkv.data_ptr(), turns.data_ptr(), step.slots.data_ptr(), pool.data_ptr(), qkv.shape[0])

    def attend(self, qkv: Tensor, step: Step, layer: int, scaling: float) -> Tensor:
        if any(tile.queries > 1 for tile in step.tiles):
            return super().attend(qkv, step, layer, scaling)
        out = qkv.new_empty(qkv.shape[0], self.heads * self.head_dim)
        pool, size = step.pool.layers[layer].data_ptr(), step.pool.block_size
        for tile in step.tiles:
            most = tile.blocks.shape[0] // tile.count
            begin = qkv.data_ptr() + 4 * tile.start * qkv.shape[1]
            found = out.data_ptr() + 4 * tile.start * out.shape[1]
            blocks, positions = tile.blocks.data_ptr(), tile.positions.data_ptr()
            self._attend(begin, pool, blocks, most, size, positions, found, tile.count, scaling)
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, inner)
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, inner)
        return out


def compiled(weight: Tensor, heads: int, kv_heads: int, head_dim: int) -> Compiled | None:
    """The operators in C for a model with weights like `weight`, where they are of use and can be had."""
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or torch.get_num_threads() > 1:
        return None
    library = _library(heads, kv_heads, head_dim)
    return None if library is None else Compiled(library, heads, kv_heads, head_dim)


@functools.cache
def _library(heads: int, kv_heads: int, head_dim: int) -> ctypes.CDLL | None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return None
    shape = [f"-DHEADS={heads}", f"-DKV_HEADS={kv_heads}", f"-DHEAD_DIM={head_dim}"]
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "operators.so")
        command = [compiler, *FLAGS, *shape, str(Path(__file__).with_name("operators.c")), "-o", target, "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_DEADLINE)
            return ctypes.CDLL(target)
        except (OSError, subprocess.SubprocessError):
            return None


def _typed(function: Any, kinds: str) -> Any:
    """A C function whose arguments are pointers, integers and floats."""
    known = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
    function.argtypes, function.restype = [known[kind] for kind in kinds], None
    return function
