"""What layers compute, said to the compiler in fewer words.

A layer reaches the compiler as a graph of the operations its code names. Where these are a formula for which there is
an operator here, the graph is rewritten to call it; a model that writes the formula another way is compiled as it is.
"""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import lookup_backend
from torch.fx.passes.utils.matcher_utils import InternalMatch
from torch.fx.subgraph_rewriter import replace_pattern_with_filters

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]

# Compiled graphs are kept on disk by what they hold, and what an operator does backward is not in them: code that was
# kept from another version of the kernels would run in place of these
KERNELS = sha256(
    b"".join(Path(__file__).with_name(name).read_bytes() for name in ("kernels.py", "rotary.py"))
).hexdigest()


def compiler_for(config: Any) -> Compiler:
    """The compiler of the layers of a model that reads forests. Only graphs on CUDA are rewritten, as only there the
    operators compute: layers may be on a CPU still when they are told to compile."""
    inductor: Any = lookup_backend("inductor")
    settings: Any = torch.compiler.config

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if not any(isinstance(each, Tensor) and each.device.type == "cuda" for each in inputs):
            return inductor(graph, inputs)
        import ramify.model.rotary  # noqa: F401 - the operators; needs Triton, which only a torch for CUDA brings

        rewrite(graph, config)
        with settings.patch(cache_key_tag=settings.cache_key_tag + KERNELS):
            return inductor(graph, inputs)

    return compile_graph


def rewrite(graph: fx.GraphModule, config: Any) -> int:
    """Heads that are normalised and then rotated become one operator each; returns how many did."""
    settings = config.get_text_config()
    eps, width = getattr(settings, "rms_norm_eps", None), getattr(settings, "head_dim", None) or 0
    if eps is None or width < 2 or width & (width - 1):
        return 0
    return sum(_join(graph, eps, width // 2, dtype) for dtype in (torch.bfloat16, torch.float32))


def _join(graph: fx.GraphModule, eps: float, half: int, dtype: torch.dtype) -> int:
    def written(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        exact = x.to(torch.float32)
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
        heads = (weight * exact.to(dtype)).transpose(1, 2)
        return heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), dim=-1) * sin

    def meant(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = torch.ops.ramify.norm_rotate(x.squeeze(0), weight, cos.flatten(0, 2), sin.flatten(0, 2), eps)
        return rotated.transpose(0, 1).unsqueeze(0)

    def fits(match: InternalMatch, *_: fx.Graph) -> bool:
        """One row without gaps, one angle for each of its tokens, and one dtype: what the operator computes."""
        given: list[Any] = [node.meta.get("example_value") for node in match.placeholder_nodes]
        if not all(isinstance(each, Tensor) and each.dtype == dtype and each.is_contiguous() for each in given):
            return False
        x, *others = (tuple(each.shape) for each in given)
        turns = (1, 1, x[1], 2 * half)
        return len(x) == 4 and x[0] == 1 and others == [(2 * half,), turns, turns]

    return len(replace_pattern_with_filters(graph, written, meant, [fits]))
