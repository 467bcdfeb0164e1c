"""Log lines are events with fields, one line each."""

import logging

import pytest

from ramify.core.errors import AgentFailed, Failure
from ramify.core.terminal import format_event
from ramify.rollout.envserver.log import log_finished_rollout, log_stopped_rollout
from ramify.rollout.envserver.messages import RolloutRequest
from ramify.trace import Episode, Trace


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "closed"),
        ({"worker": "w1", "attempts": 3}, "closed worker=w1 attempts=3"),
        ({"reason": "two words", "message": "a\nb", "empty": ""}, 'closed reason="two words" message="a\\nb" empty=""'),
        ({"seconds": 1.23456, "reward": None, "name": "ä"}, "closed seconds=1.235 reward=None name=ä"),
    ],
)
def test_event_is_one_line_with_quoted_texts(fields, line):
    assert format_event("closed", **fields) == line


ROLLOUT = RolloutRequest(id="7.1", task={}, attempt=2)


def test_rollout_that_fails_shows_the_end_of_its_programs_output(caplog):
    caplog.set_level(logging.INFO, "ramify.rollouts")
    trace = Trace(id="7.1", stop="AgentFailed", errors=[Failure.from_exception(AgentFailed("code 1"))])
    trace.info["program"] = {"stdout": "x" * 1000 + "\nlast words\n", "stderr": ""}
    log_finished_rollout(ROLLOUT, Episode((trace,)), 1.5)
    failed, ended = (record.getMessage() for record in caplog.records)
    assert failed.startswith('rollout failed id=7.1 error=AgentFailed message="code 1" output="xxx')
    assert failed.endswith('\\nlast words"') and len(failed) < 600
    assert ended == "rollout ended id=7.1 attempt=2 stop=AgentFailed reward=None turns=0 seconds=1.5"


def test_rollout_that_raises_says_why(caplog):
    log_stopped_rollout(ROLLOUT, ValueError("no such task"), 1.5)
    assert caplog.messages == ['rollout stopped id=7.1 seconds=1.5 reason="ValueError: no such task"']
