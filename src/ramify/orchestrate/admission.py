"""Windowed FIFO admission: which groups may be issued, and which groups form the next batch.

A batch of the groups that finish first would train on short rollouts and let the long ones grow stale. A batch in the
order of issue would make fast groups wait for slow ones. So a group may be overtaken, but only by the few groups issued
right after it. With P groups per batch, A slots and a window of W, a group is trained at most (A + W - 2) // P steps
after the version it started with, however long it takes (docs/design/batching.md has the proof).

    issued --> scored --> in a batch --> version applied
       |          |
       +----------+-----> dropped

A group holds its slot from issue until its version is applied or it is dropped.

A state machine without clock or I/O: events in, decisions out.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cache

from ramify.core.errors import OperationInvalid

WINDOW_FRACTION = 0.3  # size of the window, as a fraction of the slots


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Groups per batch (P), groups that may be active at once (A), and the window of overtaking groups (W)."""

    groups_per_batch: int
    slots: int
    window: int

    @classmethod
    @cache  # a plan asks thousands of times
    def from_max_staleness(cls, groups_per_batch: int, max_staleness: int) -> "AdmissionLimits":
        """Return the limits with the most slots for which no group gets staler than `max_staleness` steps.

        Unless sampling and training alternate, there are slots for two batches at least, one that is trained and one
        that is sampled. With `max_staleness` = 1 this leaves no group that may overtake.
        """
        if max_staleness == 0:
            return cls(groups_per_batch, groups_per_batch, 1)
        slots = groups_per_batch
        while cls(groups_per_batch, slots + 1, _compute_window(slots + 1)).max_staleness <= max_staleness:
            slots += 1
        if slots < 2 * groups_per_batch:
            return cls(groups_per_batch, slots=2 * groups_per_batch, window=1)
        return cls(groups_per_batch, slots, _compute_window(slots))

    @property
    def max_staleness(self) -> int:
        """Most steps between the version that a group starts with and the version that is trained on it."""
        return (self.slots + self.window - 2) // self.groups_per_batch


def _compute_window(slots: int) -> int:
    return max(1, int(WINDOW_FRACTION * slots))


class AdmissionControl:
    """The slots of a run: which groups hold one, and which groups form the next batch.

    Groups are represented by their numbers, which follow the order of issue.

    Attributes:
        next_step: step of the next batch.
        applied_version: version that the engines sample from.
        exhausted: whether the sources have no more tasks, so that no group will follow.
    """

    def __init__(self, limits: AdmissionLimits, max_steps: int) -> None:
        self.limits, self.max_steps = limits, max_steps
        self.next_step = 0
        self.applied_version = 0
        self.exhausted = False
        self._unscored: list[int] = []  # sorted
        self._scored: list[int] = []  # sorted
        self._unapplied_batches: dict[int, tuple[int, ...]] = {}  # by step, until the version it makes is applied

    # -- decisions -----------------------------------------------------------------------------------------------

    @property
    def num_active(self) -> int:
        """Number of slots that are held."""
        return len(self._unscored) + len(self._scored) + self._num_batched

    @property
    def num_free_slots(self) -> int:
        """Number of groups that may be issued now."""
        if self.exhausted:
            return 0
        num_needed = (self.max_steps - self.next_step) * self.limits.groups_per_batch
        num_missing = num_needed - len(self._unscored) - len(self._scored)
        return max(0, min(self.limits.slots - self.num_active, num_missing))

    def can_dispatch(self, group: int) -> bool:
        """Return whether attempts of a group may be dispatched: the group and all before it fit into the slots.

        After a restart, more groups can be active than there are slots: the batches of lost steps hold their slots
        again, and a run may be resumed with fewer slots than it had. A group that is sampled behind too many others
        would be too stale when it is trained, so it has to wait.
        """
        num_before = bisect_left(self._unscored, group) + bisect_left(self._scored, group)
        return self._num_batched + num_before < self.limits.slots

    def next_batch(self) -> tuple[int, ...] | None:
        """Return the groups of the next batch, in order; None if it cannot be formed yet."""
        if self.next_step >= self.max_steps:
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
        """Whether the last batch was formed."""
        if self.next_step >= self.max_steps:
            return True
        return self.exhausted and not self._unscored and not self._scored

    def get_blocking_groups(self) -> list[int]:
        """Return the oldest groups that are not scored: the next batch may have to wait for them."""
        return self._unscored[: self.limits.groups_per_batch]

    # -- events --------------------------------------------------------------------------------------------------

    def issue_group(self, group: int) -> None:
        """Give a slot to a new group. Raises OperationInvalid if none is free."""
        if self.num_free_slots < 1:
            raise OperationInvalid(
                f"group {group} cannot be issued: {self.num_active} of {self.limits.slots} slots held"
            )
        self.restore_group(group)

    def restore_group(self, group: int) -> None:
        """Give a slot to a group that an earlier process issued, even if none is free."""
        insort(self._unscored, group)

    def mark_scored(self, group: int) -> None:
        """Make a group available for a batch."""
        _remove(self._unscored, group, "scored")
        insort(self._scored, group)

    def drop_group(self, group: int) -> None:
        """Free the slot of a group that is not in a batch."""
        _remove(self._scored if group in self._scored else self._unscored, group, "dropped")

    def record_batch(self, groups: tuple[int, ...]) -> int:
        """Record that a batch of these groups was formed, and return its step."""
        for group in groups:
            _remove(self._scored, group, "batched")
        step, self.next_step = self.next_step, self.next_step + 1
        if step >= self.applied_version:
            self._unapplied_batches[step] = groups
        return step

    def apply_version(self, version: int) -> None:
        """Record that the engines sample from `version`, which frees the slots of the batches it was trained on."""
        self.applied_version = max(self.applied_version, version)
        for step in [step for step in self._unapplied_batches if step < self.applied_version]:
            del self._unapplied_batches[step]

    def rewind(self, version: int, batches: dict[int, tuple[int, ...]]) -> None:
        """Return to `version`, from which the trainer restarts; it gets the later `batches`, by step, again."""
        self.applied_version = version
        self.next_step = max(self.next_step, version, *(step + 1 for step in batches))
        self._unapplied_batches = {step: groups for step, groups in batches.items() if step >= version}

    @property
    def _num_batched(self) -> int:
        return sum(map(len, self._unapplied_batches.values()))


def _remove(groups: list[int], group: int, target_state: str) -> None:
    index = bisect_left(groups, group)
    if index == len(groups) or groups[index] != group:
        raise OperationInvalid(f"group {group} cannot become {target_state}: it is not in a state that allows it")
    del groups[index]
