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

WINDOW_FRACTION = 0.3  # the window as a share of the slots


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """P, A and W, in groups."""

    groups_per_batch: int
    slots: int
    window: int

    @classmethod
    def from_max_staleness(cls, groups_per_batch: int, max_staleness: int) -> "AdmissionLimits":
        """The most slots whose groups are trained at most `max_off_policy` steps after they started."""
        if max_staleness == 0:
            return cls(groups_per_batch, groups_per_batch, 1)
        slots = groups_per_batch
        while (found := cls(groups_per_batch, slots + 1, _compute_window(slots + 1))).max_staleness <= max_staleness:
            slots = found.slots
        return cls(groups_per_batch, slots, _compute_window(slots))

    @property
    def max_staleness(self) -> int:
        """The most steps between the version a group starts with and the one that is trained on it."""
        return (self.slots + self.window - 2) // self.groups_per_batch


def _compute_window(slots: int) -> int:
    return max(1, int(WINDOW_FRACTION * slots))


class AdmissionControl:
    """The slots: who holds one, and who is next in a batch. Groups are numbers, in the order of issue."""

    def __init__(self, limits: AdmissionLimits, *, max_steps: int | None = None) -> None:
        self.limits, self.max_steps = limits, max_steps
        self.next_step = 0  # of the next batch
        self.applied_version = 0  # the version the engines sample from
        self.exhausted = False  # no group will follow
        self._unscored: list[int] = []  # in order
        self._scored: list[int] = []  # in order
        self._unapplied_batches: dict[int, tuple[int, ...]] = {}  # batches whose version is not applied yet

    # -- decisions -----------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Slots that are held."""
        return len(self._unscored) + len(self._scored) + self._num_batched

    @property
    def num_free_slots(self) -> int:
        """How many groups may be issued now."""
        if self.exhausted:
            return 0
        free = self.limits.slots - self.num_active
        if self.max_steps is not None:
            wanted = (self.max_steps - self.next_step) * self.limits.groups_per_batch
            free = min(free, wanted - len(self._unscored) - len(self._scored))
        return max(0, free)

    def can_dispatch(self, group: int) -> bool:
        """Whether attempts of a group may be sent out: with all that comes before it, it fits into the slots.

        After a restart more can be active than there are slots: batches of the lost steps hold theirs again, and a run
        that goes on with fewer slots finds the groups of one that had more. What is sampled behind too many would be
        too old when its turn comes, so it waits.
        """
        before = bisect_left(self._unscored, group) + bisect_left(self._scored, group)
        return self._num_batched + before < self.limits.slots

    def next_batch(self) -> tuple[int, ...] | None:
        """The groups of the next batch, in order; None while it cannot be cut."""
        if self.max_steps is not None and self.next_step >= self.max_steps:
            return None
        window_end = self._unscored[0] + self.limits.window if self._unscored else None
        num_eligible = len(self._scored) if window_end is None else bisect_left(self._scored, window_end)
        if num_eligible >= self.limits.groups_per_batch:
            return tuple(self._scored[: self.limits.groups_per_batch])
        if self.exhausted and not self._unscored and self._scored:
            return tuple(self._scored)
        return None

    @property
    def is_finished(self) -> bool:
        """Whether the last batch was cut."""
        if self.max_steps is not None and self.next_step >= self.max_steps:
            return True
        return self.exhausted and not self._unscored and not self._scored

    def get_blocking_groups(self) -> list[int]:
        """The groups without which no batch can be cut: the oldest that are not scored."""
        return self._unscored[: self.limits.groups_per_batch]

    # -- events --------------------------------------------------------------------------------------------------

    def issue_group(self, group: int) -> None:
        """A group takes a slot. Raises TransitionRefused where there is no room."""
        if self.num_free_slots < 1:
            raise TransitionRefused(
                f"group {group} cannot be issued: {self.num_active} of {self.limits.slots} slots held"
            )
        self.restore_group(group)

    def restore_group(self, group: int, *, is_scored: bool = False) -> None:
        """A group that was issued before this process began takes its slot, whether there is room or not."""
        insort(self._scored if is_scored else self._unscored, group)

    def mark_scored(self, group: int) -> None:
        """A group can be in a batch."""
        _remove(self._unscored, group, "scored")
        insort(self._scored, group)

    def drop_group(self, group: int) -> None:
        """A group gives its slot back without having been in a batch."""
        _remove(self._scored if group in self._scored else self._unscored, group, "dropped")

    def record_batch(self, groups: tuple[int, ...]) -> int:
        """A batch of these groups was decided; returns its step."""
        for group in groups:
            _remove(self._scored, group, "batched")
        step, self.next_step = self.next_step, self.next_step + 1
        if step >= self.applied_version:
            self._unapplied_batches[step] = groups
        return step

    def apply_version(self, version: int) -> None:
        """The engines sample from `version` now: the batches that made it give their slots back."""
        self.applied_version = max(self.applied_version, version)
        for step in [step for step in self._unapplied_batches if step < self.applied_version]:
            del self._unapplied_batches[step]

    def rewind(self, version: int, batches: dict[int, tuple[int, ...]]) -> None:
        """The trainer begins again from `version`; `batches` are those after it, which it is given again."""
        self.applied_version = version
        self.next_step = max(self.next_step, version, *(step + 1 for step in batches))
        self._unapplied_batches = {step: groups for step, groups in batches.items() if step >= version}

    @property
    def _num_batched(self) -> int:
        return sum(map(len, self._unapplied_batches.values()))


def _remove(groups: list[int], group: int, target_state: str) -> None:
    at = bisect_left(groups, group)
    if at == len(groups) or groups[at] != group:
        raise TransitionRefused(f"group {group} cannot be {target_state}: it does not wait for that")
    del groups[at]
