"""A forward with fewer operators for Llama-like models, with the weights of the Hugging Face model.

On a small model a decode step is spent between the operators, not in them: a Llama layer of transformers is about sixty
operators, of which seven are matrix products. Here it is about twenty: projections that read the same input are one
product (their weights become views of one tensor, so nothing is copied and a weight update reaches both), queries and
keys are rotated together, and residuals are added by the product. Since this is a second implementation of the model's
forward, `build_fused_model` runs both on a few tokens and raises ModelUnsupported if their logits differ. Then, as any
other model, it runs its own code.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ramify.core.errors import ModelUnsupported
from ramify.model.kernels.chunk_plan import CHUNK_SIZE
from ramify.model.kernels.cpu import CLibraryUnavailable, build_cpu_ops
from ramify.model.kernels.decoder_ops import (
    AdapterWeights,
    DecoderOps,
    DecoderSizes,
    DecoderWeights,
    LayerWeights,
    Matrix,
)
from ramify.model.kernels.paged_attention import AttentionMetadata, AttentionTile, KVPool
from ramify.model.kernels.quantization import QuantizedMatrix
from ramify.model.kernels.recurrent_ops import DeltaRuleWeights, RecurrentWeights, ShortConvWeights
from ramify.model.kernels.state_pool import StatePool, StateSpec
from ramify.model.lora import LoraLinear, set_matrix
from ramify.model.vision import build_image_inputs

# Pre-norm, rotary in halves or not at all, gated SiLU. The three positions of a text token of Qwen3-VL are equal, so it
# is rotated as in Qwen3; steps with image tokens run `build_image_forward`.
SUPPORTED_MODEL_TYPES = {"llama", "mistral", "qwen2", "qwen3", "qwen3_vl_text", "qwen3_5_text", "lfm2"}
SUPPORTED_MODEL_TYPES |= {"granite", "phi3", "seed_oss", "smollm3"}
ZERO_CENTERED_NORM_TYPES = {"qwen3_5_text"}  # their norms multiply by 1 + weight
# The names that the families have for the linear maps of a layer, in the order in which they become one product.
INPUT_NAMES = ("q_proj", "k_proj", "v_proj", "qkv_proj")
INPUT_NAMES += ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj")  # of recurrent layers
OUTPUT_NAMES = ("o_proj", "out_proj")
GATE_UP_NAMES, DOWN_NAMES = ("gate_proj", "up_proj", "w1", "w3", "gate_up_proj"), ("down_proj", "w2")
MAX_DIFFERENCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # relative ones of logits, for `_check_logits`
MAX_PRODUCT_ERROR = 0.01  # in bfloat16, rounding makes it 0.002
ForwardFn = Callable[[Tensor, Tensor, AttentionMetadata, Tensor], Tensor]
"""(ids, positions, attention metadata, logit rows) -> logits of these rows, [logit rows, vocab]."""


class FusedModel:
    """A `ForwardFn` for a supported model. `ops` are the operators that it uses."""

    def __init__(self, module: Any) -> None:
        config, core, head = module.config.get_text_config(), module.get_decoder(), module.lm_head
        norm, mlp = _get_part(core, "norm", "embedding_norm"), _get_mlp(core.layers[0])
        attention = next(layer.self_attn for layer in core.layers if hasattr(layer, "self_attn"))
        embedding, layers = core.embed_tokens.weight, [_fuse_layer(layer) for layer in core.layers]
        # A norm does not depend on the scale of what it reads, except for eps. So instead of what layers add to the
        # residuals, the embeddings are scaled, by the inverse.
        residual_scale = getattr(config, "residual_multiplier", 1.0)
        qkv_width = sum(linear.out_features for linear in _list_parts(attention, *INPUT_NAMES))
        linears = [module for module in core.layers.modules() if isinstance(module, LoraLinear)]
        self.sizes = DecoderSizes(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            hidden=config.hidden_size,
            inner=_get_part(mlp, *DOWN_NAMES).in_features,
            eps=_get_part(config, "rms_norm_eps", "norm_eps") / residual_scale**2,
            scaling=attention.scaling,
            adapter_rank=max((len(adapter.up) for layer in layers for adapter in layer.adapters), default=0),
            adapter_scaling=linears[0].scaling if linears else 0.0,
            norm_offset=1.0 if config.model_type in ZERO_CENTERED_NORM_TYPES else 0.0,
            has_gate=qkv_width > (config.num_attention_heads + 2 * config.num_key_value_heads) * attention.head_dim,
            embedding_scale=getattr(config, "embedding_multiplier", 1.0) / residual_scale,
            logit_scale=1.0 / getattr(config, "logits_scaling", 1.0),
        )
        all_positions = torch.arange(config.max_position_embeddings, device=embedding.device).unsqueeze(0)
        if hasattr(core.rotary_emb, "mrope_section"):
            all_positions = all_positions.expand(3, 1, -1)  # transformers 5.17 does not expand them itself
        cos, sin = (part[0] for part in core.rotary_emb(embedding[:1].unsqueeze(0), position_ids=all_positions))
        half = cos.shape[-1] // 2
        rope_table = torch.cat((cos, -sin[:, :half], sin[:, half:]), -1)
        self.weights = DecoderWeights(embedding, rope_table, norm.weight, head.weight, head.bias, layers)
        self.ops = DecoderOps(self.sizes)

    def __call__(self, ids: Tensor, positions: Tensor, attn_metadata: AttentionMetadata, logit_rows: Tensor) -> Tensor:
        """Return the logits of `logit_rows`, [len(logit_rows), vocab]."""
        return self.ops.forward(self.weights, ids, positions, attn_metadata, logit_rows)


def build_fused_model(
    module: Any, *, planned: bool = False, state_specs: Sequence[StateSpec] = ()
) -> FusedModel | None:
    """Return the fused forward of a model, or None if the model is of another type.

    Raises ModelUnsupported if its logits differ from the logits of the model's own code. If `planned`, its steps have
    attention plans, and it runs the kernels for CUDA. `state_specs` are the states of its recurrent layers.
    """
    if not can_fuse(module.config.get_text_config()):
        return None
    mlp = _get_mlp(module.get_decoder().layers[0])
    if any(linear.bias is not None for linear in _list_parts(mlp, *GATE_UP_NAMES, *DOWN_NAMES)):
        return None
    # Not inference mode: concatenated weights stay ordinary tensors, to be updated later.
    with torch.no_grad(), _random_adapters(module):
        num_tokens = 8
        if planned and state_specs:  # the first part has two chunks of recurrent layers, the second continues them
            num_tokens = min(2 * CHUNK_SIZE, module.config.get_text_config().max_position_embeddings)
        # The model's own code does not keep states between chunks.
        num_chunks = 1 if state_specs else 3
        expected = _run_check_sequence(module, build_hf_forward(module), num_tokens, num_chunks=num_chunks)
        fused = FusedModel(module)
        if planned:
            from ramify.model.kernels.cuda.decoder import CudaDecoderOps  # needs Triton

            fused.ops = CudaDecoderOps(fused.sizes, "Triton")
            _check_products(fused.weights.layers)
        elif state_specs:
            fused.ops = DecoderOps(fused.sizes, "torch (recurrent layers)")
        else:
            try:
                fused.ops = build_cpu_ops(fused.sizes, fused.weights)
                _check_logits(expected, _run_check_sequence(module, fused))
                return fused
            except CLibraryUnavailable as error:
                fused.ops = DecoderOps(fused.sizes, f"torch ({error})")
            except ModelUnsupported as error:
                fused.ops = DecoderOps(fused.sizes, f"torch (operators in C: {error})")
        actual = _run_check_sequence(module, fused, num_tokens, state_specs=state_specs, planned=planned)
        _check_logits(expected, actual)
        return fused


def can_fuse(text_config: Any) -> bool:
    """Return whether the fused forward computes a model, by its config."""
    return (
        text_config.model_type in SUPPORTED_MODEL_TYPES
        and getattr(text_config, "hidden_act", "silu") == "silu"
        and not _has_sliding_window(text_config)
        and not _has_dynamic_rope(text_config)
    )


@contextmanager
def _random_adapters(module: nn.Module) -> Generator[None]:
    """Run the block with random adapters: a wrong product would not show with zeros, with which they start."""
    linears = [child for child in module.modules() if isinstance(child, LoraLinear)]
    saved = [linear.adapter_up.clone() for linear in linears]
    for seed, linear in enumerate(linears):
        generator = torch.Generator(linear.adapter_up.device).manual_seed(seed)
        linear.adapter_up.normal_(std=0.02, generator=generator)
    try:
        yield
    finally:
        for linear, up in zip(linears, saved):
            linear.adapter_up.copy_(up)


def build_hf_forward(module: Any) -> ForwardFn:
    """Return the model's own forward as a `ForwardFn`."""

    def forward(ids: Tensor, positions: Tensor, attn_metadata: AttentionMetadata, logit_rows: Tensor) -> Tensor:
        attn_metadata.last_layer = -1
        return module(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logit_rows,
            attn_metadata=attn_metadata,
        ).logits[0]

    return forward


