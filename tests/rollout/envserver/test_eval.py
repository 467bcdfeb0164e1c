"""`ramify eval --workers N` gives the same results as in process."""

import json

import pytest

import ramify as rf
from ramify.run.store import RunStore
from ramify.trace import to_json
from tests.support.tricky_env_server import TASKSETS_FILE

pytestmark = pytest.mark.process


def test_eval_in_workers_gives_the_same_results_as_in_process(engine, tmp_path):
    results = {}
    for workers in (0, 1):
        config = {
            "taskset": {"id": f"{TASKSETS_FILE}:Tricky", "size": 3},
            "inference": {"engine": "external", "base_url": [engine.url]},
            "output": tmp_path,
            "name": f"run-{workers}",
            "num_tasks": 3,
            "repetitions": 2,
            "concurrency": 4,
            "workers": workers,
        }
        result = rf.evaluate(config)
        with RunStore.open(result.path, write=False) as store:
            traces = {row.id: [without_times(trace) for trace in store.read_traces(row.id)] for row in result.rows}
        results[workers] = ([(row.id, row.task, row.reward, row.failure) for row in result.rows], traces)
    assert len(results[0][0]) == 6
    assert results[0] == results[1]
    assert list((tmp_path / "run-1" / "logs" / "env" / "eval").glob("*.log"))


def without_times(trace) -> dict:
    """Return the data of a trace without its times."""
    data = json.loads(to_json(trace))
    for node in data["nodes"]:
        if node.get("call"):
            node["call"] = {key: value for key, value in node["call"].items() if key not in ("start", "end", "id")}
    return {key: value for key, value in data.items() if key != "timing"}
