"""Picks the source of the next group, so that the sources keep their ratios at every moment.

The choice is deterministic: the source that is furthest behind its share is next. So a ratio of 3 to 1 holds over four
groups as it does over four thousand, and a resumed run makes the choices it would have made.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ramify.orchestrate.curriculum import Curriculum

COUNT_KEY_PREFIX = "mix/"  # of the ledger keys for the number of groups issued per source


class TaskChoice(NamedTuple):
    """A task of a source, and the state that changed with the choice, to be stored with the group."""

    source: str
    task: int
    epoch: int
    state_updates: dict[str, Any]


class SourceMix:
    """The train sources, each with a ratio and a curriculum."""

    def __init__(self, ratios: Mapping[str, float], curricula: Mapping[str, Curriculum]) -> None:
        self._ratios, self._curricula = dict(ratios), dict(curricula)
        self._issued_counts = dict.fromkeys(ratios, 0)
        self._exhausted: set[str] = set()

    def next_task(self) -> TaskChoice | None:
        """Return the next task; None if all sources are exhausted."""
        while names := [name for name in self._ratios if name not in self._exhausted]:
            name = min(names, key=lambda name: (self._issued_counts[name] + 0.5) / self._ratios[name])
            pick = self._curricula[name].next_task()
            if pick is None:
                self._exhausted.add(name)
                continue
            self._issued_counts[name] += 1
            count = {f"{COUNT_KEY_PREFIX}{name}": self._issued_counts[name]}
            return TaskChoice(name, pick.task, pick.epoch, {**count, **self._take_changes(name)})
        return None

    def record_reward(self, source: str, task: int, reward: float) -> dict[str, Any]:
        """Tell a curriculum the mean reward of a group, and return the state that changed."""
        self._curricula[source].record_reward(task, reward)
        return self._take_changes(source)

    def restore(self, read_state: Callable[[str], Mapping[str, Any]]) -> None:
        """Restore the state; `read_state(prefix)` returns the stored values by key, without the prefix."""
        counts = read_state(COUNT_KEY_PREFIX)
        self._issued_counts |= {name: count for name, count in counts.items() if name in self._issued_counts}
        for name, curriculum in self._curricula.items():
            curriculum.restore(read_state(f"source/{name}/"))

    def _take_changes(self, source: str) -> dict[str, Any]:
        return {f"source/{source}/{key}": value for key, value in self._curricula[source].take_changes().items()}
