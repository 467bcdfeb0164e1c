"""Each filter fires on a rollout made for it and not on the nearest one it should accept."""

import math

import pytest

from ramify.env import plugin
from ramify.orchestrate.filters import FilterInput, apply_filters
from ramify.trace import Annotation
from tests.support.traces import make_trace

VOCAB_SIZE = 1000
LIMIT = -math.log(VOCAB_SIZE) - 2
CERTAIN = math.log(0.995)

# Configuration of a filter, a rollout it fires on, and the nearest one it accepts.
CASES = {
    "zero_advantage": ({}, (make_trace("bad"), 0.0), (make_trace("good"), 0.01)),
    "gibberish: odds": (
        {"token_id_threshold": 800},
        (make_trace("bad", reply=(10, 801), logprobs=(-0.1, LIMIT - 0.01)), 1.0),
        (make_trace("good", reply=(10, 801), logprobs=(-0.1, LIMIT + 0.01)), 1.0),
    ),
    "gibberish: rare": (
        {"token_id_threshold": 800},
        (make_trace("bad", reply=(10, 801), logprobs=(-0.1, LIMIT - 0.01)), 1.0),
        (make_trace("good", reply=(10, 800), logprobs=(-0.1, LIMIT - 0.01)), 1.0),
    ),
    "gibberish: both of one token": (
        {"token_id_threshold": 800},
        (make_trace("bad", reply=(10, 801), logprobs=(-0.1, LIMIT - 0.01)), 1.0),
        (make_trace("good", reply=(10, 801), logprobs=(LIMIT - 0.01, -0.1)), 1.0),
    ),
    "repetition: length": (
        {"window": 4},
        (make_trace("bad", reply=range(10, 16), logprobs=(-1, CERTAIN, CERTAIN, CERTAIN, CERTAIN, -1)), 1.0),
        (make_trace("good", reply=range(10, 16), logprobs=(-1, CERTAIN, CERTAIN, CERTAIN, -1, CERTAIN)), 1.0),
    ),
    "repetition: certainty": (
        {"window": 2},
        (make_trace("bad", reply=(10, 11), logprobs=(CERTAIN, math.log(0.991))), 1.0),
        (make_trace("good", reply=(10, 11), logprobs=(CERTAIN, math.log(0.989))), 1.0),
    ),
    "truncated": (
        {},
        (make_trace("bad", turns=2, finish_reasons=("stop", "length")), 1.0),
        (make_trace("good", turns=2, finish_reasons=("length", "stop")), 1.0),
    ),
    "repetition: one reply": (
        {"window": 3},
        (make_trace("bad", reply=(10, 11, 12), logprobs=(CERTAIN,) * 3), 1.0),
        (make_trace("good", reply=(10, 11), logprobs=(CERTAIN,) * 2, turns=2), 1.0),
    ),
}


def build(case: str, **more):
    id = case.partition(":")[0]
    return plugin.build_plugin("filter", {"id": id, **CASES[case][0], **more})


@pytest.mark.parametrize("mode", ["monitor", "enforce"])
@pytest.mark.parametrize("case", CASES)
def test_only_enforced_filters_remove_annotations(case, mode):
    group = [trace for trace, _ in CASES[case][1:]]
    annotations = [
        Annotation(trace.id, node, advantage=a) for trace, a in CASES[case][1:] for node in trace.sampled_nodes
    ]
    result = apply_filters([build(case, mode=mode)], group, annotations, VOCAB_SIZE)
    id = case.partition(":")[0]
    assert result.filters_by_trace == {"bad": (id,)}
    trace_ids = {annotation.trace_id for annotation in result.annotations}
    assert trace_ids == ({"good"} if mode == "enforce" else {"good", "bad"})
    assert result.enforced_filters == ((id,) if mode == "enforce" else ())


def test_zero_advantage_ignores_rollouts_with_another_loss_component():
    trace = make_trace("t")
    only_ce = (Annotation("t", 1, rl=0.0, ce=1.0),)
    assert not plugin.build_plugin("filter", {"id": "zero_advantage"}).fires(FilterInput(trace, only_ce, VOCAB_SIZE))


def test_all_fired_filters_are_named():
    trace = make_trace("t", reply=(10, 901), logprobs=(-0.1, LIMIT - 1))
    filters = [
        plugin.build_plugin("filter", {"id": "gibberish", "token_id_threshold": 800}),
        plugin.build_plugin("filter", {"id": "repetition", "window": 2}),
        plugin.build_plugin("filter", {"id": "zero_advantage", "mode": "enforce"}),
    ]
    result = apply_filters(filters, [trace], [Annotation("t", 1, advantage=0.0)], VOCAB_SIZE)
    assert result.filters_by_trace == {"t": ("gibberish", "zero_advantage")}
    assert result.annotations == ()
    assert result.enforced_filters == ("zero_advantage",)


def test_replies_of_another_model_are_not_filtered():
    trace = make_trace("t", reply=(10, 901), logprobs=(-0.1, LIMIT - 1), trainable=False)
    assert not plugin.build_plugin("filter", {"id": "gibberish", "token_id_threshold": 800}).fires(
        FilterInput(trace, (), VOCAB_SIZE)
    )
