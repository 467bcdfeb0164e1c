"""The sinks that come with Ramify, and what samples look like in them."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from ramify.errors import ConfigInvalid
from ramify.monitor import build_samples, check_sinks_installed, open_monitor_sinks
from ramify.orchestrate.config import RunConfig
from ramify.trace import Media, MediaPart, Message, TextPart, ToolCall, Trace

LIBRARIES = Path(__file__).parent / "libraries"


def config(tmp_path, *sinks) -> RunConfig:
    train = [{"taskset": {"id": "reverse-text"}}]
    return RunConfig(name="run", output=tmp_path, train=train, monitor={"sinks": [{"type": sink} for sink in sinks]})


def rollout() -> Trace:
    """Two branches: a picture is asked about, and answered twice, once with a tool."""
    trace = Trace(id="r1", rewards={"right": (0.5, 1.0)})
    media = Media.from_bytes(b"x" * 2048, "image/png")
    trace.add_media(media)
    tokens = np.arange(3, dtype=np.int32)
    question = Message(role="user", content=(TextPart(text="What is this? "), MediaPart(hash=media.hash)))
    trace.add_node(parent=-1, message=question, token_ids=tokens)
    call = Message(role="assistant", tool_calls=(ToolCall(id="1", name="zoom", arguments='{"by": 2}'),))
    trace.add_node(parent=0, message=call, token_ids=tokens)
    trace.add_node(
        parent=0, message=Message(role="assistant", content="a tree", reasoning="green"), token_ids=tokens + 9
    )
    return trace


def test_a_sample_is_one_branch_with_media_as_their_size():
    first, second = build_samples(rollout(), source="look", advantage=0.25)
    asked = ("user", "What is this? [image/png, 2,048 bytes]")
    assert first.messages == (asked, ("assistant", '(calls) zoom({"by": 2})'))
    assert second.messages == (asked, ("assistant", "(thinks) green a tree"))
    assert second.row[:5] == ("look", "r1", 1, 0.5, 0.25)


def test_the_log_has_the_step_and_the_samples(tmp_path):
    said = []
    monitors = open_monitor_sinks(config(tmp_path), said.append)
    monitors.log_metrics(3, {"reward/all/mean": 0.5, "time/step": 1.0, "eval/held-out/avg": 0.25})
    monitors.log_metrics(3, {"time/step": 1.0})
    monitors.log_samples(3, build_samples(rollout(), source="look"))
    monitors.close()
    assert said[0] == "step=3 reward/all/mean=0.5 eval/held-out/avg=0.25"
    assert said[1] == "sample step=3 source=look rollout=r1 reward=0.500 advantage=due"
    assert said[2] == "  [user] What is this? [image/png, 2,048 bytes]"


@pytest.fixture
def trackio_in_a_file(monkeypatch, tmp_path):
    """A module in place of trackio that writes its calls into the file it returns."""
    file = tmp_path / "calls.jsonl"
    monkeypatch.syspath_prepend(str(LIBRARIES))
    monkeypatch.setenv("TRACKIO_CALLS", str(file))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    yield file
    sys.modules.pop("trackio", None)


def test_a_resumed_run_is_the_same_run_in_trackio(tmp_path, trackio_in_a_file):
    check_sinks_installed(config(tmp_path, "trackio"))
    said = []
    monitors = open_monitor_sinks(config(tmp_path, "trackio"), said.append)
    monitors.log_metrics(1, {"train/loss": 0.5})
    monitors.log_samples(1, build_samples(rollout(), source="look", advantage=1.0))
    monitors.close()
    assert [line for line in said if line.startswith("monitor")] == []
    lines = [json.loads(line) for line in trackio_in_a_file.read_text().splitlines()]
    assert lines[0]["init"] == {"project": "ramify", "name": "run", "resume": "allow"}
    assert lines[1] == {"step": 1, "train/loss": 0.5}
    assert [row["branch"] for row in lines[2]["samples"]] == [0, 1]
    assert lines[3] == {"finished": True}


def test_tensorboard_gets_event_files(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = []
    monitors = open_monitor_sinks(config(tmp_path, "tensorboard"), said.append)
    for step in range(3):
        monitors.log_metrics(step, {"reward/all/mean": step / 4})
    monitors.log_samples(2, build_samples(rollout(), source="look"))
    monitors.close()
    assert [line for line in said if line.startswith("monitor")] == []
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward/all/mean")] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert len(read.Tags()["tensors"]) == 2


def test_a_sink_whose_library_is_missing_is_refused_before_the_run(tmp_path):
    assert find_spec("trackio") is None, "this test needs an environment without trackio"
    match = r"monitor.sinks.0: trackio is not installed; pip install 'ramify\[trackio\]'"
    with pytest.raises(ConfigInvalid, match=match):
        check_sinks_installed(config(tmp_path, "trackio"))
