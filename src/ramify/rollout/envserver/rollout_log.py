"""The log lines of rollouts: one when a rollout starts, one when it ends, and one for each failure.

A line is an event with fields. The output of an agent program is among them, cut and on one line, so that a log answers
why an agent failed without a debugger.
"""

import logging
import time
from types import TracebackType
from typing import Self

from ramify.core.config.schema import is_dict
from ramify.rollout.envserver.log import format_event
from ramify.rollout.envserver.messages import RolloutRequest
from ramify.trace import Episode, Trace

MAX_OUTPUT_CHARS = 400  # of a program's output; its end says most about a failure

_logger = logging.getLogger("ramify.rollouts")


class RolloutLog:
    """Logs one rollout from `with` to its end. A rollout that ends before `episode` is set failed or was cancelled."""

    def __init__(self, rollout: RolloutRequest) -> None:
        self._rollout_id, self._attempt, self._start = rollout.id, rollout.attempt, 0.0
        self.episode: Episode | None = None

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        _logger.info(format_event("rollout started", id=self._rollout_id, attempt=self._attempt))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seconds = time.monotonic() - self._start
        if self.episode is None:
            reason = "" if exc is None else f"{type(exc).__name__}: {exc}".removesuffix(": ")
            _logger.warning(format_event("rollout stopped", id=self._rollout_id, seconds=seconds, reason=reason))
            return
        for trace in self.episode.traces:
            _log_trace(self._rollout_id, trace, seconds)


def _log_trace(rollout_id: str, trace: Trace, seconds: float) -> None:
    for failure in trace.errors:
        fields = {"id": rollout_id, "error": failure.name, "message": failure.message}
        _logger.warning(format_event("rollout failed", **fields, **_get_output(trace)))
    ending = {"stop": trace.stop, "reward": trace.reward, "turns": trace.num_turns, "seconds": seconds}
    _logger.info(format_event("rollout ended", id=rollout_id, **ending))


def _get_output(trace: Trace) -> dict[str, str]:
    """Return the field `output` with the end of what the agent program wrote, if the harness stored it."""
    program = trace.info.get("program")
    if not is_dict(program):
        return {}
    output = f"{program.get('stdout', '')}{program.get('stderr', '')}".strip()
    return {"output": output[-MAX_OUTPUT_CHARS:]} if output else {}
