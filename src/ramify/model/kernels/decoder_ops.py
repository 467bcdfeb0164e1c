"""The operators of one decoder step: the interface, and its plain PyTorch implementation.

`DecoderOps` runs on every device and dtype, and is the reference for the implementations in C below
`ramify.model.kernels.cpu`, which override some of its methods. `ramify.model.fused_model` picks the implementation for
a model; `description` names it, for the log line at the start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ramify.model.kernels.paged_attention import AttentionMetadata, write_kv
from ramify.model.kernels.quantization import QuantizedMatrix, dequantize_matrix
from ramify.model.kernels.recurrent_ops import RecurrentWeights, compute_recurrent_layer

Matrix = Tensor | QuantizedMatrix
"""A matrix [in, out], or a quantized one, which is [out, in]."""


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes of a decoder, by the names that they have in C (in upper case)."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    eps: float
    scaling: float
    adapter_rank: int = 0  # the largest rank of the adapters beside a product
    adapter_scaling: float = 0.0
    norm_offset: float = 0.0  # added to the weights of norms
    has_gate: bool = False  # whether a query is followed by a gate for the output of its head
    embedding_scale: float = 1.0
    logit_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The adapters beside a product: `down` is [in, rank], `up` [rank, out], with zeros between adapters of parts."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The tensors of one decoder layer, in the order of the struct in C, where no matrix is quantized.

    In a recurrent layer, which has no attention, `qkv` and `out` are the projections before and after `recurrent`.
    """

    norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    qkv_adapter: AdapterWeights | None = None
    out_adapter: AdapterWeights | None = None
    gate_up_adapter: AdapterWeights | None = None
    down_adapter: AdapterWeights | None = None
    recurrent: RecurrentWeights | None = None
    has_rope: bool = True  # whether queries and keys are rotated

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices of the products that all layers have."""
        return [self.qkv, self.out, self.gate_up, self.down]

    @property
    def adapters(self) -> list[AdapterWeights]:
        """The adapters that the layer has."""
        adapters = (self.qkv_adapter, self.out_adapter, self.gate_up_adapter, self.down_adapter)
        return [adapter for adapter in adapters if adapter is not None]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The tensors outside the layers, in the order of the struct in C, and the layers."""

    embedding: Tensor  # [vocab, hidden]
    rope_table: Tensor  # [positions, 2 * rotated columns], cosines and sines; half of the sines negated for `roll`
    norm: Tensor
    head: Tensor  # [vocab, hidden]
    head_bias: Tensor | None
    layers: Sequence[LayerWeights]


