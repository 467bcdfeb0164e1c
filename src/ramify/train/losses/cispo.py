"""CISPO: the ratio is a clipped constant that weighs logπ, so every entry keeps a gradient."""

from ramify.train.losses.entries import Entries, LossTerm


def cispo(entries: Entries, *, low: float = 1.0, high: float = 4.0) -> LossTerm:
    """−sg(clip(ρ, 1 − low, 1 + high))·A·logπ."""
    ratio = entries.log_ratio.detach().exp()
    return LossTerm(-ratio.clamp(1 - low, 1 + high) * entries.advantage * entries.logprob)
