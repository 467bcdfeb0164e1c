"""How long a run goes on without a group to train on.

A group whose attempts all earn the same reward teaches nothing and is dropped, so a run whose every reward is equal
would sample for ever. The core counts the groups that were dropped since the last trainable one. The count is restored
from the ledger when the orchestrator is restarted, and starts again at 0 after it was reported.
"""

import asyncio
import textwrap

from ramify.store.group_state import DropReason, GroupState
from ramify.store.ledger import Ledger

REPORTED_KEY = "patience/reported"  # in the ledger's states: groups with lower numbers were reported already
UNCOUNTED_REASONS = (DropReason.CANCELLED, DropReason.RUN_ENDED)  # reasons that say nothing about rewards
MAX_QUOTE_CHARS = 160  # characters of a prompt or a reply in the report


class PatienceCounter:
    """Counts the groups dropped since the last trainable one; `exceeded` is set while the count is at least `limit`."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.num_dropped = 0
        self.exceeded = asyncio.Event()

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
        self.num_dropped += reason not in UNCOUNTED_REASONS
        self._update()

    async def report(self, ledger: Ledger) -> str:
        """Return a description of the counted groups, and reset the count."""
        described = _describe_dropped_groups(ledger, self.num_dropped, self.limit)
        await ledger.save_states({REPORTED_KEY: ledger.num_issued()})
        self.record_trainable()
        return described

    def _update(self) -> None:
        if self.limit is not None and self.num_dropped >= self.limit:
            self.exceeded.set()
        else:
            self.exceeded.clear()


def _count_dropped(ledger: Ledger) -> int:
    """Return how many groups were dropped after the last trainable one, in the order of issue."""
    reported: int = ledger.load_states(REPORTED_KEY).get("", 0)
    trainable = "SELECT max(number) FROM groups WHERE state IN (?, ?, ?)"
    query = f"""SELECT count(*) FROM groups WHERE state = ? AND reason NOT IN (?, ?)
        AND number >= ? AND number > coalesce(({trainable}), -1)"""
    kept = (GroupState.SCORED.value, GroupState.BATCHED.value, GroupState.TRAINED.value)
    uncounted = [reason.value for reason in UNCOUNTED_REASONS]
    return ledger.store.select(query, (GroupState.DROPPED.value, *uncounted, reported, *kept))[0][0]


def _describe_dropped_groups(ledger: Ledger, num_dropped: int, limit: int | None) -> str:
    """Return rewards by source, reasons and one reply of the last `dropped` groups."""
    counted = "SELECT number FROM groups WHERE state = ? AND reason NOT IN (?, ?) ORDER BY number DESC LIMIT ?"
    values = (GroupState.DROPPED.value, *(reason.value for reason in UNCOUNTED_REASONS), num_dropped)
    rows = ledger.store.select(
        f"""SELECT groups.source, count(DISTINCT number), count(reward), avg(reward), min(reward), max(reward),
                max(CASE WHEN rollout IS NOT NULL THEN number END)
            FROM groups JOIN attempts USING (number) LEFT JOIN rollouts ON rollouts.id = attempts.rollout
            WHERE number IN ({counted}) GROUP BY groups.source ORDER BY groups.source""",
        values,
    )
    lines = [f"none of the last {num_dropped} groups can be trained on (orchestrator.patience is {limit})"]
    for source, groups, rollouts, mean, least, most, _ in rows:
        rewards = f"reward mean {mean:.4g}, min {least:.4g}, max {most:.4g}" if rollouts else "no reward"
        lines.append(f"  {source}: {groups} groups, {rollouts} rollouts, {rewards}")
    lines.append(f"  dropped groups: {ledger.describe_drops(limit=num_dropped)}")
    lines += [_describe_reply(ledger, number) for *_, number in rows[:1] if number is not None]
    advice = (
        "a group is trained on only if its attempts earn different rewards: compare the replies with what the reward "
        "expects (`ramify show`), give partial credit, or choose easier tasks; where every reward is the highest, the "
        'tasks are solved. orchestrator.on_no_signal = "warn" continues the run nevertheless'
    )
    return "\n".join([*lines, advice])


def _describe_reply(ledger: Ledger, group_number: int) -> str:
    """Quote one reply of a group, with what it replies to."""
    rollout = next(attempt.rollout_id for attempt in ledger.attempts(group_number) if attempt.rollout_id is not None)
    trace = ledger.store.read_traces(rollout)[0]
    prompts = [node.message.text for node in trace.nodes if node.message.role == "user"]
    prompt, reply = (
        textwrap.shorten(text, MAX_QUOTE_CHARS) for text in (prompts[0] if prompts else "", trace.last_reply)
    )
    return f"  a reply to {prompt!r}: {reply!r}"
