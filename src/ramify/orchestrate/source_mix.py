"""Which source the next group comes from: each as often as its ratio says, at every moment as nearly as can be.

No dice: the source that is furthest behind its share is next. So a ratio of 3 to 1 holds over four groups as it does
over four thousand, and a run that goes on makes the choices it would have made.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ramify.orchestrate.curriculum import Curriculum

COUNT_KEY_PREFIX = "mix/"  # under these names the ledger keeps how many groups each source gave


class TaskChoice(NamedTuple):
    """A task of a source, and what choosing it changed: to be kept in the ledger with the group."""

    source: str
    task: int
    epoch: int
    state_updates: dict[str, Any]


class SourceMix:
    """Several sources, each with its ratio and its curriculum."""

    def __init__(self, ratios: Mapping[str, float], curricula: Mapping[str, Curriculum]) -> None:
        self._ratios, self._curricula = dict(ratios), dict(curricula)
        self._issued_counts = dict.fromkeys(ratios, 0)
        self._exhausted: set[str] = set()

    def next_task(self) -> TaskChoice | None:
        """The next task; None when no source has any."""
        while live := [name for name in self._ratios if name not in self._exhausted]:
            name = min(live, key=lambda name: (self._issued_counts[name] + 0.5) / self._ratios[name])
            pick = self._curricula[name].next_task()
            if pick is None:
                self._exhausted.add(name)
                continue
            self._issued_counts[name] += 1
            return TaskChoice(
                name,
                pick.task,
                pick.epoch,
                {f"{COUNT_KEY_PREFIX}{name}": self._issued_counts[name], **self._take_changes(name)},
            )
        return None

    def record_reward(self, source: str, task: int, reward: float) -> dict[str, Any]:
        """A group's mean reward; returns what that changed."""
        self._curricula[source].record_reward(task, reward)
        return self._take_changes(source)

    def restore(self, read_state: Callable[[str], Mapping[str, Any]]) -> None:
        """Go on from the ledger: `kept(prefix)` is what it keeps under names that begin so, by the rest of the name."""
        self._issued_counts |= {
            name: given for name, given in read_state(COUNT_KEY_PREFIX).items() if name in self._issued_counts
        }
        for name, curriculum in self._curricula.items():
            curriculum.restore(read_state(f"source/{name}/"))

    def _take_changes(self, source: str) -> dict[str, Any]:
        return {f"source/{source}/{key}": value for key, value in self._curricula[source].take_changes().items()}
