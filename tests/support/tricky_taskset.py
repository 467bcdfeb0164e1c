"""Tasksets whose tasks select a good or bad behaviour, in a file as a user would write it."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ramify as rf
from ramify.infer.gateway.config import REQUEST_TASK_PREFIX


class Config(rf.TasksetConfig):
    size: int = 10
    boot: str = ""
    """What happens when a worker loads the taskset."""


class Tricky(rf.Taskset):
    """`task.does` selects the behaviour of a rollout, `task.gate` is a file it waits for."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.boot == "die":
            print("no fuel", flush=True)
            os._exit(7)
        if config.boot == "die while reporting":
            os.write(int(sys.argv[2]), b'{"pid"')
            os._exit(7)
        if config.boot:
            raise ValueError(config.boot)

    def load(self) -> Iterator[rf.Task]:
        for number in range(self.config.size):
            fields = {"prompt": f"say {number}", "key": f"task-{number}", "number": number}
            yield rf.Task.model_validate(fields)

    async def setup(self, task: rf.Task, runtime: rf.Runtime) -> None:
        options: Any = task
        does, gate = getattr(task, "does", ""), getattr(task, "gate", "")
        if gate:
            with Path(f"{gate}.begun").open("a") as started:
                started.write(f"{task.key}\n")
            while not Path(gate).exists():
                await asyncio.sleep(0.02)
        if does == "raise":
            raise RuntimeError("the environment is broken")
        if does == "spin":
            spin_forever()
        if does == "send":  # a request that blocks; its task has the name that the gateway gives it
            await asyncio.create_task(block_event_loop(), name=f"{REQUEST_TASK_PREFIX}agent")
        if does == "exit":
            os._exit(9)
        if does == "shell":
            nap, file = f"sleep {options.nap}", options.file
            await runtime.run(f"echo $$ > {file}; (setsid {nap} &) ; {nap} & {nap}", timeout=900)
        if does == "model":
            Path(options.file).write_text(os.environ["RAMIFY_MODEL_JUDGE"])
        if does == "talk":
            write_output(str(task.key))

    @rf.reward
    async def right(self, task: rf.Task, trace: rf.Trace) -> float:
        if getattr(task, "does", "") == "block":
            time.sleep(3)
        return float(trace.last_reply == "<reversed_text>cba</reversed_text>")

    @rf.group_reward(weight=0.5)
    def rank(self, traces: list[rf.Trace]) -> list[float]:
        for position, trace in enumerate(traces):
            trace.metrics["position"], trace.info["position"] = position, position
        return [float(position) for position in range(len(traces))]


def spin_forever() -> None:
    while True:
        time.sleep(0.001)


async def block_event_loop() -> None:
    spin_forever()


def write_output(key: str) -> None:
    logging.getLogger("x").info("logged %s", key)
    print(f"printed {key}")
    subprocess.run(["sh", "-c", f"echo shouted {key} >&2"], check=True)
