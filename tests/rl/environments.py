"""An environment that can be held up, as a user would write it, in a file."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import ramify as rf


class Config(rf.TasksetConfig):
    gate: str = ""
    """A file; while it is there, no rollout gets any further, or none gets through if it says `broken`."""


class Plain(rf.Taskset):
    """Every reply is worth the same."""

    config: Config

    def load(self) -> Iterator[rf.Task]:
        for number in range(8):
            yield rf.Task(prompt=f"say {number}", key=f"task-{number}")

    async def setup(self) -> None:
        if self.config.gate and Path(self.config.gate).exists() and Path(self.config.gate).read_text() == "broken":
            raise ValueError("there is no such thing")
        while self.config.gate and Path(self.config.gate).exists():
            await asyncio.sleep(0.02)

    @rf.reward
    def replied(self, trace: rf.Trace) -> float:
        return float(bool(trace.last_reply))
