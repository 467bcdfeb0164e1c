"""DPPO: drop what has already moved far in the direction the advantage asks for, measured in probability."""

from ramify.train.losses.entries import Entries, LossTerm


def dppo(entries: Entries, *, low: float = 0.2, high: float = 0.2, tau: float = 1e-3) -> LossTerm:
    """−A·ρ + τ·lr², nothing where A > 0 and π − π_s > high, or A < 0 and π − π_s < −low."""
    lr = entries.log_ratio
    gap = (entries.logprob.exp() - entries.sampler_logprob.exp()).detach()
    masked = ((entries.advantage > 0) & (gap > high)) | ((entries.advantage < 0) & (gap < -low))
    return LossTerm((-entries.advantage * lr.exp() + tau * lr**2).masked_fill(masked, 0.0), masked)
