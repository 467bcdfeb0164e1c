"""The operators of a decoder step on CUDA: between two matrix products there is one kernel.

The kernels compute in float32 and round once, as the trainer's kernels do, so that their logprobs agree. Residual add
and norm are one kernel; so are the norm of the heads, their rotation and the write of keys and values to the cache; so
are the activation and its product. A layer is ten kernels, four of them matrix products.
"""
# ruff: noqa: ANN001, ANN202, N803 - of kernels, whose arguments are pointers and constants

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ramify.model.kernels.cuda.quantized_products import multiply
from ramify.model.kernels.cuda.recurrent_ops import compute_recurrent_layer
from ramify.model.kernels.decoder_ops import DecoderOps, DecoderWeights, LayerWeights, Matrix, scale_rows
from ramify.model.kernels.paged_attention import AttentionMetadata
from ramify.model.kernels.quantization import QuantizedMatrix
from ramify.model.kernels.recurrent_ops import RecurrentWeights

HEADS_PER_PROGRAM = 8
ACTIVATION_BLOCK = 1024


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _add_norm(
    X, HIDDEN, WEIGHT, OUT,
    EPS: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Add X to HIDDEN in place, if ADD, and write the RMSNorm of the sum; OFFSET is added to the weights."""
    column = tl.arange(0, BLOCK)
    mask, offsets = column < WIDTH, tl.program_id(0).to(tl.int64) * WIDTH + column
    hidden = tl.load(HIDDEN + offsets, mask=mask, other=0.0)
    if ADD:
        x = tl.load(X + offsets, mask=mask, other=0.0)
        hidden = (x.to(tl.float32) + hidden.to(tl.float32)).to(HIDDEN.dtype.element_ty)
        tl.store(HIDDEN + offsets, hidden, mask=mask)
    hidden, weight = hidden.to(tl.float32), tl.load(WEIGHT + column, mask=mask, other=0.0).to(tl.float32) + OFFSET
    scale = tl.rsqrt(tl.sum(hidden * hidden, 0) / WIDTH + EPS)
    tl.store(OUT + offsets, (hidden * scale * weight).to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_and_cache(
    QKV, BIAS, Q_NORM, K_NORM, ROPE, POSITIONS, SLOTS, CACHE,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr,
    ROTATED: tl.constexpr, QUERY_STRIDE: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate queries in place, and keys on their way to the cache, where values go unchanged.

    The first ROTATED columns of a head are rotated, in pairs of columns of their two halves; the other columns have
    pairs, too. OFFSET is added to the weights of the norms. What all heads share is read as a matrix that repeats it
    for each head: threads need not exchange it.
    """
    row = tl.program_id(0).to(tl.int64)
    position, slot = tl.load(POSITIONS + row).to(tl.int64), tl.load(SLOTS + row).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.broadcast_to(tl.arange(0, HALF)[None, :], [TILE, HALF])
    mask = (head < HEADS + 2 * KV_HEADS) & (column < D // 2)
    is_query, is_key = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    one, other = column, column + D // 2
    if ROTATED < D:
        one = tl.where(column < ROTATED // 2, column, column + ROTATED // 2)
        other = tl.where(column < ROTATED // 2, column + ROTATED // 2, column + D // 2)
    source = tl.where(is_query, head * QUERY_STRIDE, HEADS * QUERY_STRIDE + (head - HEADS) * D)
    offsets = row * (HEADS * QUERY_STRIDE + 2 * KV_HEADS * D) + source
    first = tl.load(QKV + offsets + one, mask=mask, other=0.0)
    second = tl.load(QKV + offsets + other, mask=mask, other=0.0)
    if HAS_BIAS:
        first += tl.load(BIAS + source + one, mask=mask, other=0.0)
        second += tl.load(BIAS + source + other, mask=mask, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORM:
        q_first, q_second = _load_pairs(Q_NORM, one, other, column < D // 2)
        k_first, k_second = _load_pairs(K_NORM, one, other, column < D // 2)
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + EPS)[:, None]
        x *= scale * (tl.where(is_query, q_first, k_first) + OFFSET)
        y *= scale * (tl.where(is_query, q_second, k_second) + OFFSET)
    is_rotated, angles = column < ROTATED // 2, ROPE + position * (2 * ROTATED)
    cos_first, cos_second = _load_pairs(angles, one, other, is_rotated)
    sin_first, sin_second = _load_pairs(angles + ROTATED, one, other, is_rotated)  # the first half is negated
    if ROTATED < D:
        cos_first, cos_second = tl.where(is_rotated, cos_first, 1.0), tl.where(is_rotated, cos_second, 1.0)
    rotates = is_query | is_key
    first = tl.where(rotates, (x * cos_first + y * sin_first).to(first.dtype), first)
    second = tl.where(rotates, (y * cos_second + x * sin_second).to(second.dtype), second)
    tl.store(QKV + offsets + one, first, mask=mask & is_query)
    tl.store(QKV + offsets + other, second, mask=mask & is_query)
    target = slot * (2 * KV_HEADS * D) + (head - HEADS) * D
    tl.store(CACHE + target + one, first, mask=mask & (head >= HEADS))
    tl.store(CACHE + target + other, second, mask=mask & (head >= HEADS))


@triton.jit
def _load_pairs(X, one, other, mask):
    """Load two columns of a vector for each pair, in float32."""
    first = tl.load(X + one, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(X + other, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _gate_heads(X, QKV, row_stride, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply the output of each head in place by the sigmoid of the gate that follows its query."""
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < HEADS * D
    gate = tl.load(QKV + row * row_stride + index // D * (2 * D) + D + index % D, mask=mask, other=0.0)
    x = tl.load(X + row * (HEADS * D) + index, mask=mask, other=0.0).to(tl.float32)
    x = x / (1 + tl.exp(-gate.to(tl.float32)))
    tl.store(X + row * (HEADS * D) + index, x.to(X.dtype.element_ty), mask=mask)


@triton.jit
def _silu_product(GATE_UP, OUT, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < INNER
    gate = tl.load(GATE_UP + row * (2 * INNER) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * (2 * INNER) + INNER + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(OUT + row * INNER + column, (gate / (1 + tl.exp(-gate)) * up).to(OUT.dtype.element_ty), mask=mask)


# -- operators -------------------------------------------------------------------------------------------------------


class CudaDecoderOps(DecoderOps):
    """One decoder step with these kernels. The step's metadata must have a plan."""

    def forward(
        self,
        weights: DecoderWeights,
        ids: Tensor,
        positions: Tensor,
        attn_metadata: AttentionMetadata,
        logit_rows: Tensor,
    ) -> Tensor:
        """Return the logits of `logit_rows`, [len(logit_rows), vocab]."""
        hidden = scale_rows(F.embedding(ids, weights.embedding), self.sizes.embedding_scale)
        addend: Tensor | None = None  # to be added to `hidden`, with the next norm
        for index, layer in enumerate(weights.layers):
            normed = self._add_norm(addend, hidden, layer.norm)
            if layer.recurrent is None:
                kv_index = attn_metadata.pool.layer_index[index]
                qkv = self._project_and_cache(layer, normed, weights.rope_table, positions, attn_metadata, kv_index)
                attn_output = self.attend(qkv, attn_metadata, kv_index)
            else:
                attn_output = self._apply_recurrent_layer(layer, layer.recurrent, normed, attn_metadata, index)
            if index == len(weights.layers) - 1:  # the other rows only had to write keys and values
                attn_output, hidden = attn_output.index_select(0, logit_rows), hidden.index_select(0, logit_rows)
            addend = self.matmul(attn_output, layer.out, layer.out_bias)
            addend = self.add_adapter(addend, attn_output, layer.out_adapter)
            normed = self._add_norm(addend, hidden, layer.mlp_norm)
            gate_up = self.add_adapter(self.matmul(normed, layer.gate_up), normed, layer.gate_up_adapter)
            inner = self._multiply_silu(gate_up)
            addend = self.add_adapter(self.matmul(inner, layer.down), inner, layer.down_adapter)
        normed = scale_rows(self._add_norm(addend, hidden, weights.norm), self.sizes.logit_scale)
        return self.matmul(normed, weights.head.t(), weights.head_bias)

    def matmul(self, rows: Tensor, weight: Matrix, addend: Tensor | None = None) -> Tensor:
        """Return `rows` [rows, in] times a matrix, plus `addend` if given."""
        if not isinstance(weight, QuantizedMatrix):
            return super().matmul(rows, weight, addend)
        product = multiply(rows, weight)
        return product if addend is None else product.add_(addend)

    def _add_norm(self, addend: Tensor | None, hidden: Tensor, weight: Tensor) -> Tensor:
        """Add `addend` to `hidden` in place; return the norm of the sum."""
        out, width = torch.empty_like(hidden), hidden.shape[1]
        block = triton.next_power_of_2(width)
        _add_norm[(len(hidden),)](
            hidden if addend is None else addend, hidden, weight, out,
            EPS=self.sizes.eps, OFFSET=self.sizes.norm_offset, WIDTH=width, BLOCK=block, ADD=addend is not None,
            num_warps=min(16, max(1, block // 256)),
        )  # fmt: skip
        return out

    def _project_and_cache(
        self,
        layer: LayerWeights,
        normed: Tensor,
        rope_table: Tensor,
        positions: Tensor,
        attn_metadata: AttentionMetadata,
        index: int,
    ) -> Tensor:
        """Return the projections, with rotated queries; keys and values are in the cache."""
        sizes = self.sizes
        qkv = self.add_adapter(self.matmul(normed, layer.qkv), normed, layer.qkv_adapter)
        num_heads, query_stride = sizes.heads + 2 * sizes.kv_heads, sizes.head_dim * (2 if sizes.has_gate else 1)
        has_norm, num_rotated = layer.q_norm is not None, rope_table.shape[1] // 2 if layer.has_rope else 0
        _rotate_and_cache[(len(qkv), triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
            qkv, qkv if layer.qkv_bias is None else layer.qkv_bias,
            layer.q_norm if has_norm else qkv, layer.k_norm if has_norm else qkv,
            rope_table, positions, attn_metadata.slot_mapping, attn_metadata.pool.slots[index],
            HEADS=sizes.heads, KV_HEADS=sizes.kv_heads, D=sizes.head_dim,
            HALF=triton.next_power_of_2(sizes.head_dim // 2), TILE=HEADS_PER_PROGRAM,
            ROTATED=num_rotated, QUERY_STRIDE=query_stride, EPS=sizes.eps, OFFSET=sizes.norm_offset,
            HAS_BIAS=layer.qkv_bias is not None, HAS_NORM=has_norm, num_warps=2,
        )  # fmt: skip
        return qkv

    def attend(self, qkv: Tensor, attn_metadata: AttentionMetadata, layer_index: int) -> Tensor:
        """Return the attention of the queries to the cache, [rows, heads * head_dim]."""
        sizes = self.sizes
        attn_output = attn_metadata.attend(self._get_queries(qkv), layer_index, sizes.scaling).flatten(1)
        if sizes.has_gate:
            _gate_heads[(len(qkv), triton.cdiv(attn_output.shape[1], ACTIVATION_BLOCK))](
                attn_output, qkv, qkv.stride(0), HEADS=sizes.heads, D=sizes.head_dim, BLOCK=ACTIVATION_BLOCK
            )
        return attn_output

    def _apply_recurrent_layer(
        self,
        layer: LayerWeights,
        recurrent: RecurrentWeights,
        normed: Tensor,
        attn_metadata: AttentionMetadata,
        layer_index: int,
    ) -> Tensor:
        """Return what the output projection of a recurrent layer gets, [rows, channels]; its states are changed."""
        projected = self.add_adapter(self.matmul(normed, layer.qkv, layer.qkv_bias), normed, layer.qkv_adapter)
        states, plan = attn_metadata.states, attn_metadata.plan
        assert states is not None and plan is not None and plan.sequences is not None
        return compute_recurrent_layer(recurrent, projected, plan.sequences, states, layer_index, self.sizes.eps)

    def _multiply_silu(self, gate_up: Tensor) -> Tensor:
        rows, inner = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
        _silu_product[(rows, triton.cdiv(inner, ACTIVATION_BLOCK))](
            gate_up, out, INNER=inner, BLOCK=ACTIVATION_BLOCK, num_warps=4
        )
        return out
