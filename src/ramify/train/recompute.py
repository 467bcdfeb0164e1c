"""Layers whose activations the backward pass recomputes, instead of keeping them.

Layers of transformers call `_run_recomputed` if their flag is set. The layer may be compiled: the compiled code is
reused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def count_recomputable_layers(model: Any) -> int:
    """Return the number of decoder layers that can be recomputed."""
    return sum(isinstance(layer, GradientCheckpointingLayer) for layer in model.get_decoder().layers)


def recompute_layers(model: Any, count: int) -> None:
    """Recompute the first `count` decoder layers of a transformers model, and its vision tower if `count` is not 0.

    The first layers save the most: when they are recomputed, the activations of the others are no longer needed.
    """
    numbers = {layer: number for number, layer in enumerate(model.get_decoder().layers)}
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = numbers.get(module, 0) < count
            vars(module)["_gradient_checkpointing_func"] = _run_recomputed


def _run_recomputed(layer: Callable[..., Any], *args: Any) -> Any:
    """Run a layer without keeping its activations. Dropout is disabled, so random state need not be restored."""
    contexts: Any = {"context_fn": lambda: (nullcontext(), _recompute_context())}
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, **contexts)


@contextmanager
def _recompute_context() -> Iterator[None]:
    """Enter before a layer is recomputed, which happens in a thread of autograd."""
    if torch.cuda.is_available():
        set_triton_allocator()
    yield


def set_triton_allocator() -> None:
    """Set Triton's allocator in this thread; code compiled by torch 2.13 sets it only in the thread that ran first."""
    from ramify.model.kernels.cuda import tree_attention  # needs Triton: a torch for CUDA brings it

    tree_attention.set_triton_allocator()
