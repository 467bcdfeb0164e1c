"""Every sink gets every point: what the real libraries stored is read back from their files."""

import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ramify.monitor import build_samples, open_monitor_sinks
from ramify.monitor.sinks import TensorBoardSink
from ramify.orchestrate.config import RunConfig
from ramify.trace import Trace
from tests.monitor.wandb_file import read_history

Point = tuple[int, str, float]


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
    sinks.log_samples(steps[0], build_samples(Trace(id="r1"), source="reverse-text"))
    sinks.close(timeout=60.0)
    assert [line for line in messages if line.startswith("sink")] == []
    assert set(sinks.num_dropped.values()) == {0}
    return [(step, name, value) for step, values in calls for name, value in values.items()]


def read_wandb(directory: Path) -> list[Point]:
    rows = read_history(directory / "run")
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


def wait_for_points(read: Callable[[], list[Point]], expected: list[Point]) -> list[Point]:
    """Read until all points are there: wandb's own process writes the file after `finish`."""
    deadline = time.monotonic() + 30.0
    while (points := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return points


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
    logged = log_run(tmp_path, sink, range(6))
    if sink == "wandb":  # names its directories by the second: a second start in it would overwrite the first
        (tmp_path / "run" / "wandb").rename(tmp_path / "run" / "wandb-first")
    logged += log_run(tmp_path, sink, range(4, 9))  # the steps since the last checkpoint are repeated
    assert wait_for_points(lambda: sorted(READERS[sink](tmp_path)), sorted(logged)) == sorted(logged)


def test_tensorboard_has_a_point_as_soon_as_it_is_logged(tmp_path):
    """A process that is killed does not close its sinks."""
    sink = TensorBoardSink(tmp_path / "run" / "tensorboard")
    sink.log_metrics(7, {"train/loss": 0.5})
    assert read_tensorboard(tmp_path) == [(7, "train/loss", 0.5)]
    sink.close()
