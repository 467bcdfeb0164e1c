"""Which source the next group comes from: each as often as its ratio says, at every moment as nearly as can be.

No dice: the source that is furthest behind its share is next. So a ratio of 3 to 1 holds over four groups as it does
over four thousand, and a run that goes on makes the choices it would have made.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ramify.orchestrate.curriculum import Curriculum

GIVEN = "mix/"  # under these names the ledger keeps how many groups each source gave


class Chosen(NamedTuple):
    """A task of a source, and what choosing it changed: to be kept in the ledger with the group."""

    source: str
    task: int
    epoch: int
    states: dict[str, Any]


class Mix:
    """Several sources, each with its ratio and its curriculum."""

    def __init__(self, ratios: Mapping[str, float], curricula: Mapping[str, Curriculum]) -> None:
        self._ratios, self._curricula = dict(ratios), dict(curricula)
        self._given = dict.fromkeys(ratios, 0)
        self._over: set[str] = set()

    def next(self) -> Chosen | None:
        """The next task; None when no source has any."""
        while live := [name for name in self._ratios if name not in self._over]:
            name = min(live, key=lambda name: (self._given[name] + 0.5) / self._ratios[name])
            pick = self._curricula[name].next()
            if pick is None:
                self._over.add(name)
                continue
            self._given[name] += 1
            return Chosen(name, pick.task, pick.epoch, {f"{GIVEN}{name}": self._given[name], **self._changed(name)})
        return None

    def learn(self, source: str, task: int, reward: float) -> dict[str, Any]:
        """A group's mean reward; returns what that changed."""
        self._curricula[source].learn(task, reward)
        return self._changed(source)

    def restore(self, kept: Callable[[str], Mapping[str, Any]]) -> None:
        """Go on from the ledger: `kept(prefix)` is what it keeps under names that begin so, by the rest of the name."""
        self._given |= {name: given for name, given in kept(GIVEN).items() if name in self._given}
        for name, curriculum in self._curricula.items():
            curriculum.restore(kept(f"source/{name}/"))

    def _changed(self, name: str) -> dict[str, Any]:
        return {f"source/{name}/{key}": value for key, value in self._curricula[name].changed().items()}
