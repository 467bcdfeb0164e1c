"""Graphs are rewritten to call the fused operators, and compute the same."""

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

from ramify.model import graph_rewrites
from ramify.model.graph_rewrites import KERNEL_SOURCE_HASH, apply_rewrites, build_compile_backend, compile_module
from ramify.model.kernels import cuda
from ramify.model.tree_attention import ATTENTION_NAME, BlockMask, TreeMask
from ramify.train.losses import load_loss
from ramify.train.policy_model import load_policy
from tests.support import reference_ops as reference

TOKENS = 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL: dict[str, Any] = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
QWEN3 = Qwen3Config(**SMALL, **HEADS, head_dim=16)
REFERENCES = [  # the module of an operator, its schema, and what computes it without a GPU
    (
        "ramify.model.kernels.cuda.norm_rotary",
        "norm_rotate(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor",
        reference.norm_rotate,
    ),
    (
        "ramify.model.kernels.cuda.add_norm",
        "add_norm_products(Tensor x, Tensor residual, Tensor weight, Tensor gate, Tensor up, float eps)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        reference.add_norm_products,
    ),
]
ones = partial(torch.ones, device=DEVICE)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on a GPU")


@pytest.fixture(scope="module", autouse=True)
def operators() -> Any:
    """Register the fused operators; without a GPU the PyTorch reference stands for them."""
    if torch.cuda.is_available():
        import ramify.model.kernels.cuda.add_norm
        import ramify.model.kernels.cuda.norm_rotary  # noqa: F401

        yield
        return
    library = torch.library.Library("ramify", "FRAGMENT")
    for module, schema, implementation in REFERENCES:
        if module not in sys.modules:  # otherwise an earlier test registered the operator for CUDA
            library.define(schema)
        for key in ("CPU", "AutogradCPU"):
            library.impl(schema.partition("(")[0], implementation, key)
    yield
    library._destroy()


def causal_mask(device: torch.device) -> TreeMask:
    return TreeMask(np.full(TOKENS, TOKENS, np.int32), np.arange(TOKENS, dtype=np.int32), device)


def run_layer(config: PretrainedConfig, dtype: torch.dtype, replacements: list[int] | None) -> list[Tensor]:
    """Return the output of a layer and the gradients of its weights.

    Its graph is rewritten if `replacements` is given; the number of replacements is appended to it.
    """

    def backend(graph: fx.GraphModule, _: list[Any]) -> Any:
        replacements.append(apply_rewrites(graph, config))
        return graph.forward

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).to(DEVICE, dtype)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    layer = model.model.layers[0]
    if replacements is not None:
        torch._dynamo.reset()
        compile_module(layer, backend)
    ids = torch.arange(TOKENS, device=DEVICE)[None]
    output = model.model(input_ids=ids, position_ids=ids, use_cache=False, tree_mask=causal_mask(DEVICE))
    hidden = output.last_hidden_state
    hidden.float().pow(2).sum().backward()
    return [hidden, *(weight.grad for weight in layer.parameters())]


# Norm and rotation of queries and of keys, and the norm before the MLP; the kernels do not support a width of 24; Llama
# does not normalize heads.
LAYERS = {
    "qwen3": (QWEN3, 3),
    "width of 24": (Qwen3Config(**SMALL, **HEADS, head_dim=24), 1),
    "llama": (LlamaConfig(**SMALL, **HEADS), 1),
    "biased": (LlamaConfig(**SMALL, **HEADS, mlp_bias=True), 0),
}
MARKS = {name: pytest.mark.full("qwen3 has all rewrites; the tests below have their conditions") for name in LAYERS}
del MARKS["qwen3"]
BFLOAT16_MARKS = MARKS
if not torch.cuda.is_available():
    BFLOAT16_MARKS = dict.fromkeys(
        LAYERS, pytest.mark.full("without a GPU, the operators are the same functions for every dtype")
    )


