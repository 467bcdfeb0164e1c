"""Integrity checks of a run's files: its database, and every frame of its trace segments.

SQLite checks its pages and indexes, but cannot detect a value that was changed inside a page. The checksum of the file
can, but a killed run has none. So the tables are also compared with the segments: every frame must match its checksum,
every rollout must have a frame, and every record must have the reward of its trace. `ramify.run.store.audit` checks
that the rows of the ledger agree with each other.
"""

from collections.abc import Iterator

import msgspec

from ramify.core.errors import RamifyError, StorageFailed
from ramify.run.store.index import DATABASE_NAME, find_changed_index
from ramify.run.store.rollout_table import FrameLocation, RolloutRecord
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
