"""FX graph rewrites that replace known formulas by fused operators before compilation.

A layer reaches the compiler as a graph of the operations in its code. Where these are a formula for which
`ramify.model.kernels.cuda` has an operator, the graph is rewritten to call it. A model that writes the formula in
another way is compiled unchanged.
"""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import lookup_backend
from torch.fx.passes.utils.matcher_utils import InternalMatch
from torch.fx.subgraph_rewriter import replace_pattern_with_filters
from torch.nn import functional as F  # noqa: N812

CompileBackend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
Rewrite = tuple[Callable[..., Any], Callable[..., Any], list[Callable[..., bool]]]  # pattern, replacement, conditions

MAX_GRAPHS = 64  # of one function; beyond it a layer would run uncompiled, slower and rounded in another way
KERNEL_SOURCE_HASH = sha256(
    b"".join(
        (Path(__file__).parent / "kernels" / "cuda" / name).read_bytes()
        for name in (
            "tree_attention.py",
            "scores.py",
            "delta_rule.py",
            "row_sums.py",
            "path_convolution.py",
            "activate_heads.py",
            "add_norm.py",
            "norm_rotary.py",
        )
    )
).hexdigest()
"""Part of the key of the compiler's disk cache. The key covers the graph, but not what its operators do in the backward
pass: without the hash, code that was cached for another version of the kernels would run."""


def build_compile_backend(config: Any) -> CompileBackend:
    """Return the compile backend for the layers of a model that computes forests.

    It rewrites only graphs whose inputs are on CUDA, where the operators exist. The check is made at compile time,
    because layers may still be on the CPU when the backend is chosen.
    """
    inductor: Any = lookup_backend("inductor")
    settings: Any = torch.compiler.config

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if not any(isinstance(value, Tensor) and value.device.type == "cuda" for value in inputs):
            return inductor(graph, inputs)
        import ramify.model.kernels.cuda.add_norm
        import ramify.model.kernels.cuda.norm_rotary  # noqa: F401 - the operators; need Triton, which only a torch for CUDA brings

        apply_rewrites(graph, config)
        with settings.patch(cache_key_tag=settings.cache_key_tag + KERNEL_SOURCE_HASH):
            return inductor(graph, inputs)

    return compile_graph


def compile_module(module: nn.Module, backend: CompileBackend | str) -> None:
    """Compile a module once for inputs of all lengths. Numbers such as a norm's epsilon stay constants of the graph.

    Other kinds of layers, dtypes, and inputs with or without gradients get graphs of their own.
    """
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    module.compile(backend=backend, dynamic=True)


def apply_rewrites(graph: fx.GraphModule, config: Any) -> int:
    """Replace the known formulas in a graph; returns the number of replacements."""
    return sum(len(replace_pattern_with_filters(graph, *rewrite)) for rewrite in _iter_rewrites(config))


def _iter_rewrites(config: Any) -> Iterator[Rewrite]:
    settings = config.get_text_config()
    eps, width = getattr(settings, "rms_norm_eps", None), getattr(settings, "head_dim", None) or 0
    if eps is None:
        return
    for dtype in (torch.bfloat16, torch.float32):
        yield _add_norm_rewrite(eps, dtype)
        if width >= 2 and width & (width - 1) == 0:  # the kernels need powers of two
            yield _norm_rotary_rewrite(eps, width // 2, dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    x_float = x.to(torch.float32)
    return weight * (x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)


def _add_norm_rewrite(eps: float, dtype: torch.dtype) -> Rewrite:
    """Residual add, RMSNorm, then the gate and up projections."""

    def pattern(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        residual_sum = x + residual
        norm = _rms_norm(residual_sum, weight, eps, dtype)
        return residual_sum, F.linear(norm, gate, None), F.linear(norm, up, None)

    def replacement(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        outputs = torch.ops.ramify.add_norm_products(x.squeeze(0), residual.squeeze(0), weight, gate, up, eps)
        return outputs[0].unsqueeze(0), outputs[1].unsqueeze(0), outputs[2].unsqueeze(0)

    def matches(match: InternalMatch, *_: fx.Graph) -> bool:
        """Accept two tensors of one shape [1, tokens, width] and a norm weight [width].

        The weights must be inputs of the graph: one that is computed after the sum does not exist yet where the
        operator is inserted.
        """
        shapes = _input_shapes(match, dtype)
        return (
            shapes is not None
            and all(node.op in ("placeholder", "get_attr") for node in match.placeholder_nodes[2:])
            and len(shapes[0]) == 3
            and shapes[0][0] == 1
            and shapes[:3] == [shapes[0], shapes[0], shapes[0][2:]]
        )

    return pattern, replacement, [matches]


def _norm_rotary_rewrite(eps: float, half: int, dtype: torch.dtype) -> Rewrite:
    """RMSNorm of the heads of queries or keys, then the rotary embedding."""

    def pattern(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = _rms_norm(x, weight, eps, dtype).transpose(1, 2)
        return heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), dim=-1) * sin

    def replacement(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = torch.ops.ramify.norm_rotate(x.squeeze(0), weight, cos.flatten(0, 2), sin.flatten(0, 2), eps)
        return rotated.transpose(0, 1).unsqueeze(0)

    def matches(match: InternalMatch, *_: fx.Graph) -> bool:
        """Accept one row, [1, tokens, heads, width], and one angle for each of its tokens."""
        shapes = _input_shapes(match, dtype)
        if shapes is None or len(shapes[0]) != 4 or shapes[0][0] != 1:
            return False
        angles = (1, 1, shapes[0][1], 2 * half)
        return shapes[1:] == [(2 * half,), angles, angles]

    return pattern, replacement, [matches]


def _input_shapes(match: InternalMatch, dtype: torch.dtype) -> list[tuple[int, ...]] | None:
    """Return the shapes of a match's inputs if all are contiguous tensors of `dtype`; None otherwise."""
    inputs: list[Any] = [getattr(node, "meta", {}).get("example_value") for node in match.placeholder_nodes]
    supported = all(isinstance(value, Tensor) and value.dtype == dtype and value.is_contiguous() for value in inputs)
    return [tuple(value.shape) for value in inputs] if supported else None
