"""Cross entropy: the loss of supervised training."""

from ramify.train.losses.entries import Entries, LossTerm


def ce(entries: Entries) -> LossTerm:
    """−logπ."""
    return LossTerm(-entries.logprob)
