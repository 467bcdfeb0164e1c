"""What the taskset needs from an environment of either generation of verifiers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import ramify as rf


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """A rollout of verifiers: the stop reason, the scores and metrics by name, and its state as plain data.

    `scores` is None if the rollout is scored later, with its group.
    """

    stop: str
    scores: Mapping[str, float] | None = None
    state: dict[str, Any] = field(default_factory=dict[str, Any])


class VerifiersEnvironment(ABC):
    """An environment of verifiers.

    - `generation`: "v0" or "v1".
    - `weights`: the weights of its rewards by name; 0 for metrics.
    - `scores_groups`: whether its rewards see all attempts at a task.
    - `ignored_sampling`: its own sampling parameters, which those of the source replace.
    """

    generation: ClassVar[str]
    weights: Mapping[str, float]
    scores_groups: bool = False
    ignored_sampling: Mapping[str, Any] = {}

    @abstractmethod
    def iter_tasks(self, split: str) -> Iterator[rf.Task]:
        """Yield the tasks of a split, or of the only split that it has."""

    @abstractmethod
    async def run(self, task: rf.Task, endpoint: rf.Endpoint, trace: rf.Trace) -> FinishedRollout:
        """Run one rollout with its model calls to the endpoint, and score it."""

    async def score_group(self, tasks: list[rf.Task], states: list[dict[str, Any]]) -> list[dict[str, float]]:
        """Return the scores of all attempts at a task, from their states as plain data."""
        raise NotImplementedError(f"{self.generation} environments do not score groups")
