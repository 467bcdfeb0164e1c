"""Detects rollouts without a training signal: all attempts at a task earned the same reward."""

import numpy as np

from ramify.orchestrate.filters.base import Filter, FilterInput
from ramify.trace import Annotation

ZERO_TOLERANCE = 1e-8


class ZeroAdvantage(Filter):
    """Fires if every advantage is zero and no other loss component is trained."""

    def fires(self, rollout: FilterInput) -> bool:
        """Return whether no annotation of the rollout has an effect."""
        return not any(_has_effect(annotation) for annotation in rollout.annotations)


def _has_effect(annotation: Annotation) -> bool:
    advantage, ce = annotation.advantage, annotation.ce
    if isinstance(advantage, int | float) and isinstance(ce, int | float):  # numpy takes ten times as long
        return abs(advantage) > ZERO_TOLERANCE or ce != 0 or annotation.needs_reference
    return bool(np.any(np.abs(advantage) > ZERO_TOLERANCE) or np.any(ce) or annotation.needs_reference)