def build_image_forward(module: Any) -> Callable[[Tensor, Tensor, AttentionMetadata, Tensor, Tensor, Tensor], Tensor]:
    """Return the forward of a vision-language model for rows with image tokens.

    It takes the arguments of a `ForwardFn`, the rows of the image tokens, and their features. Positions are [3, rows]
    if image tokens lie on a grid.
    """

    def forward(
        ids: Tensor,
        positions: Tensor,
        attn_metadata: AttentionMetadata,
        logit_rows: Tensor,
        image_rows: Tensor,
        features: Tensor,
    ) -> Tensor:
        attn_metadata.last_layer = -1
        hidden = module.get_decoder()(
            **build_image_inputs(module, ids.unsqueeze(0), image_rows, features),
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            attn_metadata=attn_metadata,
        ).last_hidden_state
        return module.get_output_embeddings()(hidden[0].index_select(0, logit_rows))

    return forward


def _has_sliding_window(config: Any) -> bool:
    return "sliding_attention" in (getattr(config, "layer_types", None) or ()) or bool(
        getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    )


def _has_dynamic_rope(config: Any) -> bool:
    """Return whether the angles depend on the length of the sequence, so that no table can hold them."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope")


def _get_part(module: Any, *names: str) -> Any:
    """Return the attribute that has one of these names. Raises ModelUnsupported if there is none."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ModelUnsupported(f"{type(module).__name__} has none of {', '.join(names)}")