class DecoderOps:
    """One decoder step in PyTorch. `forward` runs it; each layer is `project_qkv`, `attend`, `project_out_and_mlp`.

    In a recurrent layer `apply_recurrent_layer` takes the place of the first two. `description` says in a few words
    which implementation this is, and why not a faster one.
    """

    def __init__(self, sizes: DecoderSizes, description: str = "torch") -> None:
        self.sizes, self.description = sizes, description

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return the RMSNorm of `hidden`, computed in float32."""
        if self.sizes.norm_offset:
            weight = weight.float() + self.sizes.norm_offset
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, weight.shape, weight, self.sizes.eps)
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(hidden.shape[-1]).add_(self.sizes.eps).rsqrt_()
        normed = hidden * scale
        return (normed * weight).to(hidden.dtype) if self.sizes.norm_offset else normed.to(hidden.dtype).mul_(weight)

    def matmul(self, rows: Tensor, weight: Matrix, addend: Tensor | None = None) -> Tensor:
        """Return `rows` [rows, in] times a matrix, plus `addend` if given."""
        weight = dequantize_matrix(weight).t() if isinstance(weight, QuantizedMatrix) else weight
        return torch.mm(rows, weight) if addend is None else torch.addmm(addend, rows, weight)

    def add_adapter(self, product: Tensor, rows: Tensor, adapter: AdapterWeights | None) -> Tensor:
        """Add the adapter's product with `rows` to a product, in place."""
        if adapter is None:
            return product
        return product.addmm_(torch.mm(rows, adapter.down), adapter.up, alpha=self.sizes.adapter_scaling)

    def forward(
        self,
        weights: DecoderWeights,
        ids: Tensor,
        positions: Tensor,
        attn_metadata: AttentionMetadata,
        logit_rows: Tensor,
    ) -> Tensor:
        """Return the logits of `logit_rows`, which ascend, [len(logit_rows), vocab]."""
        hidden = scale_rows(F.embedding(ids, weights.embedding), self.sizes.embedding_scale)
        rope = F.embedding(positions, weights.rope_table)
        for index, layer in enumerate(weights.layers):
            if layer.recurrent is None:
                kv_index = attn_metadata.pool.layer_index[index]
                qkv = self.project_qkv(layer, hidden, rope, attn_metadata, kv_index)
                attn_output = self.attend(qkv, attn_metadata, kv_index)
            else:
                attn_output = self.apply_recurrent_layer(layer, layer.recurrent, hidden, attn_metadata, index)
            is_last = index == len(weights.layers) - 1
            if is_last and len(logit_rows) < len(hidden):  # the other rows only had to write keys and values
                attn_output, hidden = attn_output.index_select(0, logit_rows), hidden.index_select(0, logit_rows)
            hidden = self.project_out_and_mlp(layer, attn_output, hidden)
        normed = scale_rows(self.norm(hidden, weights.norm), self.sizes.logit_scale)
        logits = self.matmul(normed, weights.head.t())
        return logits if weights.head_bias is None else logits + weights.head_bias

    def project_qkv(
        self, layer: LayerWeights, hidden: Tensor, rope: Tensor, attn_metadata: AttentionMetadata, layer_index: int
    ) -> Tensor:
        """Return queries, keys and values, [rows, qkv], and write keys and values to the cache.

        The first columns of queries and keys are rotated by `rope`, [rows, 2 * columns].
        """
        sizes, kv_width = self.sizes, 2 * self.sizes.kv_heads * self.sizes.head_dim
        normed = self.norm(hidden, layer.norm)
        qkv = self.add_adapter(self.matmul(normed, layer.qkv), normed, layer.qkv_adapter)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        query, key = self._get_queries(qkv), self._get_keys(qkv)
        if layer.q_norm is not None and layer.k_norm is not None:
            for part, weight in ((query, layer.q_norm), (key, layer.k_norm)):
                part.copy_(self.norm(part.reshape(-1, part.shape[-1]), weight).view(part.shape))
        cos, sin = rope.unsqueeze(1).chunk(2, -1)
        # Without gates between them, queries and keys are one product.
        parts = (query, key) if sizes.has_gate else (qkv[:, : -kv_width // 2].view(len(qkv), -1, sizes.head_dim),)
        for part in parts if layer.has_rope else ():
            rotated = part[..., : cos.shape[-1]]
            torch.addcmul(rotated * cos, rotated.roll(cos.shape[-1] // 2, -1), sin, out=rotated)
        write_kv(attn_metadata, layer_index, qkv[:, -kv_width:])
        return qkv

    def attend(self, qkv: Tensor, attn_metadata: AttentionMetadata, layer_index: int) -> Tensor:
        """Return the attention of the queries to the cache, [rows, heads * head_dim]."""
        query = self._get_queries(qkv)
        if not self.sizes.has_gate:
            return attn_metadata.attend(query, layer_index, self.sizes.scaling).flatten(1)
        attn_output = attn_metadata.attend(query.contiguous(), layer_index, self.sizes.scaling)
        return (attn_output * self._get_gates(qkv).sigmoid()).flatten(1)

    def apply_recurrent_layer(
        self,
        layer: LayerWeights,
        recurrent: RecurrentWeights,
        hidden: Tensor,
        attn_metadata: AttentionMetadata,
        layer_index: int,
    ) -> Tensor:
        """Return what the output projection of a recurrent layer gets, [rows, channels]; its states are changed."""
        normed = self.norm(hidden, layer.norm)
        projected = self.add_adapter(self.matmul(normed, layer.qkv), normed, layer.qkv_adapter)
        if layer.qkv_bias is not None:
            projected += layer.qkv_bias
        states = attn_metadata.states
        assert states is not None
        outputs: list[Tensor] = []
        for tile in attn_metadata.tiles:
            rows = projected[tile.start : tile.stop]
            outputs.append(compute_recurrent_layer(recurrent, rows, tile, states, layer_index, self.sizes.eps))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def project_out_and_mlp(self, layer: LayerWeights, attn_output: Tensor, hidden: Tensor) -> Tensor:
        """Return `hidden` plus the output projection of attention, plus the MLP of that sum."""
        hidden = self.add_adapter(self.matmul(attn_output, layer.out, hidden), attn_output, layer.out_adapter)
        if layer.out_bias is not None:
            hidden += layer.out_bias
        normed = self.norm(hidden, layer.mlp_norm)
        gate, up = self.add_adapter(self.matmul(normed, layer.gate_up), normed, layer.gate_up_adapter).chunk(2, -1)
        inner = F.silu(gate).mul_(up)
        return self.add_adapter(self.matmul(inner, layer.down, hidden), inner, layer.down_adapter)

    def _get_queries(self, qkv: Tensor) -> Tensor:
        sizes, width = self.sizes, self.sizes.head_dim * (2 if self.sizes.has_gate else 1)
        return qkv[:, : sizes.heads * width].view(-1, sizes.heads, width)[..., : sizes.head_dim]

    def _get_gates(self, qkv: Tensor) -> Tensor:
        heads, head_dim = self.sizes.heads, self.sizes.head_dim
        return qkv[:, : 2 * heads * head_dim].view(-1, heads, 2 * head_dim)[..., head_dim:]

    def _get_keys(self, qkv: Tensor) -> Tensor:
        kv_heads, head_dim = self.sizes.kv_heads, self.sizes.head_dim
        return qkv[:, -2 * kv_heads * head_dim : -kv_heads * head_dim].view(-1, kv_heads, head_dim)


def scale_rows(rows: Tensor, scale: float) -> Tensor:
    """Return `rows`, multiplied in place by `scale`."""
    return rows if scale == 1.0 else rows.mul_(scale)
