"""A run is exported as JSONL or Parquet, one record per trace."""

import json

import pyarrow.parquet as pq
import pytest

from ramify.core.errors import ConfigInvalid
from ramify.run.store import RunStore, export_run
from tests.support.traces import make_rollout


@pytest.fixture
async def store(tmp_path):
    with RunStore.open(tmp_path / "run") as store:
        for number in (2, 0, 1):
            await store.add_rollout(*make_rollout(number, reward=None if number == 1 else 0.5))
        yield store


def test_jsonl_has_a_line_per_trace_in_order(store, tmp_path):
    assert export_run(store, "jsonl", tmp_path / "out" / "run.jsonl") == 3
    lines = [json.loads(line) for line in (tmp_path / "out" / "run.jsonl").read_text().splitlines()]
    assert [(line["task"], line["repetition"], line["reward"]) for line in lines] == [
        ("task-0", 0, 0.5),
        ("task-0", 1, None),
        ("task-1", 0, 0.5),
    ]
    assert lines[0]["task_data"] == {"prompt": "question 0"}
    assert [node["message"]["content"] for node in lines[2]["nodes"]] == ["question 2", "reply 2"]


def test_parquet_has_a_record_per_trace(store, tmp_path):
    assert export_run(store, "parquet", tmp_path / "run.parquet") == 3
    table = pq.read_table(tmp_path / "run.parquet").to_pylist()
    assert [(record["rollout"], record["reward"]) for record in table] == [("r0", 0.5), ("r1", None), ("r2", 0.5)]
    assert {record["source"] for record in table} == {row.source for row in store.rollouts()}
    assert json.loads(table[1]["rewards"]) == {"score": None}
    assert json.loads(table[1]["nodes"])[1]["message"]["content"] == "reply 1"


def test_an_unknown_format_is_refused_and_nothing_is_written(store, tmp_path):
    with pytest.raises(ConfigInvalid, match="jsonl or parquet"):
        export_run(store, "xml", tmp_path / "run.xml")
    assert not (tmp_path / "run.xml").exists()
