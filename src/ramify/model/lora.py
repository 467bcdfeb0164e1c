"""LoRA: a low-rank adapter beside each linear map of the layers, while the map itself stays fixed.

`LoraLinear` takes the place of a linear map and has its weight under the same name, so layers, head, tree attention and
sharding see the model they know. Names of the adapters' matrices are peft's. The adapter's product is added in
place to save memory traffic; a custom operator keeps the compiler from splitting it again.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from ramify.core.errors import ConfigInvalid
from ramify.model.kernels.quantization import QuantizedMatrix, QuantizeMode, dequantize_matrix, quantize_matrix
from ramify.model.weights import ADAPTER_INFIX
from ramify.model.weights_manifest import PublishedAdapters

ADAPTER_NAME = "default"


@torch.library.custom_op("ramify::lora_linear", mutates_args=())
def lora_linear(
    rows: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Return the output of a linear map with its adapter, and `rows` times `down`, for the backward pass.

    `rows` is [rows, in], `weight` [out, in], or its codes if it is quantized and has `scales`; `down` is [rank, in] and
    `up` [out, rank].
    """
    low_rank = torch.mm(rows, down.t())
    return F.linear(rows, _get_matrix(weight, scales), bias).addmm_(low_rank, up.t(), alpha=scaling), low_rank


@torch.library.custom_op("ramify::lora_input_gradient", mutates_args=())
def lora_input_gradient(
    gradient: Tensor, weight: Tensor, scales: Tensor | None, low_rank_gradient: Tensor, down: Tensor
) -> Tensor:
    """Return the gradient of the rows, from the gradients of the output and of the rows times `down`."""
    return torch.mm(gradient, _get_matrix(weight, scales)).addmm_(low_rank_gradient, down)


def _get_matrix(weight: Tensor, scales: Tensor | None) -> Tensor:
    """Return a weight, or the matrix of codes and scales; outside of compiled code on a GPU it is one kernel."""
    if scales is None:
        return weight
    matrix = QuantizedMatrix(weight, scales)
    if not weight.is_cuda or torch.compiler.is_compiling():
        return dequantize_matrix(matrix)
    from ramify.model.kernels.cuda.quantized_products import dequantize  # needs Triton

    return dequantize(matrix)


@lora_linear.register_fake
def _(rows: Tensor, weight: Tensor, scales: Any, bias: Any, down: Tensor, up: Tensor, scaling: float) -> Any:
    return rows.new_empty(len(rows), len(up)), rows.new_empty(len(rows), len(down))


