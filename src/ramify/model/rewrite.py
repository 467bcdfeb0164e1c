"""What layers compute, said to the compiler in fewer words.

A layer reaches the compiler as a graph of the operations its code names. Where these are a formula for which there is
an operator here, the graph is rewritten to call it; a model that writes the formula another way is compiled as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import lookup_backend

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def compiler_for(config: Any) -> Compiler:
    """The compiler of the layers of a model on CUDA that reads forests."""
    import ramify.model.rotary  # noqa: F401 - the operators; needs Triton, which only a torch for CUDA brings

    inductor: Any = lookup_backend("inductor")

    def compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        rewrite(graph, config)
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

    return len(fx.replace_pattern(graph, written, meant))
