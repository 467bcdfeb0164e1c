"""Cross entropy: the loss of supervised training."""

from ramify.train.losses.entries import Entries, Term


def ce(entries: Entries) -> Term:
    """−logπ."""
    return Term(-entries.logprob)
