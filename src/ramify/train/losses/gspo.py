"""GSPO: one ratio for all tokens of a model call, the geometric mean of theirs, clipped as in PPO."""

from ramify.train.losses.entries import Entries, LossTerm


def gspo(entries: Entries, *, low: float = 3e-4, high: float = 4e-4) -> LossTerm:
    """−min(s·A, clip(s, 1 − low, 1 + high)·A) with s = exp(mean of lr over the call)."""
    ratio, advantage = entries.mean_by_sequence(entries.log_ratio).exp(), entries.advantage
    plain, clipped = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
    return LossTerm(-plain.minimum(clipped), clipped < plain)
