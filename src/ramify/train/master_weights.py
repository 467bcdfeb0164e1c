"""float32 master weights for a model that computes in bfloat16.

A master weight is split in two halves of 16 bits: the model's parameter, which is the float32 rounded to bfloat16 with
ties away from zero, and a signed remainder. Together they are the bits of the float32, so there is neither a second
copy of the weights nor a cast. Gradients are collected per parameter as the backward pass produces them. The
gradients of a single pack stay in bfloat16; gradients of several packs are added in float32, so that small
contributions are not rounded away.

In float32, and under FSDP, which keeps its own master weights, the master weights are the model's parameters.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# One call launches a few kernels for all tensors together.
_foreach_mul: Any = torch._foreach_mul_
_foreach_norm: Any = torch._foreach_norm


def split_float32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split numbers into bfloat16 and an int16 remainder, from which `join_float32` makes the same float32 again.

    The remainder is the lower half of the bits, read as a signed number, so that the upper half is the nearest
    bfloat16. A tie has the remainder -32768: it is rounded away from zero. NaNs become one NaN.
    """
    if values.dtype == torch.bfloat16:
        return values, torch.zeros_like(values, dtype=torch.int16)
    bits = values.float().nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join_float32(values: Tensor, remainders: Tensor) -> Tensor:
    """Return the float32 numbers that `split_float32` has split."""
    return ((values.view(torch.int16).int() << 16) + remainders).view(torch.float32)


def round_to_bfloat16(values: Tensor) -> Tensor:
    """Round float32 to bfloat16, ties away from zero; torch rounds ties to even."""
    return split_float32(values)[0]


class MasterWeights:
    """The trained weights of a module in float32, and their gradients.

    The module computes in `dtype`. In bfloat16 the module's parameters become the upper halves of the weights. If
    `device` is given, the module moves to it weight by weight, so that the device never holds a complete copy in the
    stored dtype.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._remainders: dict[nn.Parameter, Tensor] = {}  # of split weights
        self._gradients: dict[nn.Parameter, Tensor] = {}  # of split weights
        self._num_packs = 1
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                self._parameters[name] = parameter
            if parameter.requires_grad and dtype == torch.bfloat16:
                parameter.data, self._remainders[parameter] = split_float32(parameter.data.to(device))
                parameter.register_post_accumulate_grad_hook(self._collect_gradient)
            elif device is not None or parameter.dtype != dtype:
                parameter.data = parameter.data.to(device, dtype)
        if device is not None:
            module.to(device)  # its buffers

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the trained parameters of the model. Parameters of split weights hold the upper half."""
        return iter(self._parameters.items())

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters of the model."""
        return list(self._parameters.values())

    @property
    def is_split(self) -> bool:
        """Whether the weights are split into bfloat16 and remainders."""
        return bool(self._remainders)

    @property
    def supports_fused_adamw(self) -> bool:
        """Whether the weights are split, where Triton's kernels run, and aligned."""
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return self.is_split and all(
            (half.is_cuda or is_interpreted) and half.is_contiguous() and half.data_ptr() % 16 == 0
            for pair in self._remainders.items()
            for half in pair
        )

    def get_remainder(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the remainder of a split weight; None for another."""
        return self._remainders.get(parameter)

    def to_float32(self, parameter: nn.Parameter) -> Tensor:
        """Return a weight in float32: joined on the host if it is split, otherwise the parameter itself."""
        remainder = self._remainders.get(parameter)
        return parameter.detach() if remainder is None else join_float32(parameter.detach().cpu(), remainder.cpu())

    def set_float32(self, parameter: nn.Parameter, part: tuple[slice, ...], values: Tensor) -> None:
        """Replace a part of a split weight by float32 values."""
        upper, remainder = split_float32(values)
        parameter.data[part].copy_(upper)
        self._remainders[parameter][part].copy_(remainder)

    @contextmanager
    @torch.no_grad()
    def joined(self, parameters: Iterable[nn.Parameter], *, keep: bool = True) -> Iterator[None]:
        """Inside the block, these parameters are float32 and have their gradients; then they are split again.

        If the block fails, the changes of split weights are undone. With `keep=False`, all changes are undone; unsplit
        weights are restored from a copy in host memory.
        """
        parameters = list(parameters)
        split = {parameter: parameter.data for parameter in parameters if parameter in self._remainders}
        unsplit = [] if keep else [_get_local(parameter) for parameter in parameters if parameter not in split]
        copies = [values.to("cpu", copy=True) for values in unsplit]
        try:
            for parameter in split:
                parameter.data = join_float32(parameter.data, self._remainders[parameter])
                gradient = self._gradients.get(parameter)
                parameter.grad = None if gradient is None else gradient.float()
            yield
            joined = {parameter: parameter.data for parameter in split}
        finally:
            for parameter, upper in split.items():  # their memory stays the same: engines copy from it
                parameter.grad = None
                parameter.data = upper
            for values, copy in zip(unsplit, copies, strict=True):
                values.copy_(copy)
        for parameter, values in joined.items():
            upper, remainder = split_float32(values)  # also if nothing is kept: a trial allocates what an update does
            if keep:
                split[parameter].copy_(upper)
                self._remainders[parameter].copy_(remainder)

    def zero_grad(self, *, num_packs: int = 1) -> None:
        """Drop all gradients. `num_packs` is the number of backward passes whose gradients will be summed."""
        self._num_packs = num_packs
        self._gradients.clear()
        for parameter in self.parameters():
            parameter.grad = None

    def allocate_gradients(self) -> None:
        """Set all gradients to 0, in float32 for split weights, as when several packs are summed."""
        self.zero_grad()
        for parameter in self.parameters():
            if parameter in self._remainders:
                self._gradients[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
            else:
                parameter.grad = torch.zeros_like(parameter)

    @torch.no_grad()
    def _collect_gradient(self, parameter: Tensor) -> None:
        """Take the gradient that the backward pass has just produced, and add it to the earlier ones in float32."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        assert isinstance(parameter, nn.Parameter)
        total = self._gradients.get(parameter)
        if total is not None:
            self._gradients[parameter] = total.float().add_(gradient)
        else:
            self._gradients[parameter] = gradient if self._num_packs == 1 else gradient.float()

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients by parameter: bfloat16 for a single pack of a bfloat16 model, else float32."""
        return {**{item: item.grad for item in self.parameters() if item.grad is not None}, **self._gradients}

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients, in float32, without waiting for the device."""
        gradients = list(self.gradients().values())
        if not gradients:
            return torch.zeros((), device=self.parameters()[0].device)
        return torch.stack(_foreach_norm(gradients, 2, dtype=torch.float32)).norm()

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradients, in float32, to at most this norm, as `clip_grad_norm_` does; returns their norm."""
        self._gradients = {parameter: gradient.float() for parameter, gradient in self._gradients.items()}
        gradients = list(self.gradients().values())
        norm = nn.utils.get_total_norm(gradients)
        if gradients:
            _foreach_mul(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


def _get_local(parameter: nn.Parameter) -> Tensor:
    """Return this rank's part of a parameter, in the memory of the parameter."""
    to_local: Any = getattr(parameter, "to_local", None)
    return parameter.data if to_local is None else to_local()
