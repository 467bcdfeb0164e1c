"""TIS: truncated importance sampling. The ratio weighs logπ as a constant, and counts for `cap` at most."""

from ramify.train.losses.entries import Entries, LossTerm


def tis(entries: Entries, *, cap: float = 2.0) -> LossTerm:
    """−sg(min(ρ, cap))·A·logπ."""
    ratio = entries.log_ratio.detach().exp()
    return LossTerm(-ratio.clamp(max=cap) * entries.advantage * entries.logprob)
