"""What layers compute, said to the compiler in fewer words.

A layer reaches the compiler as a graph of the operations its code names. Where these are a formula for which there is
an operator here, the graph is rewritten to call it; a model that writes the formula another way is compiled as it is.
"""

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import lookup_backend
from torch.fx.passes.utils.matcher_utils import InternalMatch
from torch.fx.subgraph_rewriter import replace_pattern_with_filters
from torch.nn import functional as F  # noqa: N812

CompileBackend = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
GraphPattern = Callable[..., Any]
MatchFilter = Callable[..., bool]

# Compiled graphs are kept on disk by what they hold, and what an operator does backward is not in them: code that was
# kept from another version of the kernels would run in place of these
KERNEL_SOURCE_HASH = sha256(
    b"".join(Path(__file__).with_name(name).read_bytes() for name in ("kernels.py", "norms.py", "rotary.py"))
).hexdigest()


def build_compile_backend(config: Any) -> CompileBackend:
    """The compiler of the layers of a model that reads forests. Only graphs on CUDA are rewritten, as only there the
    operators compute: layers may be on a CPU still when they are told to compile."""
    inductor: Any = lookup_backend("inductor")
    settings: Any = torch.compiler.config

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if not any(isinstance(each, Tensor) and each.device.type == "cuda" for each in inputs):
            return inductor(graph, inputs)
        import ramify.model.norms
        import ramify.model.rotary  # noqa: F401 - the operators; needs Triton, which only a torch for CUDA brings

        apply_rewrites(graph, config)
        with settings.patch(cache_key_tag=settings.cache_key_tag + KERNEL_SOURCE_HASH):
            return inductor(graph, inputs)

    return compile_graph


def apply_rewrites(graph: fx.GraphModule, config: Any) -> int:
    """Replace what is found in a graph; returns how often."""
    return sum(len(replace_pattern_with_filters(graph, *formula)) for formula in _iter_rewrites(config))


def _iter_rewrites(config: Any) -> Iterator[tuple[GraphPattern, GraphPattern, list[MatchFilter]]]:
    """As models write them, as they are meant to be computed, and what that is right for."""
    settings = config.get_text_config()
    eps, width = getattr(settings, "rms_norm_eps", None), getattr(settings, "head_dim", None) or 0
    if eps is None:
        return
    for dtype in (torch.bfloat16, torch.float32):
        yield _add_norm_rewrite(eps, dtype)
        if width >= 2 and width & (width - 1) == 0:  # the widths the kernels know
            yield _norm_rotary_rewrite(eps, width // 2, dtype)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    exact = x.to(torch.float32)
    return weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)).to(dtype)


def _add_norm_rewrite(eps: float, dtype: torch.dtype) -> tuple[GraphPattern, GraphPattern, list[MatchFilter]]:
    """What attention found joins the row; its norm goes through a gate and what the gate lets through."""

    def pattern(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        both = x + residual
        norm = _rms_norm(both, weight, eps, dtype)
        return both, F.linear(norm, gate, None), F.linear(norm, up, None)

    def replacement(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        found = torch.ops.ramify.add_norm_products(x.squeeze(0), residual.squeeze(0), weight, gate, up, eps)
        return found[0].unsqueeze(0), found[1].unsqueeze(0), found[2].unsqueeze(0)

    def matches(match: InternalMatch, *_: fx.Graph) -> bool:
        """Two rows of one shape, and a weight of their width; no weight that is made behind the sum, where the operator
        stands."""
        shapes = _input_shapes(match, dtype)
        return (
            shapes is not None
            and all(node.op in ("placeholder", "get_attr") for node in match.placeholder_nodes[2:])
            and len(shapes[0]) == 3
            and shapes[0][0] == 1
            and shapes[:3] == [shapes[0], shapes[0], shapes[0][2:]]
        )

    return pattern, replacement, [matches]


def _norm_rotary_rewrite(
    eps: float, half: int, dtype: torch.dtype
) -> tuple[GraphPattern, GraphPattern, list[MatchFilter]]:
    """Queries or keys that are normalised by head and then rotated."""

    def pattern(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = _rms_norm(x, weight, eps, dtype).transpose(1, 2)
        return heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), dim=-1) * sin

    def replacement(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = torch.ops.ramify.norm_rotate(x.squeeze(0), weight, cos.flatten(0, 2), sin.flatten(0, 2), eps)
        return rotated.transpose(0, 1).unsqueeze(0)

    def matches(match: InternalMatch, *_: fx.Graph) -> bool:
        """One row, and one angle for each of its tokens."""
        shapes = _input_shapes(match, dtype)
        if shapes is None or len(shapes[0]) != 4 or shapes[0][0] != 1:
            return False
        turns = (1, 1, shapes[0][1], 2 * half)
        return shapes[1:] == [(2 * half,), turns, turns]

    return pattern, replacement, [matches]


def _input_shapes(match: InternalMatch, dtype: torch.dtype) -> list[tuple[int, ...]] | None:
    """Of what a formula is given, if those are tensors without gaps and all of one dtype."""
    given: list[Any] = [getattr(node, "meta", {}).get("example_value") for node in match.placeholder_nodes]
    even = all(isinstance(each, Tensor) and each.dtype == dtype and each.is_contiguous() for each in given)
    return [tuple(each.shape) for each in given] if even else None
