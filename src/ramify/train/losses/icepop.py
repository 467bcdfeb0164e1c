"""IcePop: entries on which trainer and sampler disagree too much, either way, are left out."""

from ramify.train.losses.entries import Entries, LossTerm


def icepop(entries: Entries, *, low: float = 0.5, high: float = 5.0) -> LossTerm:
    """−A·ρ where low <= ρ <= high, nothing elsewhere."""
    ratio = entries.log_ratio.exp()
    masked = (ratio.detach() < low) | (ratio.detach() > high)
    return LossTerm((-entries.advantage * ratio).masked_fill(masked, 0.0), masked)
