"""Every sink gets every point: what the real libraries stored is read back from their files."""

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ramify.launch.metric_sinks import TensorBoardSink, build_samples
from ramify.launch.sink_threads import open_monitor_sinks
from ramify.orchestrate.run_config import RunConfig
from tests.launch.test_metric_sinks import BASE64, LABEL, build_rollout
from tests.support.processes import wait_until

Point = tuple[int, str, float]

# wandb's offline file is a log in LevelDB's format: after a header of 7 bytes it consists of blocks of 32 KiB, and a
# block consists of fragments `crc32 u32 | length u16 | kind u8 | data`. The joined fragments of a record are one
# protobuf `Record`.
HEADER, BLOCK, FRAGMENT = 7, 32768, struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def config(directory: Path, sink: str) -> RunConfig:
    train = [{"taskset": {"id": "reverse-text"}}]
    return RunConfig(name="run", output=directory, train=train, monitor={"sinks": [{"type": sink}]})


def build_calls(steps: range) -> list[tuple[int, dict[str, float]]]:
    """Build the calls of a run in order: rewards when a batch is formed, then its training, evals later still."""
    calls: list[tuple[int, dict[str, float]]] = []
    for step in steps:
        calls.append((step + 1, {"reward/all/mean": step / 8, "rollouts": 16.0}))
        calls.append((step, {"train/loss": -step / 4, "entropy": 1.5, "train/grad_norm": 0.25}))
        calls.append((step, {"time/swap": 0.5}))
        if step >= 2:
            calls.append((step - 2, {"eval/held-out/avg": step / 16}))
    return calls


def log_run(directory: Path, sink: str, steps: range) -> list[Point]:
    """Log the steps as one process of a run does, and return the points that were logged."""
    messages: list[str] = []
    sinks = open_monitor_sinks(config(directory, sink), messages.append)
    calls = build_calls(steps)
    for step, values in calls:
        sinks.log_metrics(step, values)
    sinks.log_samples(steps[0], build_samples(build_rollout(), source="look"))
    sinks.close(timeout=60.0)
    assert [line for line in messages if line.startswith("sink")] == []
    return [(step, name, value) for step, values in calls for name, value in values.items()]


def read_wandb_history(directory: Path) -> list[dict]:
    """Return the history rows of all offline runs below `directory`, in the order in which they were written."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows: list[dict] = []
    for file in sorted(directory.rglob("*.wandb")):
        for data in _read_records(file.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def _read_records(data: bytes) -> Iterator[bytes]:
    offset, parts = HEADER, b""
    while offset + FRAGMENT.size <= len(data):
        if BLOCK - offset % BLOCK < FRAGMENT.size:  # too short for a fragment: padding
            offset += BLOCK - offset % BLOCK
            continue
        _, length, kind = FRAGMENT.unpack_from(data, offset)
        offset += FRAGMENT.size
        if offset + length > len(data):  # wandb's process is still writing it
            return
        parts += data[offset : offset + length]
        offset += length
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def read_wandb(directory: Path) -> list[Point]:
    rows = read_wandb_history(directory / "run")
    return [
        (row.get("train/step", row["_step"]), name, value)
        for row in rows
        for name, value in row.items()
        if not name.startswith(("_", "samples")) and name != "train/step"
    ]


def read_tensorboard(directory: Path) -> list[Point]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory / "run" / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return [(event.step, tag, event.value) for tag in tags for event in accumulator.Scalars(tag)]


def read_trackio(directory: Path) -> list[Point]:
    (file,) = (directory / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT step, metrics FROM metrics").fetchall()
    return [
        (step, name, value)
        for step, metrics in rows
        for name, value in json.loads(metrics).items()
        if name != "samples"
    ]


READERS = {"wandb": read_wandb, "tensorboard": read_tensorboard, "trackio": read_trackio}


@pytest.fixture(params=READERS)
def sink(request, tmp_path, monkeypatch) -> str:
    """The name of a sink whose library writes below `tmp_path`; of the three, only trackio may be absent."""
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    if request.param == "trackio":
        pytest.importorskip("trackio")
    return request.param


@pytest.mark.process
def test_points_logged_out_of_order_and_after_a_resume_are_all_stored(tmp_path, sink):
    logged = log_run(tmp_path, sink, range(3))
    if sink == "wandb":  # names its directories by the second: a second start in it would overwrite the first
        (tmp_path / "run" / "wandb").rename(tmp_path / "run" / "wandb-first")
    logged += log_run(tmp_path, sink, range(2, 5))  # the steps since the last checkpoint are repeated
    # wandb's own process writes the file after `finish`.
    wait_until(lambda: sorted(READERS[sink](tmp_path)) == sorted(logged), f"the points of {sink}")
    if sink == "wandb":
        check_wandb_samples(tmp_path / "run")


def check_wandb_samples(directory: Path) -> None:
    """Check that each start stored a table with the task of each sample, and no image."""
    assert "table-file" in json.dumps([row for row in read_wandb_history(directory) if "samples" in str(row)])
    files = [path for path in directory.rglob("*") if path.is_file()]
    tables = [json.loads(path.read_text()) for path in files if path.name.endswith(".table.json")]
    assert len(tables) == 2
    for table in tables:
        assert " ".join(table["columns"]) == "source task task_data rollout branch reward advantage messages"
        assert [row[:2] + row[3:5] for row in table["data"]] == [["look", "trees-1", "r1", i] for i in (0, 1)]
        assert [json.loads(row[2])["key"] for row in table["data"]] == ["trees-1", "trees-1"]
        assert all(LABEL in row[-1] for row in table["data"])
    assert not [path for path in files if BASE64[:60].encode() in path.read_bytes() or b"base64," in path.read_bytes()]


def test_tensorboard_has_a_point_as_soon_as_it_is_logged(tmp_path):
    """A process that is killed does not close its sinks."""
    sink = TensorBoardSink(tmp_path / "run" / "tensorboard")
    sink.log_metrics(7, {"train/loss": 0.5})
    assert read_tensorboard(tmp_path) == [(7, "train/loss", 0.5)]
    sink.close()
