"""Loss functions: each maps the columns of `Entries` to one value per entry.

The loss of a batch is Σ over components c of (1/N_c) Σ w_c·ℓ_c, where N_c counts the entries of component c in the
whole batch. For `rl`, ℓ is one of `LOSSES` or any function with the same signature, given by import path; `ce`,
`ref_kl` and `kl` are fixed. In the formulas π is the trained policy, π_s the policy that sampled, ρ = π/π_s, A the
advantage, and sg(x) passes no gradient. A loss only calls methods of tensors, so this module is importable without
torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ramify.core.config import load_hints
from ramify.core.errors import ConfigInvalid
from ramify.core.names import suggest
from ramify.env.plugin import load_module_from_file

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, frozen=True, eq=False)
class Entries:
    """The entries that one component trains, by column; logprobs are taken at each entry's sampling temperature.

    - `logprob`: under the trained policy; gradients flow through it.
    - `sampler_logprob`: under the policy that sampled; NaN for entries that only `ce` trains.
    - `advantage`: the advantage of each entry.
    - `reference_logprob`: under the reference model; NaN where it is unknown.
    - `sequence_index`: the model call that each entry belongs to, from 0 to `num_sequences` - 1.
    - `top_logprob`, `reference_top_logprob`: under the trained policy and the reference model, the logprobs of the
      likeliest tokens of the reference [entries, k]; -inf where an entry has fewer. None unless `ref_kl` uses them.
    """

    logprob: Tensor
    sampler_logprob: Tensor
    advantage: Tensor
    reference_logprob: Tensor
    sequence_index: Tensor
    num_sequences: int
    top_logprob: Tensor | None = None
    reference_top_logprob: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """log ρ = log π − log π_s."""
        return self.logprob - self.sampler_logprob

    def mean_by_sequence(self, values: Tensor) -> Tensor:
        """Return for each entry the mean of `values` over all entries of its model call."""
        zeros = values.new_zeros(self.num_sequences)
        counts = zeros.index_add(0, self.sequence_index, values.detach() * 0 + 1)
        return (zeros.index_add(0, self.sequence_index, values) / counts.clamp(min=1))[self.sequence_index]


class LossTerm(NamedTuple):
    """The result of a loss function: the loss of each entry, and which entries it masked.

    An entry is masked if it was dropped, or clipped so that no gradient flows through it.
    """

    loss: Tensor
    masked: Tensor | None = None


LossFunction = Callable[[Entries], LossTerm]

MIN_REST = 1e-6  # smallest probability of all tokens but the likeliest ones; below it, float32 has rounding errors only


def ce(entries: Entries) -> LossTerm:
    """Cross entropy, the loss of supervised training: −log π."""
    return LossTerm(-entries.logprob)


def ref_kl(entries: Entries, *, tau: float = 1e-3) -> LossTerm:
    """Reverse KL to the reference model, estimated on sampled tokens: −sg(log π_ref − log π)·ρ + τ·(log ρ)².

    Entries with the likeliest tokens of the reference have the KL over these and the rest instead.
    """
    log_ratio = entries.log_ratio
    gap = (entries.reference_logprob - entries.logprob).detach()
    loss = -gap * log_ratio.exp() + tau * log_ratio**2
    if entries.top_logprob is None or entries.reference_top_logprob is None:
        return LossTerm(loss)
    has_top = entries.reference_top_logprob.isfinite().any(1)
    return LossTerm(compute_top_kl(entries.top_logprob, entries.reference_top_logprob).where(has_top, loss))


def compute_top_kl(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Return Σ π·(log π − log π_ref) over the given tokens [entries, k] and, as one more outcome, all other tokens.

    Outcomes that are merged differ less than they do one by one, so this is a lower bound of the KL. It is equal to the
    KL if the tokens are the whole vocabulary. A logprob of -inf under the reference means that there is no token.
    """
    present = reference_logprob.isfinite()
    probability = logprob.exp() * present
    reference = reference_logprob.masked_fill(~present, 0.0)
    reference_probability = reference.exp() * present
    rest, reference_rest = ((1 - p.sum(1)).clamp(min=MIN_REST) for p in (probability, reference_probability))
    return (probability * (logprob - reference)).sum(1) + rest * (rest.log() - reference_rest.log())


def kl(entries: Entries) -> LossTerm:
    """Penalty for the distance to the reference model, the k3 estimator: e^d − d − 1 with d = log π_ref − log π."""
    gap = entries.reference_logprob - entries.logprob
    return LossTerm(gap.exp() - gap - 1)


def dppo(entries: Entries, *, low: float = 0.2, high: float = 0.2, tau: float = 1e-3) -> LossTerm:
    """DPPO: −A·ρ + τ·(log ρ)², masked where the probability already moved too far in the direction of the advantage.

    That is where A > 0 and π − π_s > high, or A < 0 and π − π_s < −low.
    """
    log_ratio = entries.log_ratio
    gap = (entries.logprob.exp() - entries.sampler_logprob.exp()).detach()
    masked = ((entries.advantage > 0) & (gap > high)) | ((entries.advantage < 0) & (gap < -low))
    return LossTerm((-entries.advantage * log_ratio.exp() + tau * log_ratio**2).masked_fill(masked, 0.0), masked)


