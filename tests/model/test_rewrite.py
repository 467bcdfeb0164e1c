"""Layers are compiled with fewer operators than their code names, and compute the same."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from ramify.model.rewrite import rewrite
from ramify.model.tree import ATTENTION, Tree

TOKENS = 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL: dict[str, Any] = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
QWEN3 = Qwen3Config(**SMALL, **HEADS, head_dim=16)
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")


def plain(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """What the operator computes, in float32 or more."""
    exact = x if x.dtype == torch.float64 else x.float()
    heads = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps) * weight
    first, second = heads.chunk(2, -1)
    return (heads * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).to(x.dtype)


@pytest.fixture(scope="module", autouse=True)
def operator() -> Any:
    """The operator needs Triton; where there is none, the formula stands for it."""
    try:
        import ramify.model.rotary  # noqa: F401

        yield
    except ImportError:
        library = torch.library.Library("ramify", "FRAGMENT")
        library.define("norm_rotate(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor")
        library.impl("norm_rotate", plain, "CompositeImplicitAutograd")
        yield
        library._destroy()


def run(config: PretrainedConfig, dtype: torch.dtype, rewritten: list[int] | None) -> list[Tensor]:
    """What a layer gives, and the gradients of its weights; its graph rewritten if there is a list for how often."""

    def compiler(graph: fx.GraphModule, _: list[Any]) -> Any:
        if rewritten is not None:
            rewritten.append(rewrite(graph, config))
        return graph.forward

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).to(DEVICE, dtype)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    layer = model.model.layers[0]
    torch._dynamo.reset()
    layer.compile(backend=compiler, dynamic=False)
    end, position = np.full(TOKENS, TOKENS, np.int32), np.arange(TOKENS, dtype=np.int32)
    tree = Tree(end, position, DEVICE)
    ids = torch.arange(TOKENS, device=DEVICE)[None]
    found = model.model(input_ids=ids, position_ids=ids, use_cache=False, tree=tree).last_hidden_state
    found.float().pow(2).sum().backward()
    return [found, *(weight.grad for weight in layer.parameters())]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("config", "often"),
    [
        (QWEN3, 2),  # norm and rotation of queries, and of keys
        (Qwen3Config(**SMALL, **HEADS, head_dim=24), 0),  # the kernels do not know the width
        (LlamaConfig(**SMALL, **HEADS), 0),  # does not normalise heads
    ],
    ids=["qwen3", "width of 24", "llama"],
)
def test_what_is_known_is_replaced_and_gives_the_same(
    config: PretrainedConfig, often: int, dtype: torch.dtype, near: float
) -> None:
    replaced: list[int] = []
    for ours, theirs in zip(run(config, dtype, replaced), run(config, dtype, None), strict=True):
        assert (ours - theirs).norm() <= near * theirs.norm()
    assert replaced == [often]


@on_a_gpu
@pytest.mark.parametrize(("tokens", "heads", "width"), [(64, 4, 128), (4099, 3, 64), (1, 1, 2)])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_the_operator_computes_the_formula(
    tokens: int, heads: int, width: int, dtype: torch.dtype, near: float
) -> None:
    from ramify.model.rotary import norm_rotate

    torch.manual_seed(0)
    shapes = (tokens, heads, width), (width,), (tokens, width), (tokens, width), (tokens, heads, width)
    x, weight, cos, sin, grad = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    found: list[list[Tensor]] = []
    for function, kind in ((norm_rotate, dtype), (plain, torch.float64)):
        leaves = [each.to(kind).requires_grad_() for each in (x.clone(), weight.clone())]
        out: Any = function(*leaves, cos.to(kind), sin.to(kind), 1e-6)  # pyright: ignore[reportCallIssue]
        out.backward(grad.to(kind))
        found.append([out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for ours, exact in zip(*found, strict=True):
        assert (ours.double() - exact).norm() <= near * exact.norm()
