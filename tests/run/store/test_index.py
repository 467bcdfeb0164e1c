"""A run whose tables have another version is refused and stays unchanged."""

import sqlite3

import pytest

from ramify.core.errors import RunDamaged
from ramify.run.store.index import SCHEMA_VERSION, read_version
from ramify.run.store.run_store import RunStore


def connect(path):
    return sqlite3.connect(path, isolation_level=None)


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("version", [0, 1, SCHEMA_VERSION + 1])
@pytest.mark.parametrize("change", ["", "ALTER TABLE facts RENAME TO settings"])
def test_a_run_of_another_version_is_refused_and_not_called_damaged(tmp_path, write, version, change):
    RunStore.open(tmp_path).close()
    (tmp_path / "traces" / "000000.seg").write_bytes(b"a frame")
    connection = connect(tmp_path / "run.sqlite")
    assert read_version(connection) == SCHEMA_VERSION
    connection.execute(change)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    (tmp_path / "run.sqlite.sha256").unlink()
    with pytest.raises(RunDamaged, match=r"version \d+.*reads version \d+.*that wrote the run"):
        RunStore.open(tmp_path, write=write)
    assert read_version(connect(tmp_path / "run.sqlite")) == version
