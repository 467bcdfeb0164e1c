"""A run directory whose ledger holds many trained groups, written with plain SQL; its traces are not there."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from ramify.run.store import RunStore
from ramify.run.store.index import DATABASE_NAME
from ramify.run.store.ledger import Ledger


def write_ledger(path: Path, num_groups: int, group_size: int, groups_per_batch: int, source: str) -> None:
    """Write the ledger of a run that has trained `num_groups` groups and committed the last step."""
    with RunStore.open(path) as store:
        Ledger.open(store)
    num_steps = num_groups // groups_per_batch
    num_groups = num_steps * groups_per_batch
    connection = sqlite3.connect(path / DATABASE_NAME, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    connection.executemany(
        "INSERT INTO groups VALUES (?, ?, ?, 0, ?, 0, ?, 'trained', ?, NULL, '')",
        (
            (number, source, number % 1000, group_size, step, step)
            for number in range(num_groups)
            for step in (number // groups_per_batch,)
        ),
    )
    notes = msgspec.msgpack.encode({"advantage": 0.5})
    connection.executemany(
        "INSERT INTO attempts VALUES (?, ?, 1, 'trained', ?, NULL, '', ?)",
        (
            (number, attempt, f"{number}.{attempt}", notes)
            for number in range(num_groups)
            for attempt in range(group_size)
        ),
    )
    summary = msgspec.msgpack.encode({"turns": 1, "tokens": 154, "stop": "stop", "text": "r" * 100})
    connection.executemany(
        "INSERT INTO rollouts VALUES (?, ?, ?, ?, 1.0, NULL, ?, 0, 0, 0)",
        (
            (f"{number}.{attempt}", source, str(number % 1000), attempt, summary)
            for number in range(num_groups)
            for attempt in range(group_size)
        ),
    )
    for step in range(num_steps):
        members = msgspec.msgpack.encode(list(range(step * groups_per_batch, (step + 1) * groups_per_batch)))
        counts = msgspec.msgpack.encode({"rl": 1})
        connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?)", (step, members, b"", counts))
        connection.execute("INSERT INTO served VALUES (0, ?, ?)", (step, members))
    marks = {"committed": num_steps, "acknowledged": num_steps, "incarnation": 0, "registered": 1}
    connection.executemany("INSERT OR REPLACE INTO marks VALUES (?, ?)", marks.items())
    connection.execute("INSERT INTO commits VALUES (?, 0, ?, 'digest')", (num_steps, f"step_{num_steps:06}-0"))
    connection.execute("COMMIT")
    connection.close()
