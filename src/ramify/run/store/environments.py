"""The identities of the environments that a run's rollouts came from.

A mean over rollouts that were scored by two versions of a reward means nothing. So a run stores, for each source, the
identity of its environment (digests of its code, and its configuration) and a digest of each task by its number, and
compares them whenever the run is resumed. A change is refused. If the user accepts it, it is recorded as a new
*revision* of the source, and every rollout's summary says which revision it came from.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ramify.core.errors import EnvironmentChanged
from ramify.run.store.run_log import build_event_change
from ramify.run.store.run_store import RunStore, build_fact_change

ENVIRONMENTS_KEY = "environments"  # the fact that holds identity and revision of each source
ACCEPT_CHANGES_KEY = "accept changes"  # the fact that says whether the next start may accept changes
CHANGES_ACCEPTED_EVENT = "changes accepted"  # an event kind of the run log
MAX_SHOWN_TASKS = 5  # changed tasks that a message lists
RESUME_HINT = (
    "--fresh (in Python: fresh=True) moves the old run aside and starts a new one; --accept-changes "
    "(accept_changes=True) keeps the stored rollouts, resumes with the new version and records the change; "
    "`ramify replay RUN` scores the stored rollouts of an eval again with the new version"
)


@dataclass(frozen=True, slots=True)
class ObservedEnvironment:
    """An environment as it is now."""

    identity: dict[str, Any]
    """Digests of its files under `code`, and its configuration."""
    task_digests: Mapping[int, str] = field(default_factory=dict[int, str])
    """The content digest of tasks by their number; not necessarily of all of them."""
    task_names: Mapping[int, str] = field(default_factory=dict[int, str])
    """The keys or identities of tasks by their number, for messages; not necessarily of all of them."""
    num_tasks: int | None = None
    """The number of tasks; None if it is unknown or infinite."""


def find_changes(store: RunStore, sources: Mapping[str, ObservedEnvironment]) -> dict[str, list[str]]:
    """Return, by source, a line for each difference from the stored environment; unchanged sources are left out."""
    stored: dict[str, Any] = store.get_fact(ENVIRONMENTS_KEY) or {}
    changes = {
        name: list(_diff_environment(store, name, stored[name], observed))
        for name, observed in sources.items()
        if name in stored
    }
    return {name: lines for name, lines in changes.items() if lines}


def check_no_changes(store: RunStore, changes: Mapping[str, Sequence[str]]) -> None:
    """Raise EnvironmentChanged if there are changes."""
    if changes:
        lines = "".join(f"\n  {line}" for line in format_changes(changes))
        raise EnvironmentChanged(
            f"{store.path} holds rollouts of another version of its environment; what differs:{lines}\n{RESUME_HINT}"
        )


def record_environments(
    store: RunStore, sources: Mapping[str, ObservedEnvironment], changes: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Store the observed environments, and the changes as an event, in one transaction; return the revisions."""
    stored: dict[str, Any] = store.get_fact(ENVIRONMENTS_KEY) or {}
    revisions = {name: stored.get(name, {"revision": 1})["revision"] + (name in changes) for name in sources}
    for name, observed in sources.items():
        stored[name] = {"identity": observed.identity, "revision": revisions[name]}
    store_fact = build_fact_change(ENVIRONMENTS_KEY, stored)
    tasks = [
        (name, number, digest) for name, observed in sources.items() for number, digest in observed.task_digests.items()
    ]
    changed_revisions = {name: revisions[name] for name in changes}
    log_event = build_event_change(CHANGES_ACCEPTED_EVENT, changes=format_changes(changes), revisions=changed_revisions)

    def apply(connection: sqlite3.Connection) -> None:
        store_fact(connection)
        for name, observed in sources.items():
            if observed.num_tasks is not None:
                connection.execute("DELETE FROM tasks WHERE source = ? AND number >= ?", (name, observed.num_tasks))
        connection.executemany("INSERT OR REPLACE INTO tasks VALUES (?, ?, ?)", tasks)
        if changes:
            log_event(connection)

    store.submit_change(apply).result()
    return revisions


def get_task_numbers(store: RunStore, source: str) -> list[int]:
    """Return the numbers of the tasks of a source whose content digest is stored."""
    rows = store.select("SELECT number FROM tasks WHERE source = ? ORDER BY number", (source,))
    return [number for (number,) in rows]


def format_changes(changes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return all lines, each after the name of its source if that is not empty."""
    return [f"{name}: {line}" if name else line for name, lines in changes.items() for line in lines]


def diff_values(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """Yield one line for each key whose value differs, such as `sampling.top_p: was 1.0, now 0.9`."""
    if isinstance(old, dict) and isinstance(new, dict):
        old_table, new_table = cast(dict[str, Any], old), cast(dict[str, Any], new)
        for name in sorted({*old_table, *new_table}):
            inner_key = f"{key}.{name}" if key else str(name)
            if name not in old_table:
                yield f"{inner_key}: was not set, now {new_table[name]!r}"
            elif name not in new_table:
                yield f"{inner_key}: was {old_table[name]!r}, now not set"
            else:
                yield from diff_values(old_table[name], new_table[name], inner_key)
    elif old != new:
        yield f"{key}: was {old!r}, now {new!r}"


def _diff_environment(
    store: RunStore, source: str, stored: Mapping[str, Any], observed: ObservedEnvironment
) -> Iterator[str]:
    old: dict[str, Any] = dict(stored["identity"])
    new = dict(observed.identity)
    yield from _diff_files(old.pop("code", {}), new.pop("code", {}))
    yield from diff_values(old, new)
    yield from _diff_tasks(store, source, observed)


def _diff_files(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for file in sorted({*old, *new}):
        if file not in new:
            yield f"{file} is no longer imported (it was {old[file]})"
        elif file not in old:
            yield f"{file} is new ({new[file]})"
        elif old[file] != new[file]:
            yield f"{file} has changed (it was {old[file]}, now {new[file]})"


def _diff_tasks(store: RunStore, source: str, observed: ObservedEnvironment) -> Iterator[str]:
    rows = store.select("SELECT number, content FROM tasks WHERE source = ? ORDER BY number", (source,))
    lines: list[str] = []
    for number, digest in rows:
        if number not in observed.task_digests:
            if observed.num_tasks is not None and number >= observed.num_tasks:
                lines.append(f"task {number} is gone: the number of tasks is {observed.num_tasks}")
        elif observed.task_digests[number] != digest:
            name = f" ({observed.task_names[number]})" if number in observed.task_names else ""
            lines.append(f"task {number}{name} has changed (it was {digest}, now {observed.task_digests[number]})")
    yield from lines[:MAX_SHOWN_TASKS]
    if len(lines) > MAX_SHOWN_TASKS:
        yield f"and {len(lines) - MAX_SHOWN_TASKS} more of its tasks"
