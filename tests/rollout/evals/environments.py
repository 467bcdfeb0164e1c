"""Tasksets for evals, in a file, as a user would write them."""

import ctypes
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import ramify as rf


class Config(rf.TasksetConfig):
    size: int = 6
    fault: str = ""
    """The fault of task number 1."""


class NumberedTask(rf.Task):
    number: int = 0


class Echo(rf.Taskset):
    """Reverse `word NUMBER`."""

    config: Config

    def load(self) -> Iterator[rf.Task]:
        if self.config.fault == "load":
            raise ValueError("the corpus is not there")
        for number in range(self.config.size):
            yield NumberedTask(
                prompt=f"word {number}", answer=f"word {number}"[::-1], key=f"task-{number}", number=number
            )

    @rf.reward
    def right(self, task: NumberedTask, trace: rf.Trace) -> float:
        if task.number == 1:
            if self.config.fault == "text":
                return "much"  # type: ignore[return-value]
            if self.config.fault == "raise":
                raise RuntimeError("the judge fell asleep")
        return float(trace.last_reply == f"<reversed_text>{task.answer}</reversed_text>")

    @rf.metric
    def length(self, task: NumberedTask, trace: rf.Trace) -> float:
        if task.number == 1 and self.config.fault == "info":
            trace.info["notes"] = []
            trace.info["notes"].append({1, 2})
        return float(len(trace.last_reply))


class BlockingConfig(Config):
    where: str = ""
    """The code that never returns: `load`, `setup` or `regex`; or how it ends: `exit`, `crash` or `interrupt`."""
    begun: str = ""
    """A file that is created when the blocking code starts."""


class Blocking(Echo):
    """The same, with code that never returns."""

    config: BlockingConfig

    def load(self) -> Iterator[rf.Task]:
        if self.config.where == "load":
            self._block()
        yield from super().load()

    async def setup(self) -> None:
        if self.config.where == "setup":
            self._block()
        if self.config.where == "regex":
            re.match("(a+)+$", "a" * 60 + "b")  # holds the interpreter lock
        if self.config.where == "exit":
            os._exit(0)
        if self.config.where == "crash":
            ctypes.string_at(0)
        if self.config.where == "interrupt":
            raise KeyboardInterrupt

    def _block(self) -> None:
        Path(self.config.begun).touch()
        time.sleep(900)


class Writing(Echo):
    """The same, with a file in every work directory."""

    async def setup(self, runtime: rf.Runtime) -> None:
        await runtime.write("note.txt", "kept")


class Compared(Echo):
    """The same, with a group reward."""

    @rf.group_reward(weight=0.5)
    def rank(self, traces: list[rf.Trace]) -> list[float]:
        return [float(position) for position in range(len(traces))]


class Unrewarded(rf.Taskset):
    """Tasks without a reward."""

    def load(self) -> Iterator[rf.Task]:
        for number in range(4):
            yield rf.Task(prompt=f"word {number}", key=f"task-{number}")

    @rf.metric
    def length(self, trace: rf.Trace) -> float:
        return float(len(trace.last_reply))


class JudgedConfig(Config):
    judge_url: str
    """The address of the judge."""
    judge_concurrency: int = 8


class Judged(rf.Taskset):
    """Words of any length: a judge scores each of them, and another one compares them."""

    config: JudgedConfig

    def __init__(self, config: JudgedConfig) -> None:
        super().__init__(config)
        model = {"base_url": config.judge_url, "model": "m", "concurrency": config.judge_concurrency}
        self.single, self.relative = (rf.Judge.load({**model, "id": id}) for id in ("reference", "relative"))

    def load(self) -> Iterator[rf.Task]:
        for number in range(self.config.size):
            yield rf.Task(prompt=f"word {number}", answer="even", key=f"task-{number}")

    @rf.reward
    async def even(self, task: rf.Task, trace: rf.Trace) -> float:
        return await self.single.score(task, trace)

    @rf.group_reward
    async def long(self, task: rf.Task, traces: list[rf.Trace]) -> list[float]:
        return await self.relative.score_group(task, traces)
