"""Derived properties of traces and branches."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import given

from ramify.trace import Branch, MediaPart, Message, ModelCall, Trace
from tests.support.trace_scripts import Script, replay, scripts


@given(scripts())
def test_flatten_returns_the_arrays_of_every_branch(script: Script):
    trace, _ = replay(script)
    flat = trace.flatten()
    assert len(flat) == len(trace.branches)
    for branch, arrays in zip(trace.branches, flat, strict=True):
        assert np.array_equal(arrays.token_ids, branch.token_ids)
        assert np.array_equal(arrays.sampled_mask, branch.sampled_mask)
        assert np.array_equal(arrays.logprobs, branch.logprobs, equal_nan=True)


@given(scripts())
def test_counts_of_a_trace_include_every_node_once(script: Script):
    trace, _ = replay(script)
    assert trace.num_turns == sum(node.call is not None for node in trace.nodes) == len(script.turns)
    assert trace.completion_len == sum(len(node.logprobs) for node in trace.nodes)
    assert trace.total_tokens == sum(len(node.token_ids) for node in trace.nodes)


def forked_trace() -> Trace:
    """A user message, two replies of two sampled tokens, and a question after the first reply."""
    trace = Trace(id="t")
    trace.graph.add_node(-1, Message("user", "hi"), [1, 2, 3])
    reply = {"sampled_span": (1, 3), "logprobs": [-1.0, -1.0]}
    trace.graph.add_node(0, Message("assistant", "yo"), [4, 5, 6], call=ModelCall("a"), **reply)
    trace.graph.add_node(0, Message("assistant", ""), [4, 7, 6], call=ModelCall("b"), **reply)
    trace.graph.add_node(1, Message("user", "more"), [1, 8])
    return trace


def test_counts_follow_added_and_removed_nodes():
    trace = forked_trace()
    assert (trace.num_turns, trace.is_truncated) == (2, False)
    trace.graph.truncate(2, 0)
    assert trace.num_turns == 1
    trace.graph.add_node(1, Message("user", "more"), [8])
    trace.graph.add_node(2, Message("assistant", "no"), [9], call=ModelCall("c", finish_reason="length"))
    assert (trace.num_turns, trace.is_truncated) == (2, True)
    assert Branch(trace, 3).num_turns == 2


def test_threads_that_count_at_once_count_the_same():
    trace = Trace(id="t")
    for number in range(100):
        trace.graph.add_node(number - 1, Message("assistant", "x"), [number], call=ModelCall(str(number)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            counts = {future.result() for future in [pool.submit(lambda: trace.num_turns) for _ in range(3)]}
    finally:
        sys.setswitchinterval(interval)
    assert {*counts, trace.num_turns} == {100}


def test_tokens_that_branches_share_count_once_in_a_trace():
    trace = forked_trace()
    assert (trace.num_turns, trace.completion_len, trace.total_tokens) == (2, 4, 11)
    second, first = trace.branches  # in the order of their leaves, nodes 2 and 3
    assert (first.num_turns, first.completion_len, first.total_tokens) == (1, 2, 8)
    assert (second.num_turns, second.completion_len, second.total_tokens) == (1, 2, 6)


def test_has_response_is_whether_the_last_reply_has_content():
    trace = forked_trace()
    assert not trace.has_response  # the reply of call b is empty
    assert [branch.has_response for branch in trace.branches] == [False, True]
    assert not Branch(trace, 0).has_response  # no reply at all
    trace.graph.add_node(3, Message("assistant", (MediaPart("hash"),)), call=ModelCall("c"))
    assert trace.has_response


def test_assistant_messages_of_the_prompt_are_no_response():
    trace = Trace(id="t")
    trace.graph.add_node(-1, Message("assistant", "an example"), [1, 2])
    assert (trace.num_turns, trace.has_response) == (0, False)
