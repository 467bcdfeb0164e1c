"""Every Triton kernel compiles for the GPUs that are supported, within their shared memory. No GPU is needed.

The operators are called with tensors on the CPU, and what they would launch is recorded instead of run; so the kernels
are compiled with the sizes that the operators choose.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ramify
from ramify.model.forest_chunks import ForestChunks, ForestSegments, find_ancestors
from ramify.model.kernels.attention_plan import build_plan
from ramify.model.kernels.chunk_plan import CHUNK_SIZE, plan_chunks
from ramify.model.kernels.decoder_ops import DecoderSizes, DecoderWeights, LayerWeights
from ramify.model.kernels.paged_attention import AttentionMetadata, DevicePlan, KVPool, StepSequences
from ramify.model.kernels.quantization import QuantizeMode, quantize_matrix
from ramify.model.kernels.recurrent_ops import DeltaRuleWeights, ShortConvWeights
from ramify.model.kernels.state_pool import StatePool, StateSpec
from ramify.model.tree_attention import BLOCK_SIZE, BlockMask
from ramify.train.lm_head import LogitTransform

triton = pytest.importorskip("triton")

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}  # of a block, by compute capability
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
Launch = tuple[Any, dict[str, Any]]  # kernel, arguments and options


LENGTHS = [100, 3, 70]  # of a prefix and two branches
STOP = np.cumsum(LENGTHS)
SEGMENTS = ForestSegments(*(np.array(values, np.int32) for values in (STOP - LENGTHS, STOP, [-1, 0, 0])))


def record_launches(monkeypatch: pytest.MonkeyPatch, operator: Callable[[], object]) -> list[Launch]:
    """Return the kernels that the operator launches, and their arguments."""
    launches: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((kernel, {**dict(zip(kernel.arg_names, args)), **kwargs}))

    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.jit.JITFunction, "run", record)
        operator()
    return launches


def compile_launch(launch: Launch, capability: int) -> Any:
    """Compile a kernel for a GPU, as a launch with these arguments does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, arguments = launch
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if not isinstance(value, float) and (isinstance(value, torch.Tensor) or value % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]
    options = {name: value for name, value in arguments.items() if name not in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def run_decoder(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Run a layer of the engine's decoder, for a step with a decoding sequence and a chunk, and sample a token.

    Its attention also runs with sinks and a soft cap.
    """
    from ramify.model.kernels.cuda.decoder import CudaDecoderOps
    from ramify.model.kernels.cuda.paged_attention import PagedAttention
    from ramify.model.kernels.cuda.sampling import gather_ids, sample_rows

    num_rows, hidden, inner, vocab = 41, 64, 96, 50
    pool = KVPool(1, 4, 16, kv_heads, head_dim, dtype, "cpu")
    kernels = PagedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=16,
        dtype=dtype,
        device=torch.device("cpu"),
        max_graph_rows=0,
    )
    tables, starts, stops = [np.arange(1, 200), np.arange(200, 203)], [1000, 0], [1001, 40]
    shape = replace(kernels.get_shape(num_rows), num_programs=400)  # as on a GPU, so that pieces are merged
    plan = build_plan(tables, starts, stops, num_rows, shape)
    kernels.prepare(plan)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    rows, sampled = zeros(num_rows, dtype=torch.int32), zeros(num_rows, 2, dtype=torch.int32)
    gather_ids(rows, rows, sampled, rows)
    num_heads = heads + 2 * kv_heads
    layer = LayerWeights(
        norm=zeros(hidden),
        qkv=zeros(hidden, num_heads * head_dim),
        qkv_bias=zeros(num_heads * head_dim),
        q_norm=zeros(head_dim),
        k_norm=zeros(head_dim),
        out=zeros(heads * head_dim, hidden),
        out_bias=None,
        mlp_norm=zeros(hidden),
        gate_up=zeros(hidden, 2 * inner),
        down=zeros(inner, hidden),
    )
    rope = zeros(64, 2 * head_dim, dtype=torch.float32)
    weights = DecoderWeights(zeros(vocab, hidden), rope, zeros(hidden), zeros(vocab, hidden), None, [layer])
    ops = CudaDecoderOps(DecoderSizes(heads, kv_heads, head_dim, hidden, inner, 1e-6, 0.1))
    metadata = AttentionMetadata(pool, rows, plan=DevicePlan(torch.from_numpy(plan.data), rows, kernels))
    logits = ops.forward(weights, rows, rows, metadata, rows[:2])
    metadata.attend(zeros(num_rows, heads, head_dim), 0, 0.1, 128, 50.0, zeros(heads))
    sample_rows(logits, zeros(2, dtype=torch.float32), zeros(2, dtype=torch.int64), rows, rows, sampled)


def run_gated_layers(key_heads: int, heads: int, width: int, dtype: torch.dtype) -> None:
    """Run a layer with the gated delta rule, and gate the heads of attention layers, of which one has no rotation.

    A sequence has enough rows for chunks.
    """
    from ramify.model.kernels.cuda.decoder import CudaDecoderOps

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    channels, hidden, num_rows = 2 * key_heads * width + heads * width, 64, 70
    conv = zeros(channels, 4)
    delta_rule = DeltaRuleWeights(conv, zeros(heads), zeros(heads), zeros(width), key_heads, width)
    attention = {
        "norm": zeros(hidden),
        "qkv": zeros(hidden, 2 * heads * width + 4 * width),
        "qkv_bias": None,
        "q_norm": zeros(width),
        "k_norm": zeros(width),
        "out": zeros(heads * width, hidden),
        "out_bias": None,
        "mlp_norm": zeros(hidden),
        "gate_up": zeros(hidden, 2 * hidden),
        "down": zeros(hidden, hidden),
    }
    recurrent = {**attention, "qkv": zeros(hidden, sum(delta_rule.widths)), "recurrent": delta_rule}
    layers = [LayerWeights(**recurrent), LayerWeights(**attention), LayerWeights(**attention, has_rope=False)]
    rope, rows = zeros(64, width // 2, dtype=torch.float32), zeros(num_rows, dtype=torch.int32)
    weights = DecoderWeights(zeros(50, hidden), rope, zeros(hidden), zeros(50, hidden), None, layers)
    specs = [
        StateSpec(0, "conv", 0, (channels, 4), dtype),
        StateSpec(0, "recurrent", 0, (heads, width, width), torch.float32),
    ]
    sizes = DecoderSizes(heads, 2, width, hidden, hidden, 1e-6, 0.1, norm_offset=1.0, has_gate=True)
    chunks, tracks = torch.from_numpy(plan_chunks([0], [num_rows], [0]))
    sequences = StepSequences(rows, rows, rows, rows, chunks, tracks)
    plan = DevicePlan(rows, rows, lambda query, *_, **__: query.contiguous(), sequences)
    pool, states = KVPool(2, 4, 16, 2, width, dtype, "cpu", [1, 2]), StatePool(specs, 1, torch.device("cpu"))
    CudaDecoderOps(sizes).forward(weights, rows, rows, AttentionMetadata(pool, rows, plan=plan, states=states), rows)


def run_short_convolution(channels: int, has_bias: bool, dtype: torch.dtype) -> None:
    """Run a gated short convolution, as in LFM2."""
    from ramify.model.kernels.cuda.recurrent_ops import compute_recurrent_layer

    conv, bias = torch.zeros(channels, 3, dtype=dtype), torch.zeros(channels, dtype=dtype) if has_bias else None
    states = StatePool([StateSpec(0, "conv", 0, (channels, 3), dtype)], 1, torch.device("cpu"))
    rows, projected = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3 * channels, dtype=dtype)
    chunks, tracks = torch.from_numpy(plan_chunks([], [], []))
    sequences = StepSequences(rows, rows, rows, rows, chunks, tracks)
    compute_recurrent_layer(ShortConvWeights(conv, bias), projected, sequences, states, 0, 1e-5)


def train_layer(width: int, dtype: torch.dtype) -> None:
    """Run the trainer's operators forward and backward, and tree attention with sinks and a soft cap as well."""
    from ramify.model.kernels.cuda.add_norm import add_norm_products
    from ramify.model.kernels.cuda.norm_rotary import norm_rotate
    from ramify.model.kernels.cuda.tree_attention import tree_attention_op

    tokens, heads, kv_heads, hidden = 256, 4, 2, 64
    end = np.repeat([128, 256], 128).astype(np.int32)
    mask = BlockMask.build(end, np.arange(tokens, dtype=np.int32), 0, torch.device("cpu"))

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    query = norm_rotate(zeros(tokens, heads, width), zeros(width), zeros(tokens, width), zeros(tokens, width), 1e-6)
    operator: Any = tree_attention_op
    key_value = zeros(tokens, kv_heads, width), zeros(tokens, kv_heads, width)
    plain, _ = operator(query, *key_value, None, *mask, 0.1, 0, BLOCK_SIZE, 0.0)
    out, _ = operator(plain, *key_value, zeros(heads), *mask, 0.1, 128, BLOCK_SIZE, 50.0)
    matrices = zeros(96, hidden), zeros(96, hidden)
    products = add_norm_products(zeros(tokens, hidden), zeros(tokens, hidden), zeros(hidden), *matrices, 1e-6)
    (out.sum() + products[0].sum() + products[1].sum() + products[2].sum()).backward()


def train_delta_net(width: int, dtype: torch.dtype) -> None:
    """Run the operators of a gated delta net, forward and backward."""
    from ramify.model.forest_recurrence import PathTables, convolve_paths
    from ramify.model.kernels.cuda.activate_heads import activate_heads_op

    out = train_heads(width, width, dtype, num_scalars=2)
    paths = PathTables.from_ancestors(find_ancestors(SEGMENTS, 3), torch.device("cpu"))
    weights = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in ((4 * width, 1, 4), (4 * width,))]
    rows = convolve_paths(torch.zeros(len(out), 4 * width, dtype=dtype, requires_grad=True), *weights, paths)
    split: Any = activate_heads_op
    parts = split(rows, 1, width, width, 1e-6)
    (out.sum() + sum(part.sum() for part in parts)).backward()


def train_linear_attention(key_width: int, value_width: int, dtype: torch.dtype) -> None:
    """Run gated linear attention, forward and backward."""
    train_heads(key_width, value_width, dtype, num_scalars=1).sum().backward()


def train_heads(key_width: int, value_width: int, dtype: torch.dtype, *, num_scalars: int) -> Tensor:
    """Return the output of recurrent heads, with log decays and, if there are two scalars per row, strengths."""
    from ramify.model.forest_recurrence import TrackTables, pass_tracks

    tokens, key_heads, heads = int(SEGMENTS.stop[-1]), 2, 4

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    tracks = TrackTables.from_chunks(ForestChunks.from_segments(SEGMENTS, CHUNK_SIZE), torch.device("cpu"))
    query, key = (zeros(tokens, key_heads, key_width) for _ in range(2))
    decay, strength = [*(zeros(tokens, heads, dtype=torch.float32) for _ in range(num_scalars)), None][:2]
    return pass_tracks(query, key, zeros(tokens, heads, value_width), decay, strength, tracks, scale=1.0)


def train_head(dtype: torch.dtype) -> None:
    """Run the operators on rows of logits."""
    from ramify.model.kernels.cuda.logits import differentiate_logits, reduce_logits

    logits, target_ids, ones = torch.zeros(2, 10_000, dtype=dtype), torch.zeros(2, dtype=torch.long), torch.ones(2)
    transform = LogitTransform(scale=0.5, cap=30.0)
    reduced = reduce_logits(logits, target_ids, ones, transform)
    differentiate_logits(logits, target_ids, ones, reduced[2], ones, transform)


def update_weights(moments: str, num_packs: int) -> None:
    """Run the fused AdamW."""
    from ramify.train.fused_adamw import FusedAdamW
    from ramify.train.master_weights import MasterWeights

    module = nn.ParameterDict({"weight": torch.zeros(64, 64)})
    masters = MasterWeights(module, torch.bfloat16)
    parameters = list(module.parameters())
    optimizer = FusedAdamW([{"params": parameters}], masters, parameters if moments == "8bit" else [], lr=1e-3)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    masters.zero_grad(num_packs=num_packs)
    module["weight"].sum().backward()
    optimizer.step()


def multiply_rows(mode: QuantizeMode, num_rows: int, dtype: torch.dtype) -> None:
    """Multiply rows with a quantized matrix that is split along its columns if there are few rows."""
    from ramify.model.kernels.cuda.quantized_products import multiply

    matrix = quantize_matrix(torch.zeros(256, 2048, dtype=dtype), mode)
    multiply(torch.zeros(num_rows, 2048, dtype=dtype), matrix)


BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
BOTH = (BFLOAT16, FLOAT32)
OPERATORS: list[partial[None]] = [
    *(partial(run_decoder, *heads, BFLOAT16) for heads in ((14, 2, 64), (8, 8, 80), (32, 8, 128), (16, 2, 256))),
    *(partial(run_decoder, *heads, FLOAT32) for heads in ((32, 8, 128), (16, 2, 256))),
    *(partial(run_gated_layers, 16, heads, 128, dtype) for heads in (16, 32) for dtype in BOTH),
    *(partial(run_short_convolution, *conv, dtype) for conv in ((2048, False), (1000, True)) for dtype in BOTH),
    *(partial(train_layer, width, dtype) for width in (128, 256) for dtype in BOTH),
    *(partial(train_delta_net, 128, dtype) for dtype in BOTH),
    *(partial(train_linear_attention, 128, 64, dtype) for dtype in BOTH),
    partial(train_linear_attention, 256, 64, BFLOAT16),
    *(partial(train_head, dtype) for dtype in BOTH),
    *(partial(multiply_rows, mode, rows, BFLOAT16) for mode in ("8bit", "4bit") for rows in (1, 64, 128, 129)),
    *(partial(multiply_rows, mode, 16, FLOAT32) for mode in ("8bit", "4bit")),
    *(partial(update_weights, moments, packs) for moments in ("float32", "8bit") for packs in (1, 2)),
]


def find_kernels() -> set[str]:
    """Return the names of all kernels of the package: functions in Triton that no other function in Triton calls."""
    functions: dict[str, Any] = {}
    package = Path(ramify.__file__).parent
    for path in package.rglob("*.py"):
        if re.search(r"(import|from) triton", path.read_text(encoding="utf-8")):
            module = import_module(".".join(("ramify", *path.relative_to(package).with_suffix("").parts)))
            values = [value for value in vars(module).values() if isinstance(value, triton.JITFunction)]
            functions |= {get_name(value): value.fn for value in values}
    called = {
        get_name(value)
        for function in functions.values()
        for name in function.__code__.co_names
        if isinstance(value := function.__globals__.get(name), triton.JITFunction)
    }
    return functions.keys() - called


def get_name(kernel: Any) -> str:
    """Return the name of a kernel with its module, because several modules have a `_forward`."""
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def test_every_kernel_is_compiled_below(monkeypatch):
    launches = [launch for operator in OPERATORS for launch in record_launches(monkeypatch, operator)]
    missing = find_kernels() - {get_name(kernel) for kernel, _ in launches}
    assert not missing, f"add operators that launch {', '.join(sorted(missing))} to OPERATORS"


def name_operator(operator: partial[None]) -> str:
    return "-".join([operator.func.__name__, *map(str, operator.args)])


@pytest.mark.process
@pytest.mark.full("minutes of compilation")
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("operator", OPERATORS, ids=name_operator)
def test_the_kernels_of_an_operator_compile_within_shared_memory(operator, capability, monkeypatch):
    from ramify.model.kernels.cuda import tree_attention

    launches = record_launches(monkeypatch, operator)
    assert launches
    for kernel, arguments in launches:
        if kernel.fn.__module__ == tree_attention.__name__:  # the tile depends on the GPU
            row_bytes = arguments["D"] * arguments["Q"].dtype.itemsize
            arguments["TILE"] = tree_attention.choose_tile(BLOCK_SIZE, row_bytes, SHARED_MEMORY[capability])
        size = compile_launch((kernel, arguments), capability).metadata.shared
        assert size <= SHARED_MEMORY[capability], f"{get_name(kernel)} needs {size} bytes of shared memory"
