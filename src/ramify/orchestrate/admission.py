"""Which groups may be issued, and which make the next batch: windowed FIFO.

Fast groups must not wait for slow ones, and slow ones must not be left behind: a batch of whatever came first would
train on short rollouts and let the long ones grow stale. So a group may be overtaken, but only by the few issued right
behind it. With P groups a batch, A slots and a window of W, a group is trained at most (A + W - 2) // P steps after the
version it started with, however long it took (docs/batching.md has the proof).

    issued --> scored --> in a batch --> version applied
       |          |
       +----------+-----> dropped                             a slot is held from the left to the right

A state machine without clock or I/O: events in, decisions out.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

from ramify.errors import TransitionRefused

LOOK_AHEAD = 0.3  # the window as a share of the slots


@dataclass(frozen=True, slots=True)
class Shape:
    """P, A and W, in groups."""

    batch: int
    slots: int
    window: int

    @classmethod
    def of(cls, batch: int, max_off_policy: int) -> "Shape":
        """The most slots whose groups are trained at most `max_off_policy` steps after they started."""
        if max_off_policy == 0:
            return cls(batch, batch, 1)
        slots = batch
        while (found := cls(batch, slots + 1, _window(slots + 1))).worst <= max_off_policy:
            slots = found.slots
        return cls(batch, slots, _window(slots))

    @property
    def worst(self) -> int:
        """The most steps between the version a group starts with and the one that is trained on it."""
        return (self.slots + self.window - 2) // self.batch


def _window(slots: int) -> int:
    return max(1, int(LOOK_AHEAD * slots))


class Admission:
    """The slots: who holds one, and who is next in a batch. Groups are numbers, in the order of issue."""

    def __init__(self, shape: Shape, *, last_step: int | None = None) -> None:
        self.shape, self.last_step = shape, last_step
        self.step = 0  # of the next batch
        self.applied = 0  # the version the engines sample from
        self.exhausted = False  # no group will follow
        self._unscored: list[int] = []  # in order
        self._scored: list[int] = []  # in order
        self._held: dict[int, tuple[int, ...]] = {}  # batches whose version is not applied yet

    # -- decisions -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Slots that are held."""
        return len(self._unscored) + len(self._scored) + self._batched

    @property
    def room(self) -> int:
        """How many groups may be issued now."""
        if self.exhausted:
            return 0
        free = self.shape.slots - self.active
        if self.last_step is not None:
            wanted = (self.last_step - self.step) * self.shape.batch
            free = min(free, wanted - len(self._unscored) - len(self._scored))
        return max(0, free)

    def may_dispatch(self, group: int) -> bool:
        """Whether attempts of a group may be sent out: with all that comes before it, it fits into the slots.

        After a restart more can be active than there are slots: batches of the lost steps hold theirs again, and a run
        that goes on with fewer slots finds the groups of one that had more. What is sampled behind too many would be
        too old when its turn comes, so it waits.
        """
        before = bisect_left(self._unscored, group) + bisect_left(self._scored, group)
        return self._batched + before < self.shape.slots

    def ready(self) -> tuple[int, ...] | None:
        """The groups of the next batch, in order; None while it cannot be cut."""
        if self.last_step is not None and self.step >= self.last_step:
            return None
        behind = self._unscored[0] + self.shape.window if self._unscored else None
        inside = len(self._scored) if behind is None else bisect_left(self._scored, behind)
        if inside >= self.shape.batch:
            return tuple(self._scored[: self.shape.batch])
        if self.exhausted and not self._unscored and self._scored:
            return tuple(self._scored)
        return None

    @property
    def finished(self) -> bool:
        """Whether the last batch was cut."""
        if self.last_step is not None and self.step >= self.last_step:
            return True
        return self.exhausted and not self._unscored and not self._scored

    def waiting_for(self) -> list[int]:
        """The groups without which no batch can be cut: the oldest that are not scored."""
        return self._unscored[: self.shape.batch]

    # -- events --------------------------------------------------------------------------------------------------

    def issue(self, group: int) -> None:
        """A group takes a slot. Raises TransitionRefused where there is no room."""
        if self.room < 1:
            raise TransitionRefused(f"group {group} cannot be issued: {self.active} of {self.shape.slots} slots held")
        self.resume(group)

    def resume(self, group: int, *, scored: bool = False) -> None:
        """A group that was issued before this process began takes its slot, whether there is room or not."""
        insort(self._scored if scored else self._unscored, group)

    def score(self, group: int) -> None:
        """A group can be in a batch."""
        _remove(self._unscored, group, "scored")
        insort(self._scored, group)

    def drop(self, group: int) -> None:
        """A group gives its slot back without having been in a batch."""
        _remove(self._scored if group in self._scored else self._unscored, group, "dropped")

    def cut(self, groups: tuple[int, ...]) -> int:
        """A batch of these groups was decided; returns its step."""
        for group in groups:
            _remove(self._scored, group, "batched")
        step, self.step = self.step, self.step + 1
        if step >= self.applied:
            self._held[step] = groups
        return step

    def apply(self, version: int) -> None:
        """The engines sample from `version` now: the batches that made it give their slots back."""
        self.applied = max(self.applied, version)
        for step in [step for step in self._held if step < self.applied]:
            del self._held[step]

    def go_back(self, version: int, batches: dict[int, tuple[int, ...]]) -> None:
        """The trainer begins again from `version`; `batches` are those after it, which it is given again."""
        self.applied = version
        self.step = max(self.step, version, *(step + 1 for step in batches))
        self._held = {step: groups for step, groups in batches.items() if step >= version}

    @property
    def _batched(self) -> int:
        return sum(map(len, self._held.values()))


def _remove(groups: list[int], group: int, then: str) -> None:
    at = bisect_left(groups, group)
    if at == len(groups) or groups[at] != group:
        raise TransitionRefused(f"group {group} cannot be {then}: it does not wait for that")
    del groups[at]
