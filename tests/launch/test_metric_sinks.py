"""The sinks that come with Ramify, and what samples look like in them."""

import base64
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from ramify.core.errors import ConfigInvalid
from ramify.launch.metric_sinks import build_samples
from ramify.launch.sink_threads import check_sinks_installed, open_monitor_sinks
from ramify.orchestrate.run_config import RunConfig
from ramify.run.store.image_store import ImageStore
from ramify.trace import MediaPart, Message, TextPart, ToolCall, Trace
from tests.support.images import make_media

IMAGE = make_media(40, 30)
BASE64 = base64.b64encode(IMAGE.data).decode()
LABEL = f"[image 40×30 png {IMAGE.hash[:4]}]"
LIBRARIES = Path(__file__).parent / "sink_libraries"


def config(tmp_path, *sinks) -> RunConfig:
    monitor = {"sinks": [{"type": sink} for sink in sinks]}
    train = [{"taskset": {"id": "reverse-text"}}]
    return RunConfig.model_validate({"name": "run", "output": tmp_path, "train": train, "monitor": monitor})


def build_rollout() -> Trace:
    """A question about an image with two replies, one of them a tool call."""
    task = {"key": "trees-1", "prompt": f"data:image/png;base64,{BASE64}"}
    trace = Trace(id="r1", rewards={"right": (0.5, 1.0)}, task=task)
    media = IMAGE
    trace.add_media(media)
    tokens = np.arange(3, dtype=np.int32)
    question = Message(role="user", content=(TextPart(text="What is this? "), MediaPart(hash=media.hash)))
    trace.graph.add_node(parent=-1, message=question, token_ids=tokens)
    call = Message(role="assistant", tool_calls=(ToolCall(id="1", name="zoom", arguments='{"by": 2}'),))
    trace.graph.add_node(parent=0, message=call, token_ids=tokens)
    trace.graph.add_node(
        parent=0, message=Message(role="assistant", content="a tree", reasoning="green"), token_ids=tokens + 9
    )
    return trace


def test_a_sample_is_one_branch_that_shows_images_by_a_label():
    first, second = build_samples(build_rollout(), source="look", advantage=0.25)
    question = ("user", f"What is this? {LABEL}")
    assert first.messages == (question, ("assistant", '[tool call] zoom({"by": 2})'))
    assert second.messages == (question, ("assistant", "[reasoning] green a tree"))
    assert second.row[:2] == ("look", "trees-1") and second.row[3:7] == ("r1", 1, 0.5, 0.25)
    assert json.loads(second.task_data) == {"key": "trees-1", "prompt": LABEL}


def test_the_label_of_an_image_in_a_stored_trace_comes_from_its_file(tmp_path):
    trace, store = build_rollout(), ImageStore(tmp_path)
    store.write(trace.detach_images())
    assert build_samples(trace, source="look", images=store)[0].messages[0][1] == f"What is this? {LABEL}"
    assert build_samples(trace, source="look")[0].messages[0][1] == f"What is this? [image {IMAGE.hash[:4]}]"


def test_the_console_prints_the_step_and_the_samples(tmp_path):
    lines = []
    sinks = open_monitor_sinks(config(tmp_path), lines.append)
    sinks.log_metrics(3, {"reward/all/mean": 0.5, "time/step": 1.0, "eval/held-out/avg": 0.25})
    sinks.log_metrics(3, {"time/step": 1.0})
    sinks.log_samples(3, build_samples(build_rollout(), source="look"))
    sinks.close()
    assert lines[0] == "step=3 reward/all/mean=0.5 eval/held-out/avg=0.25"
    assert lines[1] == "sample step=3 source=look rollout=r1 reward=0.500 advantage=missing"
    assert lines[2] == f"  [user] What is this? {LABEL}"


@pytest.fixture
def trackio_calls(monkeypatch, tmp_path):
    """Replace trackio by a module that writes its calls into the returned file."""
    file = tmp_path / "calls.jsonl"
    monkeypatch.syspath_prepend(str(LIBRARIES))
    monkeypatch.setenv("TRACKIO_CALLS", str(file))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    yield file
    sys.modules.pop("trackio", None)


def test_a_resumed_run_is_the_same_run_in_trackio(tmp_path, trackio_calls):
    check_sinks_installed(config(tmp_path, "trackio"))
    lines = []
    sinks = open_monitor_sinks(config(tmp_path, "trackio"), lines.append)
    sinks.log_metrics(1, {"train/loss": 0.5})
    sinks.log_samples(1, build_samples(build_rollout(), source="look", advantage=1.0))
    sinks.close()
    assert [line for line in lines if line.startswith("sink ")] == []
    calls = [json.loads(line) for line in trackio_calls.read_text().splitlines()]
    assert calls[0]["init"] == {"project": "ramify", "name": "run", "resume": "allow"}
    assert calls[1] == {"step": 1, "train/loss": 0.5}
    assert [row["branch"] for row in calls[2]["samples"]] == [0, 1]
    assert calls[3] == {"finished": True}


def test_tensorboard_gets_event_files(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = []
    sinks = open_monitor_sinks(config(tmp_path, "tensorboard"), lines.append)
    for step in range(3):
        sinks.log_metrics(step, {"reward/all/mean": step / 4})
    sinks.log_samples(2, build_samples(build_rollout(), source="look"))
    sinks.close()
    assert [line for line in lines if line.startswith("sink ")] == []
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward/all/mean")] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert len(read.Tags()["tensors"]) == 2


def test_a_sink_whose_library_is_missing_is_refused(tmp_path):
    assert find_spec("trackio") is None, "this test needs an environment without trackio"
    match = r"monitor.sinks.0: trackio is not installed; pip install 'ramify\[trackio\]'"
    with pytest.raises(ConfigInvalid, match=match):
        check_sinks_installed(config(tmp_path, "trackio"))
