"""PPO: the ratio is clipped, and the more pessimistic of the clipped and the plain objective counts."""

from ramify.train.losses.entries import Entries, LossTerm


def ppo(entries: Entries, *, low: float = 0.2, high: float = 0.2) -> LossTerm:
    """−min(ρ·A, clip(ρ, 1 − low, 1 + high)·A)."""
    ratio, advantage = entries.log_ratio.exp(), entries.advantage
    plain, clipped = ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage
    return LossTerm(-plain.minimum(clipped), clipped < plain)
