"""The same weights in fewer operators, for the family of models that most policies belong to.

On a small model a decode step is spent between the operators, not in them: the code of a Llama layer is about sixty
operators, of which seven are matrix products. Here it is about twenty: projections that read the same input are one
product (their weights become views of one tensor, so nothing is copied and a weight update reaches both), rotation
touches queries and keys together, residuals are added by the product. This is a second spelling of a model's forward,
so it has to prove itself: `fuse` runs both on a few tokens and keeps the fused one only if they agree. Any other model
runs its own code.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ramify.model.native import CLibraryUnavailable
from ramify.model.operators import DecoderOps, DecoderSizes, DecoderWeights, LayerWeights, build_compiled_ops
from ramify.model.paged_attention import AttentionMetadata, AttentionTile, KVPool
from ramify.model.streamed import build_small_gemm_ops

SUPPORTED_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3"}  # pre-norm, rotary in halves, gated SiLU
ForwardFn = Callable[[Tensor, Tensor, AttentionMetadata, Tensor], Tensor]


class FusedModel:
    """`(ids, positions, step, rows)` → logits of `rows`, for a model of the family."""

    def __init__(self, module: Any) -> None:
        config, core, head = module.config, module.model, module.lm_head
        attention = core.layers[0].self_attn
        self.sizes = DecoderSizes(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            eps=config.rms_norm_eps,
            scaling=attention.scaling,
        )
        embedding, layers = core.embed_tokens.weight, [_fuse_layer(layer) for layer in core.layers]
        every = torch.arange(config.max_position_embeddings, device=embedding.device).unsqueeze(0)
        cos, sin = (part[0] for part in core.rotary_emb(embedding[:1].unsqueeze(0), position_ids=every))
        half = self.sizes.head_dim // 2
        turns = torch.cat((cos, -sin[:, :half], sin[:, half:]), -1)
        self.weights = DecoderWeights(embedding, turns, core.norm.weight, head.weight, head.bias, layers)
        self.ops = DecoderOps(self.sizes)

    def __call__(self, ids: Tensor, positions: Tensor, attn_metadata: AttentionMetadata, logit_rows: Tensor) -> Tensor:
        """Logits of `rows`, [len(rows), vocab]."""
        return self.ops.forward(self.weights, ids, positions, attn_metadata, logit_rows)


def build_fused_model(module: Any) -> FusedModel | None:
    """The fused forward of this model, or None if it is of another family or does not agree with its own code."""
    config = module.config
    if (
        config.model_type not in SUPPORTED_MODEL_TYPES
        or config.hidden_act != "silu"
        or _has_sliding_window(config)
        or _has_dynamic_rope(config)
    ):
        return None
    plain = [module.model.layers[0].mlp.gate_proj.bias, module.model.layers[0].mlp.down_proj.bias]
    if any(bias is not None for bias in plain):
        return None
    with torch.no_grad():  # not inference mode: joined weights stay ordinary tensors, to be updated later
        expected = _run_check_sequence(module, build_hf_forward(module))
        fused = FusedModel(module)
        try:
            native = build_small_gemm_ops if module.dtype == torch.bfloat16 else build_compiled_ops
            fused.ops = native(fused.sizes, fused.weights)
            if _logits_match(expected, _run_check_sequence(module, fused)):
                return fused
            why = "those in C do not agree with the model's own code"
        except CLibraryUnavailable as reason:
            why = str(reason)
        fused.ops = DecoderOps(fused.sizes, f"torch ({why})")
        return fused if _logits_match(expected, _run_check_sequence(module, fused)) else None


def build_hf_forward(module: Any) -> ForwardFn:
    """The model's own forward, in the form the engine calls."""

    def forward(ids: Tensor, positions: Tensor, attn_metadata: AttentionMetadata, logit_rows: Tensor) -> Tensor:
        row, where, attn_metadata.last_layer = ids.unsqueeze(0), positions.unsqueeze(0), -1
        return module(
            input_ids=row, position_ids=where, use_cache=False, logits_to_keep=logit_rows, step=attn_metadata
        ).logits[0]

    return forward


def _has_sliding_window(config: Any) -> bool:
    return "sliding_attention" in (getattr(config, "layer_types", None) or ()) or bool(
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    )


def _has_dynamic_rope(config: Any) -> bool:
    """Whether angles depend on the length of the sequence, so that there is no table of them."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope")


def _fuse_layer(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, bias = _concat_weights(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up, _ = _concat_weights(mlp.gate_proj, mlp.up_proj)
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return LayerWeights(
        norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=bias,
        q_norm=None if norms[0] is None else norms[0].weight,
        k_norm=None if norms[1] is None else norms[1].weight,
        out=_concat_weights(attention.o_proj)[0],
        out_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        down=_concat_weights(mlp.down_proj)[0],
    )


def _concat_weights(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weights of `parts` as one tensor [in, out], of which their own become views."""
    weight = torch.cat([part.weight for part in linears]).t()
    if (
        weight.dtype == torch.float32
    ):  # a fifth faster on CPU with few rows; bfloat16 products prefer [out, in] in memory
        weight = weight.contiguous()
    bias = torch.cat([part.bias for part in linears]) if linears[0].bias is not None else None
    start = 0
    for part in linears:
        stop = start + part.weight.shape[0]
        part.weight = nn.Parameter(weight[:, start:stop].t(), requires_grad=False)
        if bias is not None:
            part.bias = nn.Parameter(bias[start:stop], requires_grad=False)
        start = stop
    return weight, bias


def _run_check_sequence(module: Any, forward: ForwardFn, num_tokens: int = 8) -> Tensor:
    """Logits of a short made-up sequence, its tokens together, a few, and one at a time."""
    config, weight = module.config, module.get_input_embeddings().weight
    device = weight.device
    layers, heads = config.num_hidden_layers, config.num_key_value_heads
    pool = KVPool(layers, 1, num_tokens, heads, module.model.layers[0].self_attn.head_dim, weight.dtype, device)
    ids = (torch.arange(num_tokens, device=device) * 7919 + 13) % config.vocab_size
    block = torch.zeros(1, dtype=torch.long, device=device)
    found: list[Tensor] = []
    for start, stop in ((0, num_tokens - 3), (num_tokens - 3, num_tokens - 1), (num_tokens - 1, num_tokens)):
        positions = torch.arange(start, stop, device=device)
        tile = AttentionTile(0, stop - start, 1, stop - start, block, positions.unsqueeze(0))
        rows = torch.arange(stop - start, device=device)
        found.append(forward(ids[start:stop], positions, AttentionMetadata(pool, positions, [tile]), rows))
    return torch.cat(found)


def _logits_match(expected: Tensor, actual: Tensor) -> bool:
    limit = 1e-4 if expected.dtype == torch.float32 else 5e-2
    scale = expected.float().abs().max().clamp_min(1.0)
    return bool((expected.float() - actual.float()).abs().max() <= limit * scale)
