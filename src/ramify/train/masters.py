"""float32 master weights under a computation in bfloat16.

The model computes on rounded copies; each gradient is added to the master's in float32 as soon as it is complete, so
that neither many packs nor small updates are lost to rounding. In float32, and under FSDP, which keeps masters and
copies by itself, the masters are the parameters.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn


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
                parameter.register_post_accumulate_grad_hook(_collect(master))
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
    def sync(self) -> None:
        """Round the masters into the model."""
        pairs = [(master, copy) for master, copy in self._pairs.values() if copy is not master]
        if pairs:
            masters, copies = zip(*pairs)
            torch._foreach_copy_(copies, masters)  # one launch  # pyright: ignore[reportPrivateImportUsage]


def _collect(master: nn.Parameter):  # noqa: ANN202 - a hook
    def hook(parameter: Tensor) -> None:
        grad = parameter.grad
        if grad is not None:
            master.grad = grad.float() if master.grad is None else master.grad.add_(grad)
        parameter.grad = None

    return hook
