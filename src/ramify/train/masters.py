"""float32 master weights under a computation in bfloat16.

The model computes on rounded copies; after each pack their gradients are added to the masters' in float32, so that
neither many packs nor small updates are lost to rounding. In float32, and under FSDP, which keeps masters and copies by
itself, the masters are the parameters.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_COPY: Any = torch._foreach_copy_  # a few launches for all tensors  # pyright: ignore[reportPrivateImportUsage]
_ADD: Any = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]


class Masters:
    """The trained weights of a module by name, in float32."""

    def __init__(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self._pairs: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
            elif parameter.dtype == dtype:
                self._pairs[name] = (parameter, parameter)
            else:
                master = nn.Parameter(parameter.data.float())
                parameter.data = parameter.data.to(dtype)
                self._pairs[name] = (master, parameter)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the optimizer updates and a checkpoint holds. After writing to them, call `sync`."""
        return ((name, master) for name, (master, _) in self._pairs.items())

    def parameters(self) -> list[nn.Parameter]:
        return [master for _, master in self.named()]

    def zero_grad(self) -> None:
        for master in self.parameters():
            master.grad = None

    @torch.no_grad()
    def collect(self) -> None:
        """Add what a backward pass has left at the copies to the masters' gradients."""
        first: list[tuple[Tensor, Tensor]] = []
        more: list[tuple[Tensor, Tensor]] = []
        for master, copy in self._copies():
            if copy.grad is None:
                continue
            if master.grad is None:
                master.grad = torch.empty_like(master)
                first.append((master.grad, copy.grad))
            else:
                more.append((master.grad, copy.grad))
            copy.grad = None
        for pairs, put in ((first, _COPY), (more, _ADD)):
            if pairs:
                put(*map(list, zip(*pairs)))

    @torch.no_grad()
    def sync(self) -> None:
        """Round the masters into the model."""
        if pairs := self._copies():
            masters, copies = zip(*pairs)
            _COPY(copies, masters)

    def _copies(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(master, copy) for master, copy in self._pairs.values() if copy is not master]
