"""Detects rollouts without a training signal: all attempts at a task earned the same reward."""

import numpy as np

from ramify.orchestrate.filters.base import Filter, FilterInput

ZERO_TOLERANCE = 1e-8


class ZeroAdvantage(Filter):
    """Fires if every advantage is zero and no other loss component is trained."""

    def fires(self, rollout: FilterInput) -> bool:
        """Return whether no annotation of the rollout has an effect."""
        return not any(
            np.any(np.abs(annotation.advantage) > ZERO_TOLERANCE) or np.any(annotation.ce) or annotation.needs_reference
            for annotation in rollout.annotations
        )