def _get_mlp(layer: Any) -> Any:
    return _get_part(layer, "mlp", "feed_forward")


def _list_parts(module: Any, *names: str) -> list[Any]:
    """Return the attributes of these names that a module has."""
    return [getattr(module, name) for name in names if hasattr(module, name)]


def _fuse_layer(layer: Any) -> LayerWeights:
    mlp, mixer = _get_mlp(layer), _get_part(layer, "self_attn", "linear_attn", "conv")
    inputs, output = _list_parts(mixer, *INPUT_NAMES), _get_part(mixer, *OUTPUT_NAMES)
    gate_up_linears, down = _list_parts(mlp, *GATE_UP_NAMES), _get_part(mlp, *DOWN_NAMES)
    qkv, qkv_bias = _concat_weights(*inputs)
    head_norms = _list_parts(mixer, "q_norm", "q_layernorm", "k_norm", "k_layernorm")
    q_norm, k_norm = (norm.weight for norm in head_norms) if head_norms else (None, None)
    return LayerWeights(
        norm=_get_part(layer, "input_layernorm", "operator_norm").weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=q_norm,
        k_norm=k_norm,
        out=_concat_weights(output)[0],
        out_bias=output.bias,
        mlp_norm=_get_part(layer, "post_attention_layernorm", "ffn_norm").weight,
        gate_up=_concat_weights(*gate_up_linears)[0],
        down=_concat_weights(down)[0],
        qkv_adapter=_concat_adapters(*inputs),
        out_adapter=_concat_adapters(output),
        gate_up_adapter=_concat_adapters(*gate_up_linears),
        down_adapter=_concat_adapters(down),
        recurrent=None if hasattr(layer, "self_attn") else _read_recurrent(mixer),
        has_rope=bool(getattr(mixer, "use_rope", True)),
    )


def _read_recurrent(mixer: Any) -> RecurrentWeights:
    if not hasattr(mixer, "A_log"):
        return ShortConvWeights(mixer.conv.weight.squeeze(1), mixer.conv.bias)
    return DeltaRuleWeights(
        conv=mixer.conv1d.weight.squeeze(1),
        log_rate=mixer.A_log,
        step_bias=mixer.dt_bias,
        norm=mixer.norm.weight,
        key_heads=mixer.num_k_heads,
        key_dim=mixer.head_k_dim,
    )


def _concat_adapters(*linears: nn.Linear) -> AdapterWeights | None:
    """Return the adapters of `linears` as one adapter of the summed rank; their own become views of it."""
    adapted = [linear for linear in linears if isinstance(linear, LoraLinear)]
    if not adapted:
        return None
    weight, rank = adapted[0].adapter_down, len(adapted[0].adapter_down)
    down = weight.new_zeros(linears[0].in_features, rank * len(adapted))
    up = weight.new_zeros(rank * len(adapted), sum(linear.out_features for linear in linears))
    first_column = 0
    for linear in linears:
        if isinstance(linear, LoraLinear):
            part = slice(start := rank * adapted.index(linear), start + rank)
            linear.set_adapter(down[:, part].t(), up[part, first_column : first_column + linear.out_features].t())
        first_column += linear.out_features
    return AdapterWeights(down, up)


