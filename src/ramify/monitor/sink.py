"""What a monitor has to do. It is called from one thread, its own, and may raise anything."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ramify.monitor.rollout_samples import RolloutSample


class Sink(Protocol):
    """One place for numbers and samples."""

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step; a step may come several times, with other names."""
        ...

    def log_samples(self, step: int, samples: Sequence[RolloutSample]) -> None:
        """A few rollouts of a step."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...
