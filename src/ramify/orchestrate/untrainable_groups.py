"""Counts groups without a training signal, so that a run without one can end.

A group whose attempts all earn the same reward has no training signal and is dropped, so a run in which all rewards are
equal would sample forever. The core counts the groups that were dropped since the last trainable one; a warning follows
after `warning_groups` of them. The count is restored from the ledger when the orchestrator restarts, and is reset to 0
after it was reported.
"""

import asyncio
import textwrap
from dataclasses import dataclass

from ramify.run.store.group_state import DropReason, GroupState
from ramify.run.store.ledger import Ledger

REPORTED_KEY = "untrainable_groups/reported"  # ledger state: groups with lower numbers were reported already
UNCOUNTED_REASONS = (DropReason.CANCELLED, DropReason.RUN_ENDED)  # reasons that say nothing about rewards
TRAINABLE_STATES = (GroupState.SCORED, GroupState.BATCHED, GroupState.TRAINED)
MAX_QUOTE_CHARS = 160  # characters of a prompt or a reply in the report

EQUAL_REWARDS_ADVICE = (
    "a group is trained on only if its attempts earn different rewards: compare the replies with what the reward "
    "expects (`ramify show`), give partial credit, or choose easier tasks; if every reward is the highest, the tasks "
    "are solved"
)
DROP_REASONS_ADVICE = "no group was dropped for equal rewards: remove the causes that the dropped groups name"


@dataclass(frozen=True, slots=True)
class NoSignalSettings:
    """How much fruitless work a run does before it warns or ends."""

    warning_groups: int = 32
    """Groups without a training signal after which the run warns."""
    max_fruitless_attempts: int = 64
    """Failed attempts of a source after which the run ends, if no attempt of it has succeeded."""


DEFAULT_NO_SIGNAL_SETTINGS = NoSignalSettings()


class UntrainableGroupCounter:
    """The number of groups dropped since the last trainable one.

    `exceeded` is set while `num_dropped` is at least `limit`. `warning_due` is set when `num_dropped` reaches
    `warning_groups` before that; whoever warns clears it.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.warning_groups = DEFAULT_NO_SIGNAL_SETTINGS.warning_groups
        self.num_dropped = 0
        self.exceeded, self.warning_due = asyncio.Event(), asyncio.Event()

    def restore(self, ledger: Ledger, limit: int | None) -> None:
        """Restore the count of an earlier process from the ledger; a `limit` of None is never exceeded."""
        self.limit, self.num_dropped = limit, _count_dropped(ledger)
        self._update()

    def record_trainable(self) -> None:
        """Reset the count: a group can be trained on."""
        self.num_dropped = 0
        self._update()

    def record_dropped(self, reason: DropReason) -> None:
        """Count a group that was dropped, unless the reason says nothing about its rewards."""
        is_counted = reason not in UNCOUNTED_REASONS
        self.num_dropped += is_counted
        self._update()
        if is_counted and self.num_dropped == self.warning_groups and not self.exceeded.is_set():
            self.warning_due.set()

    def describe(self, ledger: Ledger) -> str:
        """Return a description of the counted groups."""
        return _describe_dropped_groups(ledger, self.num_dropped, self.limit)

    async def report(self, ledger: Ledger) -> str:
        """Return a description of the counted groups, and reset the count."""
        report = self.describe(ledger)
        await ledger.save_states({REPORTED_KEY: ledger.num_issued()})
        self.record_trainable()
        return report

    def _update(self) -> None:
        if self.limit is not None and self.num_dropped >= self.limit:
            self.exceeded.set()
        else:
            self.exceeded.clear()


def has_trainable_group(ledger: Ledger, source: str) -> bool:
    """Return whether a group of the source was trained on, or can be."""
    query = "SELECT 1 FROM groups WHERE source = ? AND state IN (?, ?, ?) LIMIT 1"
    return bool(ledger.store.select(query, (source, *(state.value for state in TRAINABLE_STATES))))


def _count_dropped(ledger: Ledger) -> int:
    """Return how many groups were dropped after the last trainable one, in the order of issue."""
    first_unreported: int = ledger.load_states(REPORTED_KEY).get("", 0)
    last_trainable = "SELECT max(number) FROM groups WHERE state IN (?, ?, ?)"
    query = f"""SELECT count(*) FROM groups WHERE state = ? AND reason NOT IN (?, ?)
        AND number >= ? AND number > coalesce(({last_trainable}), -1)"""
    trainable = [state.value for state in TRAINABLE_STATES]
    uncounted = [reason.value for reason in UNCOUNTED_REASONS]
    return ledger.store.select(query, (GroupState.DROPPED.value, *uncounted, first_unreported, *trainable))[0][0]


def _describe_dropped_groups(ledger: Ledger, num_dropped: int, limit: int | None) -> str:
    """Describe the last `num_dropped` dropped groups: rewards by source, drop reasons, and one reply."""
    counted_groups = "SELECT number FROM groups WHERE state = ? AND reason NOT IN (?, ?) ORDER BY number DESC LIMIT ?"
    values = (GroupState.DROPPED.value, *(reason.value for reason in UNCOUNTED_REASONS), num_dropped)
    rows = ledger.store.select(
        f"""SELECT groups.source, count(DISTINCT number), count(reward), avg(reward), min(reward), max(reward),
                max(CASE WHEN rollout IS NOT NULL THEN number END)
            FROM groups JOIN attempts USING (number) LEFT JOIN rollouts ON rollouts.id = attempts.rollout
            WHERE number IN ({counted_groups}) GROUP BY groups.source ORDER BY groups.source""",
        values,
    )
    lines = [
        f"none of the last {num_dropped} groups can be trained on (orchestrator.max_untrainable_groups is {limit})"
    ]
    for source, num_groups, num_rollouts, mean, minimum, maximum, _ in rows:
        rewards = f"reward mean {mean:.4g}, min {minimum:.4g}, max {maximum:.4g}" if num_rollouts else "no reward"
        lines.append(f"  {source}: {num_groups} groups, {num_rollouts} rollouts, {rewards}")
    lines.append(f"  dropped groups: {ledger.describe_drops(limit=num_dropped)}")
    lines += [_describe_reply(ledger, number) for *_, number in rows[:1] if number is not None]
    [(num_zero_advantage,)] = ledger.store.select(
        f"SELECT count(*) FROM groups WHERE number IN ({counted_groups}) AND detail LIKE ?",
        (*values, "%zero_advantage%"),
    )
    advice = EQUAL_REWARDS_ADVICE if num_zero_advantage else DROP_REASONS_ADVICE
    return "\n".join([*lines, f'{advice}. orchestrator.on_no_signal = "warn" continues the run nevertheless'])


def _describe_reply(ledger: Ledger, group_number: int) -> str:
    """Quote one reply of a group, with its prompt."""
    rollout_ids = [attempt.rollout_id for attempt in ledger.attempts(group_number) if attempt.rollout_id is not None]
    trace = ledger.store.read_traces(rollout_ids[0])[0]
    prompts = [node.message.text for node in trace.nodes if node.message.role == "user"]
    prompt = textwrap.shorten(prompts[0] if prompts else "", MAX_QUOTE_CHARS)
    return f"  a reply to {prompt!r}: {textwrap.shorten(trace.last_reply, MAX_QUOTE_CHARS)!r}"
