"""CISPO: the ratio is a clipped constant that weighs logπ, so every entry keeps a gradient."""

from ramify.train.losses.entries import Entries, Term


def cispo(entries: Entries, *, low: float = 1.0, high: float = 4.0) -> Term:
    """−sg(clip(ρ, 1 − low, 1 + high))·A·logπ."""
    ratio = entries.log_ratio.detach().exp()
    return Term(-ratio.clamp(1 - low, 1 + high) * entries.advantage * entries.logprob)
