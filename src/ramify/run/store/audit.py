"""Checks of a run's files: its database and trace segments are intact, no group is lost, and none counts twice.

SQLite cannot detect a value that was changed inside a page. The checksum of the file can, but a killed run has none. So
the tables are also compared with the segments: every frame must match its checksum, every rollout must have a frame,
and every record must have the reward of its trace. The ledger stores the history of every group several times: in the
group's own row, in its batch, in its attempts, and in the list of batches that were served to trainers. The audit
compares them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

from ramify.core.errors import RamifyError, StorageFailed
from ramify.run.fencing.token import FencingToken
from ramify.run.store.group_state import TRANSITIONS, GroupState
from ramify.run.store.index import DATABASE_NAME, FrameLocation, RolloutRecord, find_changed_index
from ramify.run.store.ledger import Ledger
from ramify.run.store.ledger_tables import CommitRecord, GroupRecord
from ramify.run.store.run_store import RunStore


def check_storage(store: RunStore) -> list[str]:
    """Return one line for each problem; an empty list means that the run is intact."""
    problems = list(_check_database(store))
    try:
        problems.extend(_check_traces(store))  # keeps the problems before an error
    except (RamifyError, msgspec.MsgspecError, ValueError, TypeError) as error:
        problems.append(f"{store.path}: the index cannot be read: {error}")
    return problems


def _check_database(store: RunStore) -> Iterator[str]:
    try:
        problems = [line for (line,) in store.select("PRAGMA integrity_check") if line != "ok"]
    except StorageFailed as error:
        problems = [error.message]
    if changed := find_changed_index(store.path):
        problems.append(changed)
    yield from (f"{store.path / DATABASE_NAME}: {problem}" for problem in problems)


def _check_traces(store: RunStore) -> Iterator[str]:
    committed_lengths: dict[int, int] = dict(store.select("SELECT number, length FROM segments"))
    rows = store.select("SELECT id, segment, start, stop FROM rollouts")
    locations = {id: FrameLocation(*location) for id, *location in rows}
    intact: set[FrameLocation] = set()
    for location, problem in store.segments.verify(committed_lengths):
        if problem:
            yield problem
        else:
            intact.add(location)
    for record in store.rollouts():
        if locations[record.id] not in intact:
            yield f"rollout {record.id}: there is no intact frame at its location {tuple(locations[record.id])}"
        elif problem := _check_record(store, record):
            yield problem


def _check_record(store: RunStore, record: RolloutRecord) -> str | None:
    """Compare a record with the trace it points to; return the problem, if any."""
    try:
        trace = store.read_traces(record.id)[0]
    except (RamifyError, IndexError) as error:
        return f"rollout {record.id}: its traces cannot be read: {error}"
    if trace.reward != record.reward:
        return f"rollout {record.id}: the index has reward {record.reward}, its trace {trace.reward}"
    return None


def audit(ledger: Ledger, *, finished: bool = True) -> list[str]:
    """Return one line per inconsistency in the committed history; an empty list means the ledger is consistent.

    In a run that is not `finished`, groups may be neither trained nor dropped.
    """
    groups = ledger.groups()
    return [
        *_check_groups(ledger, groups, finished),
        *_check_batches(ledger, groups),
        *_check_served(ledger),
        *_check_commits(ledger),
        *_check_attempts(ledger, groups),
        *_check_epochs(ledger, groups),
    ]


def _check_groups(ledger: Ledger, groups: list[GroupRecord], finished: bool) -> Iterator[str]:
    committed = ledger.progress().committed
    for expected_number, group in enumerate(groups):
        label = f"group {group.number}"
        if group.number != expected_number:
            yield f"{label} is in the place of group {expected_number}: a group was lost or issued twice"
        if group.state is GroupState.TRAINED and (group.step is None or group.step >= committed):
            yield f"{label} is trained in step {group.step}, but the history ends before step {committed}"
        elif group.state is GroupState.BATCHED and group.step is not None and group.step < committed:
            yield f"{label} was in step {group.step}, which is committed, but it is not marked as trained"
        elif group.state is GroupState.DROPPED and group.reason is None:
            yield f"{label} was dropped without a reason"
        elif finished and TRANSITIONS[group.state]:
            yield f"{label} is {group.state.value}: neither trained nor dropped"


def _check_batches(ledger: Ledger, groups: list[GroupRecord]) -> Iterator[str]:
    issued = {group.number for group in groups}
    steps_by_group: defaultdict[int, list[int]] = defaultdict(list)
    for expected_step, batch in enumerate(ledger.batches()):
        if batch.step != expected_step:
            yield f"step {expected_step} has no batch"
        for number, count in Counter(batch.group_numbers).items():
            steps_by_group[number].append(batch.step)
            if count > 1:
                yield f"group {number} is {count} times in the batch of step {batch.step}"
            if number not in issued:
                yield f"step {batch.step} has group {number}, which was never issued"
    for number, steps in steps_by_group.items():
        if len(steps) > 1:
            yield f"group {number} is in the batches of steps {', '.join(map(str, steps))}"
    for group in groups:
        is_batched = group.state in (GroupState.BATCHED, GroupState.TRAINED)
        if is_batched and steps_by_group.get(group.number) != [group.step]:
            yield f"group {group.number} is {group.state.value} in step {group.step}, but its batch does not have it"
        if not is_batched and group.number in steps_by_group:
            step = steps_by_group[group.number][0]
            yield f"group {group.number} is {group.state.value}, but in the batch of step {step}"


def _check_served(ledger: Ledger) -> Iterator[str]:
    recorded = {batch.step: batch.group_numbers for batch in ledger.batches()}
    served_steps: set[int] = set()
    for incarnation, step, group_numbers in ledger.served_batches():
        served_steps.add(step)
        if group_numbers != recorded.get(step):
            trainer = FencingToken.from_number(incarnation)
            yield f"trainer {trainer} received groups {list(group_numbers)} for step {step}, not its batch"
    for step in range(ledger.progress().committed):
        if step not in served_steps:
            yield f"step {step} is committed, but its batch was served to no trainer"


def _check_commits(ledger: Ledger) -> Iterator[str]:
    """Check that each committed step was trained by the trainer that committed it, and that no older one came later."""
    served = {(incarnation, step) for incarnation, step, _ in ledger.served_batches()}
    previous = CommitRecord(0, 0, "")
    for commit in ledger.commits():
        commit_text = (
            f"version {commit.version} was committed by trainer {FencingToken.from_number(commit.incarnation)}"
        )
        if commit.incarnation < previous.incarnation:
            newer = FencingToken.from_number(previous.incarnation)
            yield f"{commit_text} after trainer {newer} had committed version {previous.version}"
        for step in range(previous.version, commit.version) if commit.digest else ():
            if (commit.incarnation, step) not in served:
                yield f"{commit_text}, which never received the batch of step {step}"
        previous = commit
    if previous.version != (committed := ledger.progress().committed):
        yield f"the history ends at version {committed}, but the last commit is version {previous.version}"


def _check_attempts(ledger: Ledger, groups: list[GroupRecord]) -> Iterator[str]:
    stored_rollouts = {id for (id,) in ledger.store.select("SELECT id FROM rollouts")}
    group_states = {group.number: group.state for group in groups}
    indices_by_group: defaultdict[int, list[int]] = defaultdict(list)
    for attempt in ledger.attempts():
        label = f"attempt {attempt.attempt_index} of group {attempt.group_number}"
        indices_by_group[attempt.group_number].append(attempt.attempt_index)
        if attempt.state is GroupState.DROPPED:
            if attempt.reason is None:
                yield f"{label} was dropped without a reason"
        elif group_states.get(attempt.group_number) is GroupState.TRAINED and attempt.state is not GroupState.TRAINED:
            yield f"{label} is {attempt.state.value}, but its group is trained"
        elif attempt.state is not GroupState.ISSUED and attempt.rollout_id not in stored_rollouts:
            yield f"{label} is {attempt.state.value}, but its rollout {attempt.rollout_id} is not in the run"
    for group in groups:
        indices = indices_by_group[group.number]
        if indices != list(range(group.size)):
            yield f"group {group.number} should have {group.size} attempts, it has {indices}"


def _check_epochs(ledger: Ledger, groups: list[GroupRecord]) -> Iterator[str]:
    for source, num_tasks in ledger.sources().items():
        if num_tasks is None:
            continue
        issued: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for group in groups:
            if group.source == source:
                issued[group.epoch][group.task_number] += 1
        for epoch in range(max(issued, default=0)):
            counts = issued[epoch]
            if repeated := sorted(task for task, count in counts.items() if count > 1):
                yield f"epoch {epoch} of {source} issued tasks {repeated} more than once"
            if missing := sorted(set(range(num_tasks)) - set(counts)):
                yield f"epoch {epoch} of {source} is over, but tasks {missing} were never issued"
