"""Layers are compiled with fewer operators than their code names, and compute the same."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from ramify.model import graph_rewrites as rewriting
from ramify.model.graph_rewrites import KERNEL_SOURCE_HASH, apply_rewrites, build_compile_backend
from ramify.model.tree_attention import ATTENTION_NAME, TreeMask
from ramify.train.losses import load_loss
from ramify.train.policy import load_policy

TOKENS = 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL: dict[str, Any] = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
QWEN3 = Qwen3Config(**SMALL, **HEADS, head_dim=16)
ones = partial(torch.ones, device=DEVICE)
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")


def plain(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """What the operator computes, in float32 or more."""
    exact = x if x.dtype == torch.float64 else x.float()
    heads = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps) * weight
    first, second = heads.chunk(2, -1)
    return (heads * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]).to(x.dtype)


def plain_products(
    x: Tensor, more: Tensor, weight: Tensor, one: Tensor, other: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    both = x + more
    exact = both if x.dtype == torch.float64 else both.float()
    norm = (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
    return both, norm @ one.t(), norm @ other.t(), norm


@pytest.fixture(scope="module", autouse=True)
def operator() -> Any:
    """The operator needs Triton; where there is none, the formula stands for it."""
    try:
        import ramify.model.norms
        import ramify.model.rotary  # noqa: F401

        yield
    except ImportError:
        library = torch.library.Library("ramify", "FRAGMENT")
        library.define("norm_rotate(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor")
        library.impl("norm_rotate", plain, "CompositeImplicitAutograd")
        library.define(
            "add_norm_products(Tensor x, Tensor more, Tensor weight, Tensor one, Tensor other, float eps)"
            " -> (Tensor, Tensor, Tensor, Tensor)"
        )
        library.impl("add_norm_products", plain_products, "CompositeImplicitAutograd")
        yield
        library._destroy()


def run(config: PretrainedConfig, dtype: torch.dtype, rewritten: list[int] | None) -> list[Tensor]:
    """What a layer gives, and the gradients of its weights; its graph rewritten if there is a list for how often."""

    def compiler(graph: fx.GraphModule, _: list[Any]) -> Any:
        if rewritten is not None:
            rewritten.append(apply_rewrites(graph, config))
        return graph.forward

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).to(DEVICE, dtype)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    layer = model.model.layers[0]
    torch._dynamo.reset()
    layer.compile(backend=compiler, dynamic=False)
    end, position = np.full(TOKENS, TOKENS, np.int32), np.arange(TOKENS, dtype=np.int32)
    tree = TreeMask(end, position, DEVICE)
    ids = torch.arange(TOKENS, device=DEVICE)[None]
    found = model.model(input_ids=ids, position_ids=ids, use_cache=False, tree=tree).last_hidden_state
    found.float().pow(2).sum().backward()
    return [found, *(weight.grad for weight in layer.parameters())]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("config", "often"),
    [
        (QWEN3, 3),  # norm and rotation of queries, and of keys, and the norm in the middle
        (Qwen3Config(**SMALL, **HEADS, head_dim=24), 1),  # the kernels do not know the width
        (LlamaConfig(**SMALL, **HEADS), 1),  # does not normalise heads
        (LlamaConfig(**SMALL, **HEADS, mlp_bias=True), 0),
    ],
    ids=["qwen3", "width of 24", "llama", "biased"],
)
def test_what_is_known_is_replaced_and_gives_the_same(
    config: PretrainedConfig, often: int, dtype: torch.dtype, near: float
) -> None:
    replaced: list[int] = []
    for ours, theirs in zip(run(config, dtype, replaced), run(config, dtype, None), strict=True):
        assert (ours - theirs).norm() <= near * theirs.norm()
    assert replaced == [often]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """As models write it."""
    exact = x.to(torch.float32)
    return weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def written(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = norm(x, weight).transpose(1, 2)
    return heads * cos + torch.cat((-heads[..., 8:], heads[..., :8]), dim=-1) * sin


@pytest.mark.parametrize(
    ("given", "often"),
    [
        ({}, 1),
        ({"x": ones(2, TOKENS, 4, 16)}, 0),
        ({"x": ones(1, TOKENS, 4, 32)[..., :16]}, 0),
        ({"x": ones(1, TOKENS, 4, 16, dtype=torch.bfloat16)}, 0),
        ({"cos": ones(1, 4, TOKENS, 16)}, 0),
        ({"sin": ones(1, 1, 1, 16)}, 0),
        ({"sin": ones(1, 1, TOKENS, 32)[..., :16]}, 0),
    ],
    ids=["one row", "two rows", "gaps", "two dtypes", "angles of heads", "one angle", "angles with gaps"],
)
def test_heads_that_the_operator_does_not_know_are_left(given: dict[str, Tensor], often: int) -> None:
    shapes = {"x": (1, TOKENS, 4, 16), "weight": (16,), "cos": (1, 1, TOKENS, 16), "sin": (1, 1, TOKENS, 16)}
    assert_replaced(written, shapes, given, often)


def middle(x: Tensor, more: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    found = norm(both := x + more, weight)
    return both, linear(found, gate, None), linear(found, up, None)


def adapted(x: Tensor, more: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """With a third reader of the norm, as adapters have."""
    found = norm(both := x + more, weight)
    return both, linear(found, gate, None) + found.sum(), linear(found, up, None)


def scaled(x: Tensor, more: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """With a weight that is made where it is used."""
    found = norm(both := x + more, weight)
    return both, linear(found, 2 * gate, None), linear(found, up, None)


def lifted(x: Tensor, more: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """With a number for a row."""
    found = norm(both := x + 1.0, weight)
    return both, linear(found, gate, None), linear(found, up, None)


@pytest.mark.parametrize(
    ("formula", "given", "often"),
    [
        (middle, {}, 1),
        (middle, {"x": ones(2, TOKENS, 32), "more": ones(2, TOKENS, 32)}, 0),
        (middle, {"more": ones(1, 1, 32)}, 0),
        (middle, {"x": ones(1, TOKENS, 64)[..., :32]}, 0),
        (middle, {"more": ones(1, TOKENS, 32, dtype=torch.bfloat16)}, 0),
        (middle, {"weight": ones(TOKENS, 32)}, 0),
        (adapted, {}, 0),
        (scaled, {}, 0),
        (lifted, {}, 0),
    ],
    ids=[
        "one row",
        "two rows",
        "one for all",
        "gaps",
        "two dtypes",
        "a weight for each",
        "read by a third",
        "a weight made late",
        "a number",
    ],
)
def test_a_norm_that_the_operator_does_not_know_is_left(formula: Any, given: dict[str, Tensor], often: int) -> None:
    row = (1, TOKENS, 32)
    assert_replaced(formula, {"x": row, "more": row, "weight": (32,), "gate": (48, 32), "up": (48, 32)}, given, often)


def assert_replaced(formula: Any, shapes: dict[str, tuple[int, ...]], given: dict[str, Tensor], often: int) -> None:
    """So often in the formula's graph, which computes the same."""
    replaced: list[int] = []

    def compiler(graph: fx.GraphModule, _: list[Any]) -> Any:
        replaced.append(apply_rewrites(graph, QWEN3))
        return graph.forward

    tensors = {name: ones(shape) for name, shape in shapes.items()} | given
    torch._dynamo.reset()
    found = torch.compile(formula, backend=compiler, dynamic=False)(**tensors)
    assert replaced == [often]
    torch.testing.assert_close(found, formula(**tensors))