@lora_input_gradient.register_fake
def _(gradient: Tensor, weight: Tensor, scales: Any, low_rank_gradient: Tensor, down: Tensor) -> Tensor:
    return gradient.new_empty(len(gradient), down.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, weight, scales, _, down, up, ctx.scaling = inputs
    ctx.save_for_backward(rows, weight, scales, down, up, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    rows, weight, scales, down, up, low_rank = ctx.saved_tensors
    gradient = gradient.contiguous()
    low_rank_gradient = ctx.scaling * torch.mm(gradient, up)
    d_down = torch.mm(low_rank_gradient.t(), rows)
    d_up = ctx.scaling * torch.mm(gradient.t(), low_rank)
    d_rows = None  # the input of the first layer needs none
    if ctx.needs_input_grad[0]:
        d_rows = lora_input_gradient(gradient, weight, scales, low_rank_gradient, down)
    return d_rows, None, None, None, d_down, d_up, None


lora_linear.register_autograd(_backward, setup_context=_setup_context)


class LoraLinear(nn.Linear):
    """A linear map with a fixed weight, and an adapter of some rank; `linear` is the map that it replaces.

    The adapter starts as zero: `lora_A` is random, by `generator`, and `lora_B` is zero. If the map is quantized, its
    weight is None, and the buffers `weight_codes` and `weight_scales` are in its place.
    """

    weight_codes: Tensor | None
    weight_scales: Tensor | None

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.requires_grad_(False)
        self.register_buffer("weight_codes", None)
        self.register_buffer("weight_scales", None)
        self.scaling, self.is_enabled = alpha / rank, True
        device = linear.weight.device
        down = nn.Linear(self.in_features, rank, bias=False, device="meta").to_empty(device=device)
        up = nn.Linear(rank, self.out_features, bias=False, device="meta").to_empty(device=device)
        with torch.no_grad():
            initial = torch.empty(rank, self.in_features)
            down.weight.copy_(nn.init.kaiming_uniform_(initial, a=math.sqrt(5), generator=generator))
            up.weight.zero_()
        self.lora_A, self.lora_B = nn.ModuleDict({ADAPTER_NAME: down}), nn.ModuleDict({ADAPTER_NAME: up})

    def quantize(self, mode: QuantizeMode, dtype: torch.dtype, device: torch.device) -> None:
        """Replace the weight by codes and scales on a device; it is dequantized to `dtype`."""
        set_matrix(self, quantize_matrix(self.weight.to(device, dtype), mode))

    @property
    def quantized(self) -> QuantizedMatrix | None:
        """The weight if it is quantized, or None."""
        codes, scales = self.weight_codes, self.weight_scales
        return None if codes is None or scales is None else QuantizedMatrix(codes, scales)

    @property
    def adapter_down(self) -> Tensor:
        """The adapter's first matrix, [rank, in]."""
        linear: Any = self.lora_A[ADAPTER_NAME]
        return linear.weight

    @property
    def adapter_up(self) -> Tensor:
        """The adapter's second matrix, [out, rank]."""
        linear: Any = self.lora_B[ADAPTER_NAME]
        return linear.weight

    def set_adapter(self, down: Tensor, up: Tensor) -> None:
        """Move the adapter into other memory, which it will share."""
        down.copy_(self.adapter_down)
        up.copy_(self.adapter_up)
        self.lora_A[ADAPTER_NAME].weight = nn.Parameter(down, requires_grad=False)
        self.lora_B[ADAPTER_NAME].weight = nn.Parameter(up, requires_grad=False)

    def get_matrix(self) -> Tensor:
        """Return the weight, dequantized if it is quantized."""
        return self.weight if self.weight_codes is None else _get_matrix(self.weight_codes, self.weight_scales)

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the weight, plus the adapter's if it is enabled."""
        if not self.is_enabled:
            return F.linear(input, self.get_matrix(), self.bias)
        weight = self.weight if self.weight_codes is None else self.weight_codes
        rows, scales = input.flatten(0, -2), self.weight_scales
        output, _ = lora_linear(rows, weight, scales, self.bias, self.adapter_down, self.adapter_up, self.scaling)
        return output.view(*input.shape[:-1], self.out_features)


def set_matrix(linear: nn.Linear, matrix: Tensor | QuantizedMatrix) -> None:
    """Replace the weight of a linear map; only a `LoraLinear` may have a quantized one."""
    is_quantized = isinstance(matrix, QuantizedMatrix)
    if isinstance(linear, LoraLinear):
        linear.weight_codes, linear.weight_scales = matrix if is_quantized else (None, None)
    linear.register_parameter("weight", None if is_quantized else nn.Parameter(matrix, requires_grad=False))


def add_adapters(model: Any, rank: int, alpha: float, target_modules: Sequence[str], seed: int = 0) -> None:
    """Add adapters to linear maps of the layers and freeze the rest. The same seed gives the same adapters everywhere.

    `target_modules` are the last parts of the maps' names; empty is all. Raises ConfigInvalid for an unknown name.
    """
    layers: nn.Module = model.get_decoder().layers  # without the vision tower
    parents = [(parent, name) for parent in layers.modules() for name in _list_linear_maps(parent)]
    known = sorted({name for _, name in parents})  # such as `q_proj`
    if unknown := [name for name in target_modules if name not in known]:
        problem = f"the layers have no {unknown[0]!r}; they have {', '.join(known)}"
        raise ConfigInvalid(problem, key="trainer.lora.target_modules")
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parent, name in parents:
        if name in (target_modules or known):
            setattr(parent, name, LoraLinear(getattr(parent, name), rank, alpha, generator))


def _list_linear_maps(module: nn.Module) -> list[str]:
    return [name for name, child in module.named_children() if isinstance(child, nn.Linear)]


def quantize_base(model: nn.Module, mode: QuantizeMode, dtype: torch.dtype, device: torch.device) -> None:
    """Quantize the weights beside all adapters, one by one, on the device that they will be on."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.quantize(mode, dtype, device)


def count_bytes_saved_by_quantization(model: nn.Module) -> int:
    """Return how many bytes less a model reads because its matrices are quantized."""
    linears = [module for module in model.modules() if isinstance(module, LoraLinear)]
    return sum(
        linear.in_features * linear.out_features * matrix.scales.itemsize - matrix.codes.nbytes - matrix.scales.nbytes
        for linear in linears
        if (matrix := linear.quantized) is not None
    )


def add_engine_adapters(
    model: Any,
    device: torch.device,
    rank: int,
    alpha: float,
    target_modules: Sequence[str],
    quantize: QuantizeMode | None = None,
) -> None:
    """Add adapters of a running policy to an engine's model, in its dtype; until they are loaded they change nothing.

    If the trainer's matrices are quantized, these are, too. They move to `device` one by one, so that it never holds
    the model in its dtype. On a CPU they are rounded to the same numbers and stay in the dtype.
    """
    add_adapters(model, rank, alpha, target_modules)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            dtype = module.weight.dtype
            module.lora_A.to(dtype)
            module.lora_B.to(dtype)
            if quantize is not None:
                module.quantize(quantize, dtype, device)
                if device.type == "cpu":
                    set_matrix(module, module.get_matrix())
    model.requires_grad_(False)


def iter_base_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights by their names in the base model: without adapters, and dequantized."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        if name.endswith(".weight_codes"):
            module_name = name.removesuffix(".weight_codes")
            yield f"{module_name}.weight", model.get_submodule(module_name).get_matrix()
        elif not is_adapter_weight(name) and not name.endswith(".weight_scales"):
            yield name, tensor.detach()


@contextmanager
def disable_adapters(model: nn.Module) -> Generator[None]:
    """Run the block with the model that training started from. Raises ConfigInvalid if the model has no adapters."""
    linears = [module for module in model.modules() if isinstance(module, LoraLinear)]
    if not linears:
        raise ConfigInvalid(
            "a batch needs the logprobs of the starting model, which a trainer has only with lora.enabled"
        )
    for linear in linears:
        linear.is_enabled = False
    try:
        yield
    finally:
        for linear in linears:
            linear.is_enabled = True


def is_adapter_weight(name: str) -> bool:
    """Return whether a name in a state dict belongs to an adapter."""
    return ADAPTER_INFIX in name


def merge_published_adapters(model: nn.Module, adapters: dict[str, Tensor], settings: PublishedAdapters) -> None:
    """Add published adapters to the weights of their base model, in place."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if get_adapter_names(name)[0] in adapters:
                matrix = weight
                if settings.quantize is not None:
                    matrix = dequantize_matrix(quantize_matrix(weight, settings.quantize))
                weight.copy_(merge_adapter(name, matrix, adapters, settings.scaling))


def get_adapter_names(name: str) -> tuple[str, str]:
    """Return the names of the two matrices of the adapter beside the weight `name`."""
    stem = name.removesuffix(".weight")
    return f"{stem}.lora_A.{ADAPTER_NAME}.weight", f"{stem}.lora_B.{ADAPTER_NAME}.weight"


def merge_adapter(name: str, matrix: Tensor, adapters: dict[str, Tensor], scaling: float) -> Tensor:
    """Return the matrix plus its adapter's product, in float32; the matrix itself if it has no adapter.

    `adapters` maps names in the state dict to the adapters' matrices.
    """
    down_name, up_name = get_adapter_names(name)
    if down_name not in adapters:
        return matrix
    return matrix.float() + scaling * (adapters[up_name].float() @ adapters[down_name].float())
