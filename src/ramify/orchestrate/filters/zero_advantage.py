"""Rollouts that teach nothing: all attempts at a task earned the same."""

import numpy as np

from ramify.orchestrate.filters.base import Filter, FilterConfig, FilterInput

ZERO_TOLERANCE = 1e-8


class ZeroAdvantage(Filter):
    """Fires when no token is trained for anything but an advantage, and every advantage is zero."""

    config: FilterConfig

    def fires(self, rollout: FilterInput) -> bool:
        return not any(
            np.any(np.abs(note.advantage) > ZERO_TOLERANCE) or np.any(note.ce) or np.any(note.ref_kl)
            for note in rollout.annotations
        )
