"""Losses by name. Each is one short pure function of `Entries`; the trainer adds them up and knows no algorithm.

The loss of a batch is Σ over components c of (1/N_c) Σ w_c·ℓ_c. `rl` is one of `LOSSES` or any function with their
signature, given as an import path; `ce` and `ref_kl` are always themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Any

from ramify.errors import ConfigInvalid
from ramify.train.losses.ce import ce
from ramify.train.losses.cispo import cispo
from ramify.train.losses.dppo import dppo
from ramify.train.losses.entries import Entries, LossFunction, LossTerm
from ramify.train.losses.gspo import gspo
from ramify.train.losses.icepop import icepop
from ramify.train.losses.ppo import ppo
from ramify.train.losses.ref_kl import ref_kl
from ramify.train.losses.tis import tis

LOSSES = {each.__name__: each for each in (dppo, ppo, cispo, gspo, icepop, tis)}

__all__ = ["LOSSES", "Entries", "LossFunction", "LossTerm", "ce", "check_loss_options", "load_loss", "ref_kl"]


def load_loss(id: str, options: Mapping[str, Any] | None = None) -> LossFunction:
    """The loss of a built-in name or of an import path (`package.module.function`), with its options set."""
    function = LOSSES.get(id) or _import_loss(id)
    check_loss_options(id, function, options or {})
    loss = partial(function, **(options or {}))
    return loss if id in LOSSES else partial(_check_per_entry, id, loss)


def check_loss_options(id: str, function: Any, options: Mapping[str, Any]) -> None:
    """Refuse an option the loss does not take, naming the nearest one it does, and the lack of one that it needs."""
    keywords = [each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    known = [each.name for each in keywords]
    if missing := [each.name for each in keywords if each.default is each.empty and each.name not in options]:
        raise ConfigInvalid(f"loss {id!r} needs the option {missing[0]!r}")
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known) or 'none'}"
            raise ConfigInvalid(f"loss {id!r} has no option {name!r}{hint}")


def _import_loss(id: str) -> Any:
    module, _, name = id.replace(":", ".").rpartition(".")
    if not module:
        near = get_close_matches(id, LOSSES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"built in are {', '.join(LOSSES)}"
        raise ConfigInvalid(f"there is no loss {id!r}; {hint}")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # whatever somebody else's module raises
        raise ConfigInvalid(f"loss {id!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigInvalid(f"loss {id!r} is no function, but {type(found).__name__}")
    return found


def _check_per_entry(id: str, loss: LossFunction, entries: Entries) -> LossTerm:
    """What somebody else's loss says. A mean would depend on how a batch was packed."""
    term = loss(entries)
    said = [each for each in term if each is not None] if isinstance(term, LossTerm) else []
    if not said or any(each.shape != entries.logprob.shape for each in said):
        raise ConfigInvalid(f"loss {id!r} has to return a Term with one number for each entry, and no mean or sum")
    return term
