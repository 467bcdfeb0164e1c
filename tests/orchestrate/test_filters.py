"""Each filter fires on a rollout made for it and not on its neighbour, whether it only watches or also acts."""

import math

import pytest

from ramify.env import plugin
from ramify.orchestrate.filters import FilterInput, apply_filters
from ramify.trace import Annotation
from tests.orchestrate.rollouts import rollout

VOCABULARY = 1000
LIMIT = -math.log(VOCABULARY) - 2
EVEN = math.log(0.995)

# What a filter is told, a rollout it fires on, and the nearest one it lets pass.
CASES = {
    "zero_advantage": ({}, (rollout("bad"), 0.0), (rollout("good"), 0.01)),
    "gibberish: odds": (
        {"token": 800},
        (rollout("bad", reply=(10, 801), logprobs=(-0.1, LIMIT - 0.01)), 1.0),
        (rollout("good", reply=(10, 801), logprobs=(-0.1, LIMIT + 0.01)), 1.0),
    ),
    "gibberish: rare": (
        {"token": 800},
        (rollout("bad", reply=(10, 801), logprobs=(-0.1, LIMIT - 0.01)), 1.0),
        (rollout("good", reply=(10, 800), logprobs=(-0.1, LIMIT - 0.01)), 1.0),
    ),
    "gibberish: both of one token": (
        {"token": 800},
        (rollout("bad", reply=(10, 801), logprobs=(-0.1, LIMIT - 0.01)), 1.0),
        (rollout("good", reply=(10, 801), logprobs=(LIMIT - 0.01, -0.1)), 1.0),
    ),
    "repetition: length": (
        {"tokens": 4},
        (rollout("bad", reply=range(10, 16), logprobs=(-1, EVEN, EVEN, EVEN, EVEN, -1)), 1.0),
        (rollout("good", reply=range(10, 16), logprobs=(-1, EVEN, EVEN, EVEN, -1, EVEN)), 1.0),
    ),
    "repetition: certainty": (
        {"tokens": 2},
        (rollout("bad", reply=(10, 11), logprobs=(EVEN, math.log(0.991))), 1.0),
        (rollout("good", reply=(10, 11), logprobs=(EVEN, math.log(0.989))), 1.0),
    ),
    "repetition: one reply": (
        {"tokens": 3},
        (rollout("bad", reply=(10, 11, 12), logprobs=(EVEN,) * 3), 1.0),
        (rollout("good", reply=(10, 11), logprobs=(EVEN,) * 2, turns=2), 1.0),
    ),
}


def build(case: str, **more):
    id = case.partition(":")[0]
    return plugin.build_plugin("filter", {"id": id, **CASES[case][0], **more})


@pytest.mark.parametrize("case", CASES)
def test_a_filter_fires_on_its_rollout_and_not_on_the_neighbour(case):
    for (trace, advantage), fires in zip(CASES[case][1:], (True, False)):
        notes = tuple(Annotation(trace.id, node, advantage=advantage) for node in trace.calls)
        assert build(case).fires(FilterInput(trace, notes, VOCABULARY)) is fires


@pytest.mark.parametrize("mode", ["monitor", "enforce"])
@pytest.mark.parametrize("case", CASES)
def test_firing_is_told_and_acts_only_when_enforced(case, mode):
    group = [trace for trace, _ in CASES[case][1:]]
    notes = [Annotation(trace.id, node, advantage=a) for trace, a in CASES[case][1:] for node in trace.calls]
    found = apply_filters([build(case, mode=mode)], group, notes, VOCABULARY)
    id = case.partition(":")[0]
    assert found.filters_by_trace == {"bad": (id,)}
    assert {note.trace_id for note in found.annotations} == ({"good"} if mode == "enforce" else {"good", "bad"})
    assert found.describe_enforced == (id if mode == "enforce" else "")


def test_a_rollout_that_is_trained_for_something_else_has_no_zero_advantage():
    trace = rollout("t")
    only_ce = (Annotation("t", 1, rl=0.0, ce=1.0),)
    assert not plugin.build_plugin("filter", {"id": "zero_advantage"}).fires(FilterInput(trace, only_ce, VOCABULARY))


def test_all_filters_see_all_rollouts_and_each_is_named():
    trace = rollout("t", reply=(10, 901), logprobs=(-0.1, LIMIT - 1))
    filters = [
        plugin.build_plugin("filter", {"id": "gibberish", "token": 800}),
        plugin.build_plugin("filter", {"id": "repetition", "tokens": 2}),
        plugin.build_plugin("filter", {"id": "zero_advantage", "mode": "enforce"}),
    ]
    found = apply_filters(filters, [trace], [Annotation("t", 1, advantage=0.0)], VOCABULARY)
    assert found.filters_by_trace == {"t": ("gibberish", "zero_advantage")}
    assert found.annotations == ()
    assert found.describe_enforced == "zero_advantage"


def test_what_another_model_said_is_not_the_policys_fault():
    trace = rollout("t", reply=(10, 901), logprobs=(-0.1, LIMIT - 1), trainable=False)
    assert not plugin.build_plugin("filter", {"id": "gibberish", "token": 800}).fires(
        FilterInput(trace, (), VOCABULARY)
    )
