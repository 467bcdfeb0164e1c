"""float32 master weights under a computation in bfloat16.

The model computes on rounded copies; the gradients of several packs are added up at the masters in float32, so that
neither many packs nor small updates are lost to rounding. Those of a single pack are held as they are until somebody
wants them. In float32, and under FSDP, which keeps masters and copies by itself, the masters are the parameters.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_foreach_copy: Any = torch._foreach_copy_  # a few launches for all tensors  # pyright: ignore[reportPrivateImportUsage]
_foreach_add: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]
_foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]


class MasterWeights:
    """The trained weights of a module by name, in float32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self._pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self._pending_grads: dict[nn.Parameter, Tensor] = {}  # master: the copy's gradient, while there is only one
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
            elif parameter.dtype == dtype:
                self._pairs[name] = (parameter, parameter)
            else:
                master = nn.Parameter(parameter.data.float())
                parameter.data = parameter.data.to(dtype)
                self._pairs[name] = (master, parameter)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer updates and a checkpoint holds. After writing to them, call `sync`."""
        return ((name, master) for name, (master, _) in self._pairs.items())

    def parameters(self) -> list[nn.Parameter]:
        return [master for _, master in self.named_parameters()]

    @property
    def supports_fused_adamw(self) -> bool:
        """Whether they are what `ramify.train.fused_adamw` updates: float32 on a GPU, each under a copy in bfloat16."""
        kinds = {(master.dtype, copy.dtype) for master, copy in self._pairs.values()}
        even = all(each.is_cuda and each.is_contiguous() and each.data_ptr() % 16 == 0 for each in self.parameters())
        return kinds == {(torch.float32, torch.bfloat16)} and even

    def model_copies(self) -> dict[nn.Parameter, nn.Parameter]:
        """What the model computes on, by master, where that is not the master itself."""
        return {master: copy for master, copy in self._pairs.values() if copy is not master}

    def zero_grad(self) -> None:
        self._pending_grads.clear()
        for master, copy in self._pairs.values():
            master.grad = copy.grad = None

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Take what a backward pass has left at the copies: the first is held, more are added in float32."""
        self.upcast_gradients()
        sums: list[tuple[Tensor, Tensor]] = []
        for master, copy in self.model_copies().items():
            if copy.grad is None:
                continue
            if master.grad is None:
                self._pending_grads[master] = copy.grad
            else:
                sums.append((master.grad, copy.grad))
            copy.grad = None
        if sums:
            _foreach_add(*map(list, zip(*sums)))

    @torch.no_grad()
    def upcast_gradients(self) -> None:
        """Make all gradients the masters' own, in float32."""
        for master in self._pending_grads:
            master.grad = torch.empty_like(master)
        if self._pending_grads:
            _foreach_copy([master.grad for master in self._pending_grads], list(self._pending_grads.values()))
        self._pending_grads.clear()

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """By master, as they are: of one pack in the dtype of the copies, sums in float32."""
        settled = {master: master.grad for master in self.parameters() if master.grad is not None}
        return {**settled, **self._pending_grads}

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Of all gradients as they are, in float32; the host need not wait for it."""
        found = list(self.gradients().values())
        if not found:
            return torch.zeros((), device=self.parameters()[0].device)
        return torch.stack(_foreach_norm(found, 2, dtype=torch.float32)).norm()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the masters into the model."""
        if copies := self.model_copies():
            _foreach_copy(list(copies.values()), list(copies))
