"""The promise, checked: nothing is lost, nothing counts twice.

The ledger tells the story of every group several times over: in its own row, in its batch, in its attempts, in the list
of what trainers were given. An audit asks whether they agree, and says in a line each where they do not.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

from ramify.store.group_state import GroupState
from ramify.store.ledger import GroupRecord, Ledger


def audit(ledger: Ledger, *, finished: bool = True) -> list[str]:
    """What is wrong with the history that leads to the last checkpoint; nothing, one hopes.

    In a run that is not `finished`, groups that are still on their way are no problem.
    """
    groups = ledger.groups()
    return [
        *_check_groups(ledger, groups, finished),
        *_check_batches(ledger, groups),
        *_check_served(ledger),
        *_check_attempts(ledger, groups),
        *_check_epochs(ledger, groups),
    ]


def _check_groups(ledger: Ledger, groups: list[GroupRecord], finished: bool) -> Iterator[str]:
    committed = ledger.progress().committed
    for place, group in enumerate(groups):
        who = f"group {group.number}"
        if group.number != place:
            yield f"{who} stands where group {place} should: one was lost, or issued twice"
        if group.state is GroupState.TRAINED and (group.step is None or group.step >= committed):
            yield f"{who} is trained in step {group.step}, but the history ends before step {committed}"
        elif group.state is GroupState.BATCHED and group.step is not None and group.step < committed:
            yield f"{who} was in step {group.step}, which is history, but does not count as trained"
        elif group.state is GroupState.DROPPED and group.reason is None:
            yield f"{who} was dropped without a reason"
        elif finished and not group.state.is_final:
            yield f"{who} is {group.state.value}: neither trained nor dropped"


def _check_batches(ledger: Ledger, groups: list[GroupRecord]) -> Iterator[str]:
    by_number = {group.number: group for group in groups}
    steps: defaultdict[int, list[int]] = defaultdict(list)
    for place, batch in enumerate(ledger.batches()):
        if batch.step != place:
            yield f"step {place} has no batch"
        for number, times in Counter(batch.group_numbers).items():
            steps[number].append(batch.step)
            if times > 1:
                yield f"group {number} is {times} times in the batch of step {batch.step}"
            if number not in by_number:
                yield f"step {batch.step} has group {number}, which was never issued"
    for number, found in steps.items():
        if len(found) > 1:
            yield f"group {number} is in the batches of steps {', '.join(map(str, found))}"
    for group in groups:
        batched = group.state in (GroupState.BATCHED, GroupState.TRAINED)
        if batched and steps.get(group.number) != [group.step]:
            yield f"group {group.number} is {group.state.value} in step {group.step}, but its batch does not have it"
        if not batched and group.number in steps:
            yield f"group {group.number} is {group.state.value}, but in the batch of step {steps[group.number][0]}"


def _check_served(ledger: Ledger) -> Iterator[str]:
    cut = {batch.step: batch.group_numbers for batch in ledger.batches()}
    seen: set[int] = set()
    for incarnation, step, members in ledger.served_batches():
        seen.add(step)
        if members != cut.get(step):
            yield f"trainer {incarnation} was given groups {list(members)} for step {step}, not those of its batch"
    for step in range(ledger.progress().committed):
        if step not in seen:
            yield f"step {step} is history, but no trainer was given its batch"


def _check_attempts(ledger: Ledger, groups: list[GroupRecord]) -> Iterator[str]:
    kept = {rollout for (rollout,) in ledger.store.select("SELECT id FROM rollouts")}
    by_group: defaultdict[int, list[int]] = defaultdict(list)
    state = {group.number: group.state for group in groups}
    for attempt in ledger.attempts():
        who = f"attempt {attempt.attempt_index} of group {attempt.group_number}"
        by_group[attempt.group_number].append(attempt.attempt_index)
        if attempt.state is GroupState.DROPPED:
            if attempt.reason is None:
                yield f"{who} was dropped without a reason"
        elif state.get(attempt.group_number) is GroupState.TRAINED and attempt.state is not GroupState.TRAINED:
            yield f"{who} is {attempt.state.value}, but its group is trained"
        elif attempt.state is not GroupState.ISSUED and attempt.rollout_id not in kept:
            yield f"{who} is {attempt.state.value}, but its rollout {attempt.rollout_id} is not in the run"
    for group in groups:
        if by_group[group.number] != list(range(group.size)):
            yield f"group {group.number} should have {group.size} attempts, it has {by_group[group.number]}"


def _check_epochs(ledger: Ledger, groups: list[GroupRecord]) -> Iterator[str]:
    for source, tasks in ledger.sources().items():
        if tasks is None:
            continue
        issued: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for group in groups:
            if group.source == source:
                issued[group.epoch][group.task_number] += 1
        for epoch in range(max(issued, default=0)):
            counts = issued[epoch]
            if twice := sorted(task for task, times in counts.items() if times > 1):
                yield f"epoch {epoch} of {source} issued tasks {twice} more than once"
            if missing := sorted(set(range(tasks)) - set(counts)):
                yield f"epoch {epoch} of {source} is over, but tasks {missing} were never issued"
