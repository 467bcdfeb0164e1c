"""The two halves of a decoder layer and the attention between them, twice.

`Operators` are torch calls, for every device and type. On a small model those calls cost as much as the products in
them, so for one CPU thread in float32 there is `Compiled`: the same in C, three calls a layer, compiled for the model's
shape when it is loaded (half a second). Its matrix products are those of torch's own library, and its attention reads
keys and values where they lie in the pool instead of gathering them. Without a C compiler, or if anything about it
fails, the torch calls do, and `note` says why.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ramify.model.paged import Step, Tile, attend_tile, write

COMPILE_DEADLINE = 60.0  # seconds
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-ffinite-math-only"]
FLAGS += ["-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math"]
# together -ffast-math, which would also switch off subnormal numbers in the process that loads the library
CHUNK = 64  # rows that go through a layer together in C; what a row becomes may depend on their number
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
    """A layer is `begin`, `attend`, `finish`; `run` is several of them."""

    def __init__(self, sizes: Sizes, note: str = "torch") -> None:
        self.sizes, self.note = sizes, note

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Root mean square in float32, as the models do it."""
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, weight.shape, weight, self.sizes.eps)
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(hidden.shape[-1]).add_(self.sizes.eps).rsqrt_()
        return (hidden * scale).to(hidden.dtype).mul_(weight)

    def run(self, layers: Sequence[Layer], hidden: Tensor, turns: Tensor, step: Step) -> Tensor:
        """What becomes of `hidden` in the lowest layers of the model."""
        for number, layer in enumerate(layers):
            qkv = self.begin(layer, hidden, turns, step, number)
            hidden = self.finish(layer, self.attend(qkv, step, number), hidden)
        return hidden

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
        parts = [self._tile(qkv, step, tile, number) for tile in step.tiles]
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

    def _tile(self, qkv: Tensor, step: Step, tile: Tile, number: int) -> Tensor:
        sizes = self.sizes
        query = qkv[tile.start : tile.stop, : sizes.heads * sizes.head_dim].view(-1, sizes.heads, sizes.head_dim)
        return attend_tile(step, tile, number, query, sizes.scaling).reshape(query.shape[0], -1)


class Compiled(Operators):
    """The same in C, and drawing tokens; only for contiguous float32 in the memory of the CPU."""

    def __init__(self, sizes: Sizes, layers: list[Layer]) -> None:
        super().__init__(sizes, "compiled")
        self.row, self.width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.heads * sizes.head_dim
        library, self._sgemm = _library(sizes), _sgemm()
        self._norm = _typed(library.norm_rows, "pppi")
        self._begin = _typed(library.begin, "pppppppi")
        self._attend = _typed(library.attend, "pppiippipi")
        self._finish = _typed(library.finish, "ppppi")
        self._run = _typed(library.run, "pppippppiippippi")
        self._draw = _typed(library.draw, "piipppp")
        self._tables = {id(layer): _pointers(layer) for layer in layers}

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        self._norm(hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), hidden.shape[0])
        return out

    def run(self, layers: Sequence[Layer], hidden: Tensor, turns: Tensor, step: Step) -> Tensor:
        if len(step.tiles) > 1 or not _answerable(step, step.tiles[0]):
            return super().run(layers, hidden, turns, step)
        rows = hidden.shape[0]
        tables = (ctypes.c_void_p * len(layers))(*(ctypes.addressof(self._tables[id(layer)]) for layer in layers))
        pools = (ctypes.c_void_p * len(layers))(*(layer.data_ptr() for layer in step.pool.layers[: len(layers)]))
        ends = hidden.data_ptr(), turns.data_ptr(), step.slots.data_ptr()
        qkv, found = hidden.new_empty(rows, self.row), hidden.new_empty(rows, self.width)
        seen = self._seen(step, step.tiles[0])
        self._run(self._sgemm, tables, pools, len(layers), *ends, *seen, qkv.data_ptr(), found.data_ptr(), rows)
        return hidden

    def begin(self, layer: Layer, hidden: Tensor, turns: Tensor, step: Step, number: int) -> Tensor:
        rows = hidden.shape[0]
        qkv = hidden.new_empty(rows, self.row)
        ends = hidden.data_ptr(), turns.data_ptr(), step.slots.data_ptr(), step.pool.layers[number].data_ptr()
        self._begin(self._sgemm, self._tables[id(layer)], *ends, qkv.data_ptr(), rows)
        return qkv

    def attend(self, qkv: Tensor, step: Step, number: int) -> Tensor:
        out = qkv.new_empty(qkv.shape[0], self.width)
        pool = step.pool.layers[number].data_ptr()
        for tile in step.tiles:
            if not _answerable(step, tile):
                out[tile.start : tile.stop] = self._tile(qkv, step, tile, number)
                continue
            begin, end = qkv.data_ptr() + 4 * tile.start * self.row, out.data_ptr() + 4 * tile.start * self.width
            self._attend(begin, pool, *self._seen(step, tile), end, tile.stop - tile.start)
        return out

    def _seen(self, step: Step, tile: Tile) -> tuple[Any, ...]:
        """What attention in C has to know of a tile."""
        most, places = tile.blocks.shape[0] // tile.count, None if tile.pack is None else tile.pack.data_ptr()
        return tile.blocks.data_ptr(), most, step.pool.block_size, tile.positions.data_ptr(), places, tile.queries

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


def _answerable(step: Step, tile: Tile) -> bool:
    """Whether queries one by one are a good way to answer a tile."""
    return tile.queries == 1 or tile.blocks.shape[0] // tile.count * step.pool.block_size <= FEW_KEYS


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
    source = Path(__file__).with_name("operators.c")
    command = [compiler, *FLAGS, *shape, f"-DROWS={CHUNK}", str(source), "-lm"]
    kept = _kept(source, command)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / kept.name
        try:
            if kept.exists():
                return ctypes.CDLL(str(kept))
            subprocess.run([*command, "-o", str(target)], check=True, capture_output=True, timeout=COMPILE_DEADLINE)
            with contextlib.suppress(OSError):  # no room to keep it: the next start compiles again
                kept.parent.mkdir(parents=True, exist_ok=True)
                part = kept.with_name(f".{kept.name}.{os.getpid()}")
                shutil.copy(target, part)
                part.replace(kept)
            return ctypes.CDLL(str(target))
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"{named} failed: {error}") from error


def _kept(source: Path, command: list[str]) -> Path:
    """Where the library lies for the next start, under what it is made of and the processor it is made for."""
    made = "\n".join([source.read_text(), *command, *_processor()])
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return home / "ramify" / f"operators-{hashlib.sha256(made.encode()).hexdigest()[:16]}.so"


def _processor() -> list[str]:
    """What `-march=native` looks at."""
    with contextlib.suppress(OSError):
        told = Path("/proc/cpuinfo").read_text().splitlines()
        return sorted({line for line in told if line.startswith(("flags", "model", "Features", "CPU"))})
    return [platform.machine(), platform.processor()]


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
