"""Rollouts whose agent program seems to be broken are recognized, unlike rollouts of an agent that works."""

from typing import Any

import pytest

from ramify.core.errors import Failure
from ramify.run.store.summary import find_agent_failure, get_agent_failure, summarize_rollout
from tests.support.traces import make_trace

INVALID = {"path": "/v1/responses", "status": 400, "name": "RequestInvalid", "message": "input: no text", "count": 2}
UNKNOWN_PATH = {
    "path": "/v1/x",
    "status": 404,
    "name": "not_found_error",
    "message": "GET /v1/x: unknown",
    "count": 1,
}
OVERFLOW = {**INVALID, "name": "ContextOverflow", "message": "too long"}
ENGINE_DOWN = {**INVALID, "status": 502, "name": "ProviderError", "message": "gone"}
PROGRAM = {"exit_code": 1, "stderr": "Traceback\nKeyError: 'x'\n"}


@pytest.mark.parametrize(
    ("turns", "stop", "info", "expected"),
    [
        (1, "done", {}, None),
        (1, "done", {"refusals": [OVERFLOW, UNKNOWN_PATH]}, None),
        (0, "done", {"refusals": [ENGINE_DOWN]}, None),
        (1, "done", {"refusals": [INVALID]}, ("RequestInvalid", "/v1/responses was refused: input: no text")),
        (0, "done", {"refusals": [OVERFLOW]}, ("ContextOverflow", "/v1/responses was refused: too long")),
        (0, "done", {"refusals": [UNKNOWN_PATH]}, ("RequestInvalid", "/v1/x was refused: GET /v1/x: unknown")),
        (
            2,
            "exit",
            {"program": PROGRAM},
            ("AgentFailed", "the program exited with code 1 after a reply: KeyError: 'x'"),
        ),
        (
            1,
            "exit",
            {"program": PROGRAM, "refusals": [INVALID]},
            ("AgentFailed", "the program exited with code 1 after a reply: /v1/responses was refused: input: no text"),
        ),
    ],
)
def test_agent_failures_are_recognized(turns: int, stop: str, info: dict[str, Any], expected: tuple[str, str] | None):
    trace = make_trace(turns=turns)
    trace.stop = stop
    trace.info.update(info)
    failure = find_agent_failure([trace])
    assert (failure and (failure.name, failure.message)) == expected
    assert get_agent_failure(summarize_rollout([trace])) == (expected and expected[0])


def test_error_before_the_first_reply_is_a_failure_of_the_agent():
    trace = make_trace(turns=0)
    trace.errors.append(Failure("AgentFailed", "code 2", "policy", False))
    assert find_agent_failure([trace]) == trace.errors[0]
    late = make_trace(failure="ContextOverflow")
    assert find_agent_failure([late]) is None
