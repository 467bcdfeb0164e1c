"""A user environment whose rollouts can be blocked or broken by a file."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import ramify as rf
from ramify.errors import AgentExit


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
        if self.config.gate and Path(self.config.gate).exists() and Path(self.config.gate).read_text() == "broken":
            raise ValueError("there is no such thing")
        if self.config.gate and Path(self.config.gate).exists() and Path(self.config.gate).read_text() == "exit":
            raise AgentExit(f"code 2: can't open file 'nope.py'\n{Path.cwd()}")
        while self.config.gate and Path(self.config.gate).exists() and Path(self.config.gate).read_text() != "quit":
            await asyncio.sleep(0.1)

    async def finalize(self, trace: rf.Trace) -> None:
        if self.config.gate and Path(self.config.gate).exists() and Path(self.config.gate).read_text() == "quit":
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