@pytest.mark.promise
@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *(pytest.param(name, torch.float32, 1e-5, marks=MARKS.get(name, ())) for name in LAYERS),
        *(pytest.param(name, torch.bfloat16, 2e-2, marks=BFLOAT16_MARKS.get(name, ())) for name in LAYERS),
    ],
)
def test_rewritten_layer_computes_the_same(name: str, dtype: torch.dtype, tolerance: float) -> None:
    config, count = LAYERS[name]
    replacements: list[int] = []
    rewritten, original = run_layer(config, dtype, replacements), run_layer(config, dtype, None)
    for actual, expected in zip(rewritten, original, strict=True):
        assert (actual - expected).norm() <= tolerance * expected.norm()
    assert replacements == [count]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As models write it."""
    x_float = x.to(torch.float32)
    return weight * (x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def norm_rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads, half = rms_norm(x, weight).transpose(1, 2), weight.shape[0] // 2
    return heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), dim=-1) * sin


def test_norm_rotary_is_replaced_only_for_supported_inputs() -> None:
    unsupported = {
        "two rows": {"x": ones(2, TOKENS, 4, 16)},
        "strided": {"x": ones(1, TOKENS, 4, 32)[..., :16]},
        "two dtypes": {"x": ones(1, TOKENS, 4, 16, dtype=torch.bfloat16)},
        "angles per head": {"cos": ones(1, 4, TOKENS, 16)},
        "one angle": {"sin": ones(1, 1, 1, 16)},
        "strided angles": {"sin": ones(1, 1, TOKENS, 32)[..., :16]},
    }

    def inputs(width: int = 16) -> dict[str, Tensor]:
        angles = (1, 1, TOKENS, width)
        return {"x": ones(1, TOKENS, 4, width), "weight": ones(width), "cos": ones(angles), "sin": ones(angles)}

    assert_replaced([(norm_rotary, inputs()), *((norm_rotary, inputs() | case) for case in unsupported.values())], 1)
    assert_replaced([(norm_rotary, inputs(24))], 0, Qwen3Config(head_dim=24))


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    norm = rms_norm(total := x + residual, weight)
    return total, linear(norm, gate, None), linear(norm, up, None)


def add_norm_with_bias(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    norm = rms_norm(total := x + residual, weight)
    return total, linear(norm, gate, up[:, 0]), linear(norm, up, gate[:, 0])


def add_norm_with_adapter(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """With a third reader of the norm, as adapters have."""
    norm = rms_norm(total := x + residual, weight)
    return total, linear(norm, gate, None) + norm.sum(), linear(norm, up, None)


def add_norm_scaled(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """With a weight that is computed where it is used."""
    norm = rms_norm(total := x + residual, weight)
    return total, linear(norm, 2 * gate, None), linear(norm, up, None)


def add_norm_of_number(x: Tensor, residual: Tensor, weight: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """With a number instead of a residual."""
    norm = rms_norm(total := x + 1.0, weight)
    return total, linear(norm, gate, None), linear(norm, up, None)


def test_add_norm_is_replaced_only_for_supported_inputs() -> None:
    unsupported = {
        "two rows": {"x": ones(2, TOKENS, 32), "residual": ones(2, TOKENS, 32)},
        "broadcast": {"residual": ones(1, 1, 32)},
        "strided": {"x": ones(1, TOKENS, 64)[..., :32]},
        "two dtypes": {"residual": ones(1, TOKENS, 32, dtype=torch.bfloat16)},
        "a weight per token": {"weight": ones(TOKENS, 32)},
    }

    def inputs() -> dict[str, Tensor]:
        sizes = {"x": (1, TOKENS, 32), "residual": (1, TOKENS, 32), "weight": (32,), "gate": (48, 32), "up": (48, 32)}
        return {name: ones(size) for name, size in sizes.items()}

    variants = add_norm_with_bias, add_norm_with_adapter, add_norm_scaled, add_norm_of_number
    cases = [(add_norm, inputs() | case) for case in unsupported.values()]
    assert_replaced([(add_norm, inputs()), *cases, *((variant, inputs()) for variant in variants)], 1)


def assert_replaced(formulas: list[tuple[Any, dict[str, Tensor]]], count: int, config: Any = QWEN3) -> None:
    """Assert the number of replacements in the graph of the formulas, and that it computes the same."""
    replacements: list[int] = []

    def backend(graph: fx.GraphModule, _: list[Any]) -> Any:
        replacements.append(apply_rewrites(graph, config))
        return graph.forward

    def compute() -> list[Any]:
        return [formula(**inputs) for formula, inputs in formulas]

    torch._dynamo.reset()
    actual = torch.compile(compute, backend=backend, dynamic=False)()
    assert replacements == [count]
    for outputs, expected in zip(actual, compute(), strict=True):
        torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize(("device", "tag"), [("cpu", ""), ("cuda:0", KERNEL_SOURCE_HASH)])
def test_graphs_on_a_gpu_are_rewritten_and_cached_by_kernel_sources(
    device: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        for name in ("add_norm", "norm_rotary"):
            monkeypatch.setitem(sys.modules, f"ramify.model.kernels.cuda.{name}", ModuleType(name))
    rewritten: list[fx.GraphModule] = []
    monkeypatch.setattr(graph_rewrites, "apply_rewrites", lambda graph, _: rewritten.append(graph))
    monkeypatch.setattr(graph_rewrites, "lookup_backend", lambda _: lambda *_: torch.compiler.config.cache_key_tag)
    graph = fx.symbolic_trace(lambda x: x.sin())
    with FakeTensorMode():
        cache_tag: Any = build_compile_backend(QWEN3)(graph, [1, torch.empty(2, device=device)])
    assert (cache_tag, bool(rewritten)) == (tag, device != "cpu")


def test_recomputed_layer_sets_the_triton_allocator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(QWEN3).save_pretrained(tmp_path)
    cpu = torch.device("cpu")
    policy = load_policy(tmp_path, load_loss("dppo"), device=cpu, recompute_layers=1)
    ids = torch.arange(TOKENS)[None]
    output = policy.model.model(input_ids=ids, position_ids=ids, use_cache=False, tree_mask=causal_mask(cpu))
    calls: list[str] = []
    kernels: Any = ModuleType("tree_attention")
    kernels.set_triton_allocator = lambda: calls.append("set")
    monkeypatch.setitem(sys.modules, "ramify.model.kernels.cuda.tree_attention", kernels)
    monkeypatch.setattr(cuda, "tree_attention", kernels, raising=False)  # which is read first if it was imported
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    output.last_hidden_state.sum().backward()
    assert calls == ["set"]


@needs_gpu
@pytest.mark.parametrize(("rows", "width"), [(64, 1024), (4099, 48), (1, 3)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_add_norm_kernel_matches_the_reference(rows: int, width: int, dtype: torch.dtype, tolerance: float) -> None:
    from ramify.model.kernels.cuda.add_norm import add_norm_products

    torch.manual_seed(0)
    shapes = (rows, width), (rows, width), (width,), (8, width), (8, width)
    inputs = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    grads = [torch.randn(shape, device="cuda").to(dtype) for shape in ((rows, width), (rows, 8), (rows, 8))]
    results: list[list[Tensor]] = []
    for function, kind in ((add_norm_products, dtype), (reference.add_norm_products, torch.float64)):
        leaves = [tensor.to(kind).clone().requires_grad_() for tensor in inputs]
        outputs: Any = function(*leaves, 1e-6)
        torch.autograd.backward(outputs[:3], [grad.to(kind) for grad in grads])
        results.append(
            [*(output.detach() for output in outputs[:3]), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        )
    assert_near(*results, tolerance)


@needs_gpu
@pytest.mark.parametrize(("tokens", "heads", "width"), [(64, 4, 128), (4099, 3, 64), (1, 1, 2)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_norm_rotary_kernel_matches_the_reference(
    tokens: int, heads: int, width: int, dtype: torch.dtype, tolerance: float
) -> None:
    from ramify.model.kernels.cuda.norm_rotary import norm_rotate

    torch.manual_seed(0)
    shapes = (tokens, heads, width), (width,), (tokens, width), (tokens, width), (tokens, heads, width)
    x, weight, cos, sin, grad = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    results: list[list[Tensor]] = []
    for function, kind in ((norm_rotate, dtype), (reference.norm_rotate, torch.float64)):
        leaves = [tensor.to(kind).requires_grad_() for tensor in (x.clone(), weight.clone())]
        output: Any = function(*leaves, cos.to(kind), sin.to(kind), 1e-6)
        output.backward(grad.to(kind))
        results.append([output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    assert_near(*results, tolerance)


def assert_near(actual: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for tensor, expected in zip(actual, exact, strict=True):
        assert (tensor.double() - expected).norm() <= tolerance * expected.norm()


class _ReadsMask(torch.nn.Module):
    def forward(self, hidden: Tensor, tree_mask: Any) -> Tensor:
        mask: BlockMask = tree_mask.block_masks[0]
        return (hidden * mask.end).sum() + mask.position.sum() + mask.kv_lists.sum() + mask.q_lists.sum()


@pytest.mark.promise
def test_layers_are_compiled_once_for_all_lengths() -> None:
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    module, cpu = _ReadsMask(), torch.device("cpu")
    compile_module(module, backend)
    for tokens in (320, 256, 448):
        end, depth = np.full(tokens, tokens, np.int32), np.arange(tokens, dtype=np.int32)
        mask = TreeMask(end, depth, cpu)
        mask.block_masks[0] = BlockMask.build(end, depth, 0, cpu)
        module(torch.ones(tokens), mask)
    assert len(graphs) == 1