@pytest.mark.parametrize(("device", "tag"), [("cpu", ""), ("cuda:0", KERNEL_SOURCE_HASH)])
def test_graphs_on_a_gpu_are_rewritten_and_kept_under_the_name_of_the_kernels(
    device: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "triton" not in sys.modules:
        for name in ("norms", "rotary"):
            monkeypatch.setitem(sys.modules, f"ramify.model.{name}", ModuleType(name))
    rewritten: list[fx.GraphModule] = []
    monkeypatch.setattr(rewriting, "rewrite", lambda graph, _: rewritten.append(graph))
    monkeypatch.setattr(rewriting, "lookup_backend", lambda _: lambda *_: torch.compiler.config.cache_key_tag)
    graph = fx.symbolic_trace(lambda x: x.sin())
    with FakeTensorMode():
        found: Any = build_compile_backend(QWEN3)(graph, [1, torch.empty(2, device=device)])
    assert (found, bool(rewritten)) == (tag, device != "cpu")


def test_a_layer_that_is_computed_again_has_room_for_its_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(QWEN3).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, load_loss("dppo"), device=torch.device("cpu"), checkpoint_activations=True)
    ids = torch.arange(TOKENS)[None]
    tree = TreeMask(np.full(TOKENS, TOKENS, np.int32), np.arange(TOKENS, dtype=np.int32), torch.device("cpu"))
    found = policy.model.model(input_ids=ids, position_ids=ids, use_cache=False, tree=tree).last_hidden_state
    made: list[str] = []
    kernels: Any = ModuleType("kernels")
    kernels.make_room = lambda: made.append("room")
    monkeypatch.setitem(sys.modules, "ramify.model.kernels", kernels)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found.sum().backward()
    assert made == ["room"]


@on_a_gpu
@pytest.mark.parametrize(("rows", "width"), [(64, 1024), (4099, 48), (1, 3)])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_norm_in_the_middle_computes_the_formula(rows: int, width: int, dtype: torch.dtype, near: float) -> None:
    from ramify.model.norms import add_norm_products

    torch.manual_seed(0)
    shapes = (rows, width), (rows, width), (width,), (8, width), (8, width)
    given = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    grads = [torch.randn(shape, device="cuda").to(dtype) for shape in ((rows, width), (rows, 8), (rows, 8))]
    found: list[list[Tensor]] = []
    for function, kind in ((add_norm_products, dtype), (plain_products, torch.float64)):
        leaves = [each.to(kind).clone().requires_grad_() for each in given]
        out: Any = function(*leaves, 1e-6)  # pyright: ignore[reportCallIssue]
        torch.autograd.backward(out[:3], [grad.to(kind) for grad in grads])
        found.append([*(each.detach() for each in out[:3]), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for ours, exact in zip(*found, strict=True):
        assert (ours.double() - exact).norm() <= near * exact.norm()


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
