"""The JSON view: messages, counts and header, without token ids and arrays."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.core.errors import Failure, ProcessDied
from ramify.trace import Media, MediaRef, Message, ModelCall, TextPart, ToolCall, Trace, to_json
from tests.support.trace_scripts import Script, decorate, replay, scripts

RANDOM = st.randoms(use_true_random=False)


def texts(message: Message) -> list[str]:
    """Every piece of text a message says."""
    strings_found = [message.role, message.text, message.reasoning or "", message.tool_call_id or ""]
    return strings_found + [text for call in message.tool_calls for text in (call.id, call.name, call.arguments)]


def strings(value: Any) -> list[str]:
    """Every string anywhere in a JSON value."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


@given(scripts(), RANDOM)
def test_json_holds_every_message_count_and_reward(script: Script, rng: random.Random):
    trace, _ = replay(script)
    decorate(trace, rng)
    view = json.loads(to_json(trace))
    assert view["id"] == "t" and view["reward"] == trace.reward
    assert len(view["nodes"]) == len(trace.nodes)
    for node, entry in zip(trace.nodes, view["nodes"], strict=True):
        assert (entry["index"], entry["parent"]) == (node.index, node.parent)
        assert entry["tokens"] == len(node.token_ids)
        assert entry["sampled"] == len(node.logprobs)
        assert set(texts(node.message)) - {""} <= set(strings(entry["message"]))
        assert entry["message"]["role"] == node.message.role
        assert (node.call is None) == ("call" not in entry)
        if node.call is not None:
            assert entry["call"]["id"] == node.call.id
            assert entry["trainable"] is node.is_trainable


def numbers(value: Any) -> set[float]:
    if isinstance(value, dict):
        return {number for item in value.values() for number in numbers(item)}
    if isinstance(value, list):
        return {number for item in value for number in numbers(item)}
    return {value} if isinstance(value, int | float) and not isinstance(value, bool) else set()


def test_json_holds_no_token_ids_logprobs_arrays_or_media_bytes():
    trace = Trace(id="t")
    data = b"\x89PNG secret bytes"
    image = trace.add_media(Media.from_bytes(data, "image/png"))
    trace.graph.add_node(
        -1, Message("user", (TextPart("look"),)), [70001, 70002, 70003], media=[MediaRef(0, image, 1, 2)]
    )
    trace.graph.add_node(
        0,
        Message("assistant", "seen"),
        [70004, 70005],
        sampled_span=(0, 2),
        logprobs=[-0.8125, -0.15625],
        arrays={"experts": np.full((2, 2), 80001)},
        call=ModelCall("c"),
    )
    text = to_json(trace)
    view = json.loads(text)
    assert not numbers(view) & {70001, 70002, 70003, 70004, 70005, 80001, -0.8125, -0.15625}
    assert "secret" not in text
    assert view["media"][0]["bytes"] == len(data) and view["media"][0]["mime"] == "image/png"
    assert "experts" in view["nodes"][1]["arrays"]


def test_json_holds_the_whole_header():
    trace = Trace(
        id="t",
        episode="e",
        group="g",
        attempt=3,
        agent="a",
        env="env",
        task={"prompt": "hi"},
        rewards={"r": (1.0, 0.5), "due": None},
        metrics={"m": 2.0},
        info={"i": [1]},
        errors=[Failure.from_exception(ProcessDied("gone"))],
        stop="done",
        harness={"id": "chat"},
        runtime={"id": "local"},
        sampler={"id": "native"},
    )
    view = json.loads(to_json(trace))
    assert view["schema"] == 1
    assert view["reward"] is None
    assert view["rewards"] == {"r": [1.0, 0.5], "due": None}
    assert view["errors"][0]["name"] == "ProcessDied" and view["errors"][0]["message"] == "gone"
    plain = ("episode", "group", "attempt", "agent", "env", "task", "metrics", "info", "stop")
    for name in (*plain, "harness", "runtime", "sampler"):
        assert view[name] == getattr(trace, name)


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_output_is_valid_json_at_any_indent(indent: int | None):
    trace = Trace(id="t", info={"odd": [float("inf"), float("nan"), '\0\u2028"\\'], "big": 2**63})
    trace.graph.add_node(-1, Message("user", "größe 🌳", tool_calls=(ToolCall("1", "f", '{"a": "b"}'),)))

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    view = json.loads(to_json(trace, indent=indent), parse_constant=refuse)
    assert view["nodes"][0]["message"]["content"] == "größe 🌳"
    assert view["info"]["big"] == 2**63


def test_info_does_not_override_other_keys():
    trace = Trace(id="t", info={"reward": 9, "nodes": []}, rewards={"r": (1.0, 1.0)})
    view = json.loads(to_json(trace))
    assert view["reward"] == 1.0 and view["nodes"] == []