def ppo(entries: Entries, *, low: float = 0.2, high: float = 0.2) -> LossTerm:
    """PPO, the more pessimistic of the plain and the clipped objective: −min(ρ·A, clip(ρ, 1 − low, 1 + high)·A)."""
    return _clipped_objective(entries.log_ratio.exp(), entries.advantage, low, high)


def gspo(entries: Entries, *, low: float = 3e-4, high: float = 4e-4) -> LossTerm:
    """GSPO: PPO's objective with one ratio per model call, exp(mean of log ρ over its entries)."""
    ratio = entries.mean_by_sequence(entries.log_ratio).exp()
    return _clipped_objective(ratio, entries.advantage, low, high)


def _clipped_objective(ratio: Tensor, advantage: Tensor, low: float, high: float) -> LossTerm:
    plain, clipped = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
    return LossTerm(-plain.minimum(clipped), clipped < plain)


def cispo(entries: Entries, *, low: float = 1.0, high: float = 4.0) -> LossTerm:
    """CISPO, in which every entry keeps a gradient: −sg(clip(ρ, 1 − low, 1 + high))·A·log π."""
    ratio = entries.log_ratio.detach().exp()
    return LossTerm(-ratio.clamp(1 - low, 1 + high) * entries.advantage * entries.logprob)


def icepop(entries: Entries, *, low: float = 0.5, high: float = 5.0) -> LossTerm:
    """IcePop: −A·ρ where low <= ρ <= high; entries on which trainer and sampler disagree more are masked."""
    ratio = entries.log_ratio.exp()
    masked = (ratio.detach() < low) | (ratio.detach() > high)
    return LossTerm((-entries.advantage * ratio).masked_fill(masked, 0.0), masked)


def tis(entries: Entries, *, cap: float = 2.0) -> LossTerm:
    """Truncated importance sampling: −sg(min(ρ, cap))·A·log π."""
    ratio = entries.log_ratio.detach().exp()
    return LossTerm(-ratio.clamp(max=cap) * entries.advantage * entries.logprob)


LOSSES = {loss.__name__: loss for loss in (dppo, ppo, cispo, gspo, icepop, tis)}
"""The losses that the `rl` component can name."""


def load_loss(id: str, options: Mapping[str, Any] | None = None) -> LossFunction:
    """Return a built-in loss, or one given as `package.module.function` or `file.py:function`, with its options bound.

    Raises ConfigInvalid if it does not exist or does not take these options.
    """
    function = LOSSES.get(id) or _import_loss(id)
    _check_options(id, function, options or {})
    loss = partial(function, **(options or {}))
    return loss if id in LOSSES else partial(_check_per_entry, id, loss)


def _check_options(id: str, function: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigInvalid for an option that the loss does not take, or for a required option that is missing."""
    keywords = [param for param in inspect.signature(function).parameters.values() if param.kind is param.KEYWORD_ONLY]
    known = [param.name for param in keywords]
    if missing := [param.name for param in keywords if param.default is param.empty and param.name not in options]:
        raise ConfigInvalid(f"loss {id!r} needs the option {missing[0]!r}")
    for name in options:
        if name not in known:
            hint = suggest(name, known, f"it takes {', '.join(known) or 'none'}")
            raise ConfigInvalid(f"loss {id!r} has no option {name!r}; {hint}")


def _import_loss(id: str) -> Any:
    module, _, name = id.replace(":", ".").rpartition(".")
    if not module:
        names = f"{', '.join(LOSSES)}, or your own function, package.module.function or file.py:function"
        known_hint = load_hints("losses").get(id)
        hint = known_hint.replace("{}", names) if known_hint else suggest(id, LOSSES, f"use {names}")
        raise ConfigInvalid(f"there is no loss {id!r}; {hint}")
    file, _, file_function = id.partition(":")
    if file.endswith(".py") and not file_function:
        raise ConfigInvalid(f"loss {id!r} is a file; expected one of its functions, such as {file}:my_loss")
    try:
        if file.endswith(".py"):
            function = getattr(load_module_from_file(Path(file)), file_function)
        else:
            function = getattr(import_module(module), name)
    except Exception as error:  # a foreign module may raise anything
        raise ConfigInvalid(f"loss {id!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigInvalid(f"loss {id!r} is not a function, but {type(function).__name__}")
    return function


def _check_per_entry(id: str, loss: LossFunction, entries: Entries) -> LossTerm:
    """Call a custom loss and check that it returns one value per entry; a mean would depend on the packing."""
    term = loss(entries)
    tensors = [tensor for tensor in term if tensor is not None] if isinstance(term, LossTerm) else []
    if not tensors or any(tensor.shape != entries.logprob.shape for tensor in tensors):
        raise ConfigInvalid(f"loss {id!r} must return a LossTerm with one number for each entry, not a mean or sum")
    return term
