"""The states of recurrent layers, such as linear attention, as the code of transformers reads and writes them.

Its layers use a cache object: `probe_state_specs` reads from it which states a model has, and `StepCache` is the cache
object of one forward pass, which begins with the states of some slots.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ramify.core.errors import ModelUnsupported
from ramify.model.device_memory import is_out_of_memory
from ramify.model.kernels.state_pool import StateKind, StateSpec
from ramify.model.logprob_check import describe_error


@torch.no_grad()
def probe_state_specs(module: Any, attn_implementation: str) -> tuple[StateSpec, ...]:
    """Return the states of a model, as one token leaves them in its own cache.

    `attn_implementation` is the one that the model was loaded with, which is restored. Raises ModelUnsupported.
    """
    cache = DynamicCache(config=module.config)
    module.set_attn_implementation("eager")
    try:
        module(input_ids=torch.zeros(1, 1, dtype=torch.long, device=module.device), past_key_values=cache)
    except Exception as error:  # a model with another structure may fail anywhere
        if is_out_of_memory(error):
            raise
        problem = f"{type(module).__name__} cannot compute a token with its own cache"
        raise ModelUnsupported(f"{problem}: {describe_error(error)}") from error
    finally:
        module.set_attn_implementation(attn_implementation)
    specs: list[StateSpec] = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            specs += _list_specs(number, "conv", layer.conv_states)
            specs += _list_specs(number, "recurrent", layer.recurrent_states)
    return tuple(specs)


def _list_specs(layer: int, kind: StateKind, states: Mapping[int, Tensor | None]) -> list[StateSpec]:
    return [
        StateSpec(layer, kind, index, tuple(state.shape[1:]), state.dtype)
        for index, state in states.items()
        if state is not None
    ]


class StepCache(Cache):
    """The cache of one forward pass. Layers change `states`, one batch for each spec, in place."""

    def __init__(self, num_layers: int, specs: Sequence[StateSpec], states: list[Tensor]) -> None:
        self.states = states
        layers: list[Any] = [PagedLayer() for _ in range(num_layers)]
        num_states = {spec.layer: spec.index + 1 for spec in sorted(specs, key=lambda spec: spec.index)}
        for number, count in num_states.items():
            layers[number] = LinearAttentionLayer(number_of_states=count)
        for spec, state in zip(specs, states):
            layer = layers[spec.layer]
            layer.dtype, layer.device = state.dtype, state.device
            layer.has_previous_state[spec.index] = True
            if spec.kind == "conv":
                layer.conv_states[spec.index], layer.conv_kernel_size[spec.index] = state, state.shape[-1]
                layer.is_conv_states_initialized[spec.index] = True
            else:
                layer.recurrent_states[spec.index] = state
                layer.is_recurrent_states_initialized[spec.index] = True
        super().__init__(layers=layers)


class PagedLayer(CacheLayerMixin):
    """The cache of an attention layer, which does nothing: our attention function reads and writes the paged cache."""

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: there is nothing to allocate."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the new tokens."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys for a mask, which our attention function does not read."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always passed to the model."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1
