"""A user environment whose rollouts can be blocked or broken by a file."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import ramify as rf
from ramify.core.errors import AgentFailed
from ramify.env.tasksets.color_codeword import ColorCodeword


class Config(rf.TasksetConfig):
    gate: str = ""
    """A file. While it exists, every rollout waits; if it contains `broken`, every rollout fails; with `exit`, every
    rollout ends as if the agent's program had exited before its first reply, with `quit`, as if it did so later."""


class Plain(rf.Taskset):
    """Every reply earns the same reward."""

    config: Config

    def load(self) -> Iterator[rf.Task]:
        for number in range(8):
            yield rf.Task(prompt=f"say {number}", key=f"task-{number}")

    async def setup(self) -> None:
        gate = self._read_gate()
        if gate == "broken":
            raise ValueError("there is no such thing")
        if gate == "exit":
            raise AgentFailed(f"code 2: can't open file 'nope.py'\n{Path.cwd()}")
        while self._read_gate() not in (None, "quit"):
            await asyncio.sleep(0.1)

    def _read_gate(self) -> str | None:
        """Return the content of the gate, which a test may remove at any time; None if there is no gate."""
        with contextlib.suppress(FileNotFoundError):
            return Path(self.config.gate).read_text() if self.config.gate else None

    async def finalize(self, trace: rf.Trace) -> None:
        if self._read_gate() == "quit":
            trace.stop = "exit"
            trace.info["program"] = {"exit_code": 3, "stderr": "Traceback:\nno such tool\n"}

    @rf.reward
    def replied(self, trace: rf.Trace) -> float:
        return float(bool(trace.last_reply))


class Varied(rf.Taskset):
    """A reply earns more the more different characters it has, so that even a random model gets different rewards."""

    def load(self) -> Iterator[rf.Task]:
        for number in range(8):
            yield rf.Task(prompt=f"say {number}", key=f"task-{number}")

    @rf.reward
    def variety(self, trace: rf.Trace) -> float:
        return len(set(trace.last_reply)) / 64


class VariedSquares(ColorCodeword):
    """The squares of color-codeword, with another reward beside its own, so that rewards of a random model differ."""

    @rf.reward
    def byte_sum(self, trace: rf.Trace) -> float:
        return sum(trace.last_reply.encode()) % 64 / 64