def _concat_weights(*linears: nn.Linear) -> tuple[Matrix, Tensor | None]:
    """Return the weights of `linears` as one matrix, and their biases; their own become views of these.

    The matrix is quantized if all of them are.
    """
    quantized = [linear.quantized for linear in linears if isinstance(linear, LoraLinear) and linear.quantized]
    if len(quantized) == len(linears):
        matrix = QuantizedMatrix(*(torch.cat(parts) for parts in zip(*quantized)))
    else:
        weights = [linear.get_matrix() if isinstance(linear, LoraLinear) else linear.weight for linear in linears]
        matrix = torch.cat(weights).t()
        if matrix.dtype == torch.float32:  # a fifth faster on CPU with few rows; bfloat16 prefers [out, in] in memory
            matrix = matrix.contiguous()
    bias = torch.cat([linear.bias for linear in linears]) if linears[0].bias is not None else None
    start = 0
    for linear in linears:
        part = slice(start, start := start + linear.out_features)
        if isinstance(matrix, Tensor):
            weight = matrix[:, part].t()
        else:
            weight = QuantizedMatrix(*(tensor[part] for tensor in matrix))
        set_matrix(linear, weight)
        if bias is not None:
            linear.bias = nn.Parameter(bias[part], requires_grad=False)
    return matrix, bias


def _run_check_sequence(
    module: Any,
    forward: ForwardFn,
    num_tokens: int = 8,
    *,
    num_chunks: int = 3,
    state_specs: Sequence[StateSpec] = (),
    planned: bool = False,
) -> Tensor:
    """Return the logits of a short sequence that is computed in one or three chunks, the last of one token."""
    config, weight = module.config.get_text_config(), module.get_input_embeddings().weight
    device, states = weight.device, StatePool(state_specs, 1, weight.device) if state_specs else None
    head_dim = next(layer.self_attn.head_dim for layer in module.get_decoder().layers if hasattr(layer, "self_attn"))
    pool = KVPool(config.num_hidden_layers, 1, num_tokens, config.num_key_value_heads, head_dim, weight.dtype, device)
    ids = (torch.arange(num_tokens, device=device) * 7919 + 13) % config.vocab_size
    block_table = torch.zeros(1, dtype=torch.long, device=device)
    logits: list[Tensor] = []
    bounds = (0, num_tokens - 1 - num_tokens // 3, num_tokens - 1, num_tokens) if num_chunks == 3 else (0, num_tokens)
    for start, stop in pairwise(bounds):
        positions = torch.arange(start, stop, device=device)
        if planned:
            from ramify.model.kernels.cuda.paged_attention import plan_one_sequence  # needs Triton

            metadata = plan_one_sequence(pool, config.num_attention_heads, start, stop, states)
        else:
            tile = AttentionTile(0, stop - start, 1, stop - start, block_table, positions.unsqueeze(0))
            tile.state_slots = block_table
            metadata = AttentionMetadata(pool, positions, [tile], states=states)
        rows = torch.arange(stop - start, device=device)
        logits.append(forward(ids[start:stop], positions, metadata, rows))
    return torch.cat(logits)


def _check_products(layers: Sequence[LayerWeights]) -> None:
    """Raise ModelUnsupported if products with quantized matrices are wrong, for one matrix of each shape.

    The check sequence has too few rows for most of the kernels that compute them.
    """
    from ramify.model.kernels.cuda.quantized_products import measure_error  # needs Triton

    matrices = (matrix for layer in layers for matrix in layer.matrices if isinstance(matrix, QuantizedMatrix))
    for matrix in {(matrix.codes.shape, matrix.codes.dtype): matrix for matrix in matrices}.values():
        if not (error := measure_error(matrix)) <= MAX_PRODUCT_ERROR:
            sizes = f"{len(matrix.codes)} x {matrix.num_columns}"
            raise ModelUnsupported(f"products with quantized matrices of {sizes} differ by {error:.2g}")


def _check_logits(expected: Tensor, actual: Tensor) -> None:
    """Raise ModelUnsupported if logits differ by more than rounding.

    The difference is relative to the norm of all logits. In bfloat16, rounding alone can make it 4 % in a deep model
    with random weights.
    """
    limit = MAX_DIFFERENCES[expected.dtype]
    difference = float((expected.float() - actual.float()).norm() / expected.float().norm().clamp_min(1e-30))
    if not difference <= limit:  # rejects NaN too
        raise ModelUnsupported(f"logits differ by {difference:.2g} from the model's own code, {limit} is allowed")
