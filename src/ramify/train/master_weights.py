"""float32 master weights for a model that computes in bfloat16.

The model computes with rounded copies; ties are rounded away from zero. Gradients of several packs are summed at the
master weights in float32, so that rounding loses neither small updates nor contributions of many packs. The gradients
of a single pack stay in the model's dtype until they are needed. In float32, and under FSDP, which keeps its own master
weights, the master weights are the model's parameters.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# One call launches a few kernels for all tensors together.
_foreach_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_foreach_add: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
_foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]


def round_to_bfloat16(values: Tensor) -> Tensor:
    """Round float32 to bfloat16, ties away from zero; torch rounds ties to even."""
    high_bits = (values.view(torch.int32) + 0x8000) >> 16
    return high_bits.to(torch.int16).view(torch.bfloat16).masked_fill(values.isnan(), torch.nan)


class MasterWeights:
    """The trained weights of a module in float32, and their gradients."""

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self._pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}  # name: (master weight, model parameter)
        self._pending_grads: dict[nn.Parameter, Tensor] = {}  # master: the model's gradient, while there is only one
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
            elif parameter.dtype == dtype:
                self._pairs[name] = (parameter, parameter)
            else:
                master = nn.Parameter(parameter.data.float())
                parameter.data = round_to_bfloat16(master.data)
                self._pairs[name] = (master, parameter)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the weights that the optimizer updates. After writing to them, call `copy_to_model`."""
        return ((name, master) for name, (master, _) in self._pairs.items())

    def parameters(self) -> list[nn.Parameter]:
        """Return the master weights."""
        return [master for _, master in self.named_parameters()]

    @property
    def supports_fused_adamw(self) -> bool:
        """Whether every master weight is float32 on a GPU, aligned, and has a bfloat16 copy in the model."""
        dtype_pairs = {(master.dtype, model_param.dtype) for master, model_param in self._pairs.values()}
        all_aligned = all(
            master.is_cuda and master.is_contiguous() and master.data_ptr() % 16 == 0 for master in self.parameters()
        )
        return dtype_pairs == {(torch.float32, torch.bfloat16)} and all_aligned

    def model_copies(self) -> dict[nn.Parameter, nn.Parameter]:
        """Return the model's parameter of each master weight that is not itself the model's parameter."""
        return {master: model_param for master, model_param in self._pairs.values() if model_param is not master}

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._pending_grads.clear()
        for master, model_param in self._pairs.values():
            master.grad = model_param.grad = None

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Take the gradients that a backward pass left in the model: keep the first, add later ones in float32."""
        self.upcast_gradients()
        sums: list[tuple[Tensor, Tensor]] = []
        for master, model_param in self.model_copies().items():
            if model_param.grad is None:
                continue
            if master.grad is None:
                self._pending_grads[master] = model_param.grad
            else:
                sums.append((master.grad, model_param.grad))
            model_param.grad = None
        if sums:
            _foreach_add(*map(list, zip(*sums)))

    @torch.no_grad()
    def upcast_gradients(self) -> None:
        """Move all gradients to the master weights, in float32."""
        for master in self._pending_grads:
            master.grad = torch.empty_like(master)
        if self._pending_grads:
            _foreach_copy([master.grad for master in self._pending_grads], list(self._pending_grads.values()))
        self._pending_grads.clear()

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return the gradients by master weight: in the model's dtype after one pack, in float32 after several."""
        summed = {master: master.grad for master in self.parameters() if master.grad is not None}
        return {**summed, **self._pending_grads}

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients, in float32, without waiting for the device."""
        gradients = list(self.gradients().values())
        if not gradients:
            return torch.zeros((), device=self.parameters()[0].device)
        return torch.stack(_foreach_norm(gradients, 2, dtype=torch.float32)).norm()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the master weights into the model."""
        for master, model_param in self.model_copies().items():
            model_param.copy_(round_to_bfloat16(master))
