"""A step of a decoder, and the parts it consists of, twice.

`Operators` are torch calls, for every device and type. On a small model those calls cost as much as the products in
them, so for one CPU thread in float32 there is `Compiled`: the same in C, one call a step, compiled for the model's
shape when it is loaded (half a second). Its matrix products are those of torch's own library, and its attention reads
keys and values where they lie in the pool instead of gathering them. Without a C compiler, or if anything about it
fails, the torch calls do, and `note` says why.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ramify.model.native import Unavailable, borrowed, library, typed
from ramify.model.paged import Step, Tile, attend_tile, write

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


@dataclass(frozen=True, slots=True)
class Model:
    """What lies around the layers, and they."""

    embedding: Tensor  # [vocab, hidden]
    turns: Tensor  # [positions, 2 * head_dim], cosines and sines; half of the sines negated for `roll`
    norm: Tensor
    head: Tensor  # [vocab, hidden]
    head_bias: Tensor | None
    layers: Sequence[Layer]


class Operators:
    """`forward` is a step; in it a layer is `begin`, `attend`, `finish`."""

    def __init__(self, sizes: Sizes, note: str = "torch") -> None:
        self.sizes, self.note = sizes, note

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Root mean square in float32, as the models do it."""
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, weight.shape, weight, self.sizes.eps)
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(hidden.shape[-1]).add_(self.sizes.eps).rsqrt_()
        return (hidden * scale).to(hidden.dtype).mul_(weight)

    def product(self, rows: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
        """[rows, in] times [in, out], on top of `onto` if there is something."""
        return torch.mm(rows, weight) if onto is None else torch.addmm(onto, rows, weight)

    def forward(self, model: Model, ids: Tensor, positions: Tensor, step: Step, rows: Tensor) -> Tensor:
        """Logits of `rows`, an ascending part of the step's, [len(rows), vocab]."""
        hidden, turns = F.embedding(ids, model.embedding), F.embedding(positions, model.turns)
        *lower, top = model.layers
        for number, layer in enumerate(lower):
            qkv = self.begin(layer, hidden, turns, step, number)
            hidden = self.finish(layer, self.attend(qkv, step, number), hidden)
        found = self.attend(self.begin(top, hidden, turns, step, len(lower)), step, len(lower))
        if len(rows) < len(hidden):  # of the others only keys and values were wanted
            found, hidden = found.index_select(0, rows), hidden.index_select(0, rows)
        hidden = self.finish(top, found, hidden)
        logits = self.product(self.norm(hidden, model.norm), model.head.t())
        return logits if model.head_bias is None else logits + model.head_bias

    def begin(self, layer: Layer, hidden: Tensor, turns: Tensor, step: Step, number: int) -> Tensor:
        """Queries, keys and values, the first two rotated by `turns`, [rows, 2 * head_dim]; the last two stored."""
        heads, kv_heads, head_dim = self.sizes.heads, self.sizes.kv_heads, self.sizes.head_dim
        qkv = self.product(self.norm(hidden, layer.norm), layer.qkv)
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
        hidden = self.product(found, layer.out, hidden)
        if layer.out_bias is not None:
            hidden += layer.out_bias
        gate, up = self.product(self.norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
        return self.product(F.silu(gate).mul_(up), layer.down, hidden)

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

    def __init__(self, sizes: Sizes, model: Model) -> None:
        super().__init__(sizes, "compiled")
        self.row, self.width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, sizes.heads * sizes.head_dim
        shape = (f"{name.upper()}={_literal(getattr(sizes, name))}" for name in Sizes.__slots__)
        made = library(Path(__file__).with_name("operators.c"), *shape, f"ROWS={CHUNK}")
        self._sgemm = borrowed("sgemm_")
        self._norm = typed(made.norm_rows, "pppi")
        self._begin = typed(made.begin, "pppppppi")
        self._attend = typed(made.attend, "pppiippipi")
        self._finish = typed(made.finish, "ppppi")
        self._forward = typed(made.forward, "pppiipppppiippiipip")
        self._draw = typed(made.draw, "piipppp")
        self._tables = {id(layer): _pointers(layer) for layer in model.layers}
        layers = (ctypes.c_void_p * len(self._tables))(*map(ctypes.addressof, self._tables.values()))
        self._model = _pointers(model), layers, len(layers), len(model.head)
        self._chances: Chances | None = None

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        self._norm(hidden.data_ptr(), weight.data_ptr(), out.data_ptr(), hidden.shape[0])
        return out

    def forward(self, model: Model, ids: Tensor, positions: Tensor, step: Step, rows: Tensor) -> Tensor:
        if len(step.tiles) > 1 or not _answerable(step, step.tiles[0]):
            return super().forward(model, ids, positions, step, rows)
        logits = model.head.new_empty(len(rows), len(model.head))
        begins = step.pool.addresses, ids.data_ptr(), positions.data_ptr(), step.slots.data_ptr()
        ends = len(ids), rows.data_ptr(), len(rows), logits.data_ptr()
        self._forward(self._sgemm, *self._model, *begins, *self._seen(step, step.tiles[0]), *ends)
        return logits

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
        if self._chances is None or (self._chances.temperatures, self._chances.seeds) != (temperatures, seeds):
            self._chances = Chances(temperatures, seeds)  # most steps ask for the same as the one before
        chances = self._chances
        chances.positions[:] = positions
        self._draw(logits.data_ptr(), *logits.shape, *chances.addresses)
        return chances.tokens.tolist(), chances.logprobs.tolist()


class Chances:
    """What tokens are drawn by, and those that are drawn, where C reads and writes them."""

    def __init__(self, temperatures: list[float], seeds: list[int]) -> None:
        self.temperatures, self.seeds = temperatures, seeds
        heat, given = np.array(temperatures, np.float32), np.array([seeds, seeds], np.uint64)
        self.positions = given[1]
        self.tokens, self.logprobs = np.empty(len(seeds), np.int64), np.empty(len(seeds), np.float32)
        self._kept = heat, given
        self.addresses = [array.ctypes.data for array in (heat, given, self.tokens, self.logprobs)]


def _answerable(step: Step, tile: Tile) -> bool:
    """Whether queries one by one are a good way to answer a tile."""
    return tile.queries == 1 or tile.blocks.shape[0] // tile.count * step.pool.block_size <= FEW_KEYS


def compiled(sizes: Sizes, model: Model) -> Compiled:
    """The operators in C for this model, or Unavailable, with the reason."""
    weight = model.norm
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise Unavailable(f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}")
    if torch.get_num_threads() > 1:
        raise Unavailable(f"{torch.get_num_threads()} threads")
    return Compiled(sizes, model)


def _literal(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value!r}f"


def _pointers(of: Layer | Model) -> Any:
    """Where its tensors lie, in the order of the struct in C; they are updated in place."""
    values = [getattr(of, name) for name in of.__slots__]
    addresses = [value.data_ptr() if isinstance(value, Tensor) else None for value in values]
    return (ctypes.c_void_p * len(addresses))(*addresses)
