"""The two halves of a decoder layer and the attention between them, twice.

`Operators` are torch calls, for every device and type. On a small model those calls cost as much as the products in
them, so for one CPU thread in float32 there is `Compiled`: the same in C, three calls a layer, compiled for the model's
shape when it is loaded (half a second). Its matrix products are those of torch's own library, and its attention reads
keys and values where they lie in the pool instead of gathering them. Without a C compiler, or if anything about it
fails, the torch calls do, and `note` says why.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ramify.model.paged import Step, attend_tile, write

COMPILE_DEADLINE = 60.0  # seconds
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-ffinite-math-only"]
FLAGS += ["-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math"]
# together -ffast-math, which would also switch off subnormal numbers in the process that loads the library
FEW_KEYS = 256  # up to which several queries of a sequence are answered one by one


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the operators of a model have in common, by the names they have in C."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    eps: float
    scaling: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's tensors; matrices are [in, out]."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Unavailable(Exception):
    """Why there are no operators in C."""


class Operators:
    """A layer is `begin`, `attend`, `finish`."""

    def __init__(self, sizes: Sizes, note: str = "torch") -> None:
        self.sizes, self.note = sizes, note

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Root mean square in float32, as the models do it."""
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, weight.shape, weight, self.sizes.eps)
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(hidden.shape[-1]).add_(self.sizes.eps).rsqrt_()
        return (hidden * scale).to(hidden.dtype).mul_(weight)

    def begin(self, layer: Layer, hidden: Tensor, turns: Tensor, step: Step, number: int) -> Tensor:
        """Queries, keys and values, the first two rotated by `turns`, [rows, 2 * head_dim]; the last two stored."""
        heads, kv_heads, head_dim = self.sizes.heads, self.sizes.kv_heads, self.sizes.head_dim
        qkv = torch.mm(self.norm(hidden, layer.norm), layer.qkv)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        if layer.q_norm is not None and layer.k_norm is not None:
            self._norm_heads(qkv, layer.q_norm, layer.k_norm)
        cos, sin = turns.unsqueeze(1).chunk(2, -1)
        qk = qkv[:, : (heads + kv_heads) * head_dim].view(-1, heads + kv_heads, head_dim)
        torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), sin, out=qk)
        write(step, number, qkv[:, heads * head_dim :])
        return qkv

    def attend(self, qkv: Tensor, step: Step, number: int) -> Tensor:
        """What the queries find in the pool, [rows, heads * head_dim]."""
        parts = [self._tile(qkv, step, index, number) for index in range(len(step.tiles))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def finish(self, layer: Layer, found: Tensor, hidden: Tensor) -> Tensor:
        """`hidden` with what attention found and what the MLP makes of both added to it."""
        hidden = torch.addmm(hidden, found, layer.out)
        if layer.out_bias is not None:
            hidden += layer.out_bias
        gate, up = torch.mm(self.norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
        return torch.addmm(hidden, F.silu(gate).mul_(up), layer.down)

    def _norm_heads(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        sizes = self.sizes
        heads = qkv.view(qkv.shape[0], -1, sizes.head_dim)
        for weight, start, count in ((q_norm, 0, sizes.heads), (k_norm, sizes.heads, sizes.kv_heads)):
            part = heads[:, start : start + count]
            normed = self.norm(part.reshape(-1, sizes.head_dim), weight)
            part.copy_(normed.view(part.shape))

    def _tile(self, qkv: Tensor, step: Step, index: int, number: int) -> Tensor:
        tile, sizes = step.tiles[index], self.sizes
        query = qkv[tile.start : tile.stop, : sizes.heads * sizes.head_dim].view(-1, sizes.heads, sizes.head_dim)
        return attend_tile(step, tile, number, query, sizes.scaling).reshape(query.shape[0], -1)


class Compiled(Operators):
    """The same in C, and drawing tokens; only for contiguous float32 in the memory of the CPU."""

    def __init__(self, sizes: Sizes, layers: list[Layer]) -> None:
        super().__init__(sizes, "compiled")
        library, self._sgemm = _library(sizes), _sgemm()
        self._begin = _typed(library.begin, "pppppppi")
        self._attend = _typed(library.attend, "pppiippipi")
        self._finish = _typed(library.finish, "ppppi")
        self._draw = _typed(library.draw, "piipppp")
        self._tables = {id(layer): _pointers(layer) for layer in layers}

    def begin(self, layer: Layer, hidden: Tensor, turns: Tensor, step: Step, number: int) -> Tensor:
        rows, sizes = hidden.shape[0], self.sizes
        qkv = hidden.new_empty(rows, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim)
        ends = (hidden.data_ptr(), turns.data_ptr(), step.slots.data_ptr(), step.pool.layers[number].data_ptr())
        self._begin(self._sgemm, self._tables[id(layer)], *ends, qkv.data_ptr(), rows)
        return qkv

    def attend(self, qkv: Tensor, step: Step, number: int) -> Tensor:
        width = self.sizes.heads * self.sizes.head_dim
        out = qkv.new_empty(qkv.shape[0], width)
        pool, size = step.pool.layers[number].data_ptr(), step.pool.block_size
        for index, tile in enumerate(step.tiles):
            most = tile.blocks.shape[0] // tile.count
            if tile.queries > 1 and most * size > FEW_KEYS:
                out[tile.start : tile.stop] = self._tile(qkv, step, index, number)
                continue
            begin = qkv.data_ptr() + 4 * tile.start * qkv.shape[1]
            seen = (tile.blocks.data_ptr(), most, size, tile.positions.data_ptr())
            places = None if tile.pack is None else tile.pack.data_ptr()
            rows = tile.stop - tile.start
            self._attend(begin, pool, *seen, places, tile.queries, out.data_ptr() + 4 * tile.start * width, rows)
        return out

    def finish(self, layer: Layer, found: Tensor, hidden: Tensor) -> Tensor:
        table = self._tables[id(layer)]
        self._finish(self._sgemm, table, found.data_ptr(), hidden.data_ptr(), hidden.shape[0])
        return hidden

    def draw(
        self, logits: Tensor, temperatures: list[float], seeds: list[int], positions: list[int]
    ) -> tuple[list[int], list[float]]:
        """A token for each row, chosen by its seed and position, and its logprob; as the engine's sampler does it."""
        rows, vocab = logits.shape
        chance = np.array([seeds, positions], np.uint64)
        tokens, logprobs = np.empty(rows, np.int64), np.empty(rows, np.float32)
        heat = np.array(temperatures, np.float32)
        arrays = (each.ctypes.data for each in (heat, chance, tokens, logprobs))
        self._draw(logits.data_ptr(), rows, vocab, *arrays)
        return tokens.tolist(), logprobs.tolist()


def compiled(sizes: Sizes, layers: list[Layer]) -> Compiled:
    """The operators in C for these layers, or Unavailable, with the reason."""
    weight = layers[0].norm
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise Unavailable(f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}")
    if torch.get_num_threads() > 1:
        raise Unavailable(f"{torch.get_num_threads()} threads")
    return Compiled(sizes, layers)


@functools.cache
def _library(sizes: Sizes) -> ctypes.CDLL:
    named = os.environ.get("CC", "cc")
    compiler = shutil.which(named)
    if compiler is None:
        raise Unavailable(f"no C compiler: {named} is not there")
    shape = [f"-D{name.upper()}={_literal(getattr(sizes, name))}" for name in Sizes.__slots__]
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "operators.so")
        command = [compiler, *FLAGS, *shape, str(Path(__file__).with_name("operators.c")), "-o", target, "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_DEADLINE)
            return ctypes.CDLL(target)
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"{named} failed: {error}") from error


@functools.cache
def _sgemm() -> int:
    """The address of the matrix product in the library that torch has loaded."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.sgemm_, ctypes.c_void_p).value or 0
    except (OSError, AttributeError) as error:
        raise Unavailable("torch's library has no sgemm_") from error


def _literal(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value!r}f"


def _pointers(layer: Layer) -> Any:
    """Where the layer's tensors lie, in the order of the struct in C; they are updated in place."""
    tensors: list[Tensor | None] = [getattr(layer, name) for name in Layer.__slots__]
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(addresses))(*addresses)


def _typed(function: Any, kinds: str) -> Any:
    """A C function whose arguments are pointers and integers."""
    known = {"p": ctypes.c_void_p, "i": ctypes.c_int64}
    function.argtypes, function.restype = [known[kind] for kind in kinds], None
    return function
