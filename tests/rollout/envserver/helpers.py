"""Configs, tasks and waits for the tests of env servers."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from ramify.processes.wire import WireSettings
from ramify.rollout.envserver import EnvServerConfig
from tests.rollout.envserver import environments

TASKSETS_FILE = environments.__file__
QUICK = WireSettings(heartbeat_interval=0.2, server_timeout=3.0)
STATIC = {"type": "static", "workers": 2}


def make_config(url: str, tmp_path: Path, *, cls: str = "Tricky", **options: Any) -> EnvServerConfig:
    source_keys = ("taskset", "pool", "max_tries", "name", "address", "kind", "runtime")
    source_options = {key: options.pop(key) for key in source_keys if key in options}
    source = {
        "name": source_options.get("name", "tricky"),
        "taskset": {"id": f"{TASKSETS_FILE}:{cls}", **source_options.get("taskset", {})},
        "pool": source_options.get("pool", STATIC),
        "max_tries": source_options.get("max_tries", 1),
        "address": source_options.get("address"),
        "runtime": source_options.get("runtime", {"id": "local"}),
    }
    return EnvServerConfig.model_validate(
        {
            source_options.get("kind", "train"): [source],
            "inference": {"engine": "external", "base_url": [url]},
            "output": tmp_path,
            "heartbeat_interval": 0.2,
            "shutdown_timeout": 0.5,
            "client_timeout": 2.0,
            **options,
        }
    )


def task(number: int, **options: Any) -> dict[str, Any]:
    return {"prompt": f"say {number}", "key": f"task-{number}", "number": number, **options}


async def wait_until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str, seconds: float = 60.0
) -> None:
    """Wait until a condition that depends on other processes is true."""
    deadline = time.monotonic() + seconds
    while True:
        outcome = condition()
        if outcome if isinstance(outcome, bool) else await outcome:
            return
        assert time.monotonic() < deadline, f"waited {seconds:g} s for {what}"
        await asyncio.sleep(0.02)


def descendants(pid: int) -> list[psutil.Process]:
    """Return all processes that a process started, directly or not."""
    return psutil.Process(pid).children(recursive=True)


async def wait_until_gone(processes: list[psutil.Process], what: str) -> None:
    await wait_until(lambda: not [process for process in processes if is_alive(process)], f"{what} to be gone")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
