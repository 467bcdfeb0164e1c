"""Whether the files of a run are whole: its database, and every frame of its trace segments.

SQLite checks its pages and indexes, but cannot detect a value that was changed inside a page. So the tables are
compared with the segments: every frame matches its checksum, every rollout has a frame, and every row has the reward of
its trace. `ramify.store.audit` checks that the rows of the ledger agree with each other.
"""

from collections.abc import Iterator

import msgspec

from ramify.errors import RamifyError, StorageFailed
from ramify.store.index import DATABASE_NAME
from ramify.store.rollout_table import FrameLocation, RolloutRecord
from ramify.store.run_store import RunStore


def check_storage(store: RunStore) -> list[str]:
    """Return one line for each problem; an empty list for an intact run."""
    problems = list(_check_database(store))
    try:
        problems.extend(_check_traces(store))  # keeps what was found before an error
    except (RamifyError, msgspec.MsgspecError, ValueError, TypeError) as error:
        problems.append(f"{store.path}: the index cannot be read: {error}")
    return problems


def _check_database(store: RunStore) -> Iterator[str]:
    try:
        found = [line for (line,) in store.select("PRAGMA integrity_check")]
    except StorageFailed as error:
        found = [error.message]
    yield from (f"{store.path / DATABASE_NAME}: {line}" for line in found if line != "ok")


def _check_traces(store: RunStore) -> Iterator[str]:
    known: dict[int, int] = dict(store.select("SELECT number, length FROM segments"))
    places = {id: FrameLocation(*place) for id, *place in store.select("SELECT id, segment, start, stop FROM rollouts")}
    whole: set[FrameLocation] = set()
    for place, problem in store.segments.verify(known):
        if problem:
            yield problem
        else:
            whole.add(place)
    for row in store.rollouts():
        if places[row.id] not in whole:
            yield f"rollout {row.id}: its place in the segments, {tuple(places[row.id])}, holds no whole frame"
        elif problem := _check_record(store, row):
            yield problem


def _check_record(store: RunStore, record: RolloutRecord) -> str | None:
    """Compare a row with the trace it points to."""
    try:
        trace = store.read_traces(record.id)[0]
    except (RamifyError, IndexError) as error:
        return f"rollout {record.id}: its traces cannot be read: {error}"
    if trace.reward != record.reward:
        return f"rollout {record.id}: the index has reward {record.reward}, its trace {trace.reward}"
    return None
