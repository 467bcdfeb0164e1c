"""The index of rollouts when its file, its run or its writers change under it."""

import asyncio
import contextlib
import re
import sqlite3
import threading

import pytest

from ramify.cli.app import main
from ramify.core.errors import StorageFailed
from ramify.run.store import RunStore
from ramify.view import rollout_index
from ramify.view.queries import RunQueries
from ramify.view.rollout_filter import RolloutFilter
from ramify.view.rollout_index import INDEX_FILE, RolloutIndex
from tests.support.sample_runs import make_record, make_trace, write_eval_run, write_rl_run

DEADLINE = 20.0  # seconds for the index


def list_numbers(index, **filters):
    _, rows = index.select(RolloutFilter(**filters), sort="newest", descending=False, offset=0, limit=50)
    return {row["id"]: row["number"] for row in rows}


def add_rollout(path, id):
    trace = make_trace(id, 0, [50, 2], 0.25, text=f"text of {id}")
    with RunStore.open(path) as store:
        asyncio.run(store.add_rollout(make_record(id, "9", 0, "reverse", [trace]), [trace]))


def test_an_index_that_is_deleted_is_built_again(tmp_path):
    path = write_rl_run(tmp_path / "run")
    index = RolloutIndex(path)
    assert index.refresh(texts=True, wait=DEADLINE) == 1.0
    for file in path.glob(f"{INDEX_FILE}*"):
        file.unlink()
    assert list_numbers(index) == {}
    assert index.refresh(texts=True, wait=DEADLINE) == 1.0
    assert len(list_numbers(index)) == 12
    assert list(list_numbers(index, text="reply 2"))
    index.close()


def test_a_run_that_is_started_over_has_its_own_rows_and_counts(tmp_path):
    """`ramify rl --fresh` renames the old directory; the page keeps its open index by path."""
    path = write_rl_run(tmp_path / "run")
    queries = RunQueries(tmp_path)
    queries.wait_for_index("run", DEADLINE)
    assert queries.list_rollouts("run")["facets"]["source"] == {"reverse": 12}
    path.rename(tmp_path / "run.old")
    write_eval_run(path)
    for number in range(8):  # as many rows as before
        add_rollout(path, f"new-{number}")
    queries.wait_for_index("run", DEADLINE)
    answer = queries.list_rollouts("run")
    assert (answer["total"], answer["facets"]["source"]) == (12, {"reverse": 8, "": 4})
    queries.close()


def test_two_viewers_of_one_run_number_its_rows_alike(tmp_path, monkeypatch):
    """The second one adds newer rows, and later their texts, after the first one has read what is missing."""
    monkeypatch.setattr(rollout_index, "ROWS_PER_COMMIT", 2)
    monkeypatch.setattr(rollout_index, "TEXTS_PER_COMMIT", 2)
    path = write_rl_run(tmp_path / "run")
    first, second = RolloutIndex(path), RolloutIndex(path)
    original_transaction, original_read = rollout_index._transaction, first._read_texts
    not_yet_added = {"rows", "texts"}  # by the second viewer

    def transaction(connection):
        if threading.current_thread() is first._thread and "rows" in not_yet_added:
            not_yet_added.remove("rows")
            add_rollout(path, "0.0")  # replaces the first row
            assert second.refresh(wait=DEADLINE) == 1.0
        return original_transaction(connection)

    def read_texts(rows):
        if "texts" in not_yet_added:
            not_yet_added.remove("texts")
            assert second.refresh(texts=True, wait=DEADLINE) == 1.0
        return original_read(rows)

    monkeypatch.setattr(rollout_index, "_transaction", transaction)
    monkeypatch.setattr(first, "_read_texts", read_texts)
    assert first.refresh(texts=True, wait=DEADLINE) == 1.0
    assert not not_yet_added
    numbers = list_numbers(first)
    assert sorted(numbers.values()) == list(range(1, 13))
    assert numbers["0.0"] == 12
    assert set(list_numbers(first, text="reply 2")) == {"0.2", "1.2", "2.2", "3.2"}
    assert list(list_numbers(first, text="text of")) == ["0.0"]
    first.close()
    second.close()


def test_a_damaged_summary_does_not_keep_the_other_rows_from_being_listed(tmp_path):
    path = write_rl_run(tmp_path / "run")
    with sqlite3.connect(path / "run.sqlite") as connection:
        connection.execute("UPDATE rollouts SET summary = x'c1' WHERE id = '1.1'")
    index = RolloutIndex(path)
    assert index.refresh(wait=DEADLINE) == 1.0
    assert len(list_numbers(index)) == 12
    assert list(list_numbers(index, error="any")) == ["1.1"]
    index.close()


def test_a_damaged_index_names_the_file_to_delete(tmp_path):
    path = write_rl_run(tmp_path / "run")
    (path / INDEX_FILE).write_bytes(b"not a database" * 100)
    index = RolloutIndex(path)
    with pytest.raises(StorageFailed, match=r"delete .*view\.sqlite"):
        index.refresh(wait=DEADLINE)


def test_a_run_without_a_database_is_a_named_failure(tmp_path):
    (tmp_path / "planned").mkdir()
    (tmp_path / "planned" / "config.toml").write_text("[[train]]\n")
    with pytest.raises(StorageFailed):
        RunQueries(tmp_path).list_rollouts("planned")


@pytest.mark.parametrize("text", ["a\0b", "\0", "word " * 5000, '"""', "a* OR (b", "-", "é\u0301"])
def test_any_text_can_be_searched(tmp_path, text):
    index = RolloutIndex(write_rl_run(tmp_path / "run", num_groups=2))
    index.refresh(texts=True, wait=DEADLINE)
    list_numbers(index, text=text)
    index.close()


def test_an_index_that_is_a_link_is_not_written(tmp_path):
    """A run directory from elsewhere may hold a link to a database of the reader."""
    path = write_rl_run(tmp_path / "run", num_groups=1)
    with sqlite3.connect(tmp_path / "other.sqlite") as connection:
        connection.execute("CREATE TABLE rows (value)")
    before = (tmp_path / "other.sqlite").read_bytes()
    (path / INDEX_FILE).symlink_to(tmp_path / "other.sqlite")
    index = RolloutIndex(path)
    assert index.refresh(wait=DEADLINE) == 1.0
    assert len(list_numbers(index)) == 3
    index.close()
    assert (tmp_path / "other.sqlite").read_bytes() == before


@pytest.mark.parametrize(("flag", "descending"), [("--worst", False), ("--best", True)])
def test_rollouts_of_equal_reward_are_in_the_order_of_the_command_show(tmp_path, capsys, flag, descending):
    write_rl_run(tmp_path / "run", num_groups=12)
    with contextlib.closing(RunQueries(tmp_path)) as queries:
        queries.wait_for_index("run", DEADLINE)
        rows = queries.list_rollouts("run", sort="reward", descending=descending)["rows"]
    assert main(["show", str(tmp_path / "run"), flag, "--limit", "36"]) == 0
    printed = re.findall(r"^(\d+\.\d) ", capsys.readouterr().out, re.MULTILINE)
    assert len(printed) == 36
    assert [row["id"] for row in rows] == printed
