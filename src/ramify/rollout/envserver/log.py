"""One log file for a server and all its workers. Each line has a timestamp and its origin."""

import asyncio
import contextlib
import logging
import os
import traceback
from collections import deque
from datetime import datetime
from pathlib import Path

from ramify.core.config.schema import is_dict
from ramify.core.errors import StorageFailed
from ramify.core.terminal import escape_controls, format_event
from ramify.rollout.envserver.messages import RolloutRequest
from ramify.trace import Episode, Trace

MAX_LINE_BYTES = 1 << 16  # a longer line is split
TAIL_LINES = 20  # lines of a worker's output in an error message


class EnvServerLog:
    """An open log file of an env server."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", errors="replace", buffering=1)
        except OSError as error:
            raise StorageFailed(f"the log {path} cannot be written: {error.strerror}") from error

    def write(self, origin: str, line: str) -> None:
        """Append a line, with control characters escaped. Write errors such as a full disk do not stop the server."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                self._file.write(
                    f"{datetime.now().isoformat(timespec='milliseconds')} {origin} {escape_controls(line)}\n"
                )

    def log_event(self, event: str, **fields: object) -> None:
        """Append a line of the broker: an event and its fields."""
        self.write("broker", format_event(event, **fields))

    def log_exception(self, error: BaseException) -> None:
        """Append the traceback of an error that the broker did not expect."""
        for line in "".join(traceback.format_exception(error)).splitlines():
            self.write("broker", line)

    def close(self) -> None:
        """Close the file; further lines are ignored."""
        self._file.close()


class WorkerOutput(asyncio.Protocol):
    """Copies the output of a worker and its children to the log, line by line.

    `tail` are its last lines, `closed` is set when all writers have closed the pipe.
    """

    def __init__(self, log: EnvServerLog, origin: str) -> None:
        self._log, self._origin, self._partial_line = log, origin, b""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.closed = asyncio.Event()

    @classmethod
    async def open(cls, log: EnvServerLog, origin: str) -> tuple["WorkerOutput", int]:
        """Return the reader of a new pipe and the file descriptor to write to."""
        read_fd, write_fd = os.pipe()
        pipe = os.fdopen(read_fd, "rb", 0)
        try:
            _, output = await asyncio.get_running_loop().connect_read_pipe(lambda: cls(log, origin), pipe)
        except BaseException:
            os.close(write_fd)
            raise
        return output, write_fd

    def data_received(self, data: bytes) -> None:
        """Write the complete lines of the data to the log."""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._write_line(line)
        while len(self._partial_line) > MAX_LINE_BYTES:
            self._write_line(self._partial_line[:MAX_LINE_BYTES])
            self._partial_line = self._partial_line[MAX_LINE_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Write the last line, even if it is incomplete."""
        if self._partial_line:
            self._write_line(self._partial_line)
        self.closed.set()

    def _write_line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self.tail.append(text)
        self._log.write(self._origin, text)


MAX_OUTPUT_CHARS = 400  # of a program's output; its end says most about a failure

_logger = logging.getLogger("ramify.rollouts")


def log_stopped_rollout(rollout: RolloutRequest, error: BaseException, seconds: float) -> None:
    """Log that a rollout has raised an error or was cancelled."""
    reason = f"{type(error).__name__}: {error}".removesuffix(": ")
    _logger.warning(format_event("rollout stopped", id=rollout.id, seconds=seconds, reason=reason))


def log_finished_rollout(rollout: RolloutRequest, episode: Episode, seconds: float) -> None:
    """Log the failures and the ending of each agent of a rollout."""
    for trace in episode.traces:
        for failure in trace.errors:
            fields = {"id": rollout.id, "error": failure.name, "message": failure.message}
            _logger.warning(format_event("rollout failed", **fields, **_get_output(trace)))
        ending = {"stop": trace.stop, "reward": trace.reward, "turns": trace.num_turns, "seconds": seconds}
        _logger.info(format_event("rollout ended", id=rollout.id, attempt=rollout.attempt, **ending))


def _get_output(trace: Trace) -> dict[str, str]:
    """Return the field `output` with the end of what the agent program wrote, if the harness stored it."""
    program = trace.info.get("program")
    if not is_dict(program):
        return {}
    output = f"{program.get('stdout', '')}{program.get('stderr', '')}".strip()
    return {"output": output[-MAX_OUTPUT_CHARS:]} if output else {}
