"""Env servers for tests: in this process, or as the command."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from ramify.envserver import EnvServerConfig
from ramify.wire import WireSettings
from tests.envserver import environments

FILE = environments.__file__
QUICK = WireSettings(heartbeat_interval=0.2, server_timeout=3.0)
STATIC = {"type": "static", "workers": 2}


def configured(url: str, tmp_path: Path, *, cls: str = "Tricky", **more: Any) -> EnvServerConfig:
    source_keys = ("taskset", "pool", "attempts", "name", "address", "kind")
    told = {key: more.pop(key) for key in source_keys if key in more}
    source = {
        "name": told.get("name", "tricky"),
        "taskset": {"id": f"{FILE}:{cls}", **told.get("taskset", {})},
        "pool": told.get("pool", STATIC),
        "attempts": told.get("attempts", 1),
        "address": told.get("address"),
    }
    return EnvServerConfig.model_validate(
        {
            told.get("kind", "train"): [source],
            "inference": {"engine": "external", "base_url": [url]},
            "output": tmp_path,
            "heartbeat": 0.2,
            "grace": 0.5,
            "reconnect": 2.0,
            **more,
        }
    )


def task(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"say {number}", "key": f"task-{number}", "number": number, **more}


async def until(true: Callable[[], bool] | Callable[[], Awaitable[bool]], what: str, seconds: float = 30.0) -> None:
    """Wait for something that other processes bring about."""
    end = time.monotonic() + seconds
    while True:
        found = true()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        await asyncio.sleep(0.02)


def family(pid: int) -> list[psutil.Process]:
    """All that a process has started, directly or not."""
    return psutil.Process(pid).children(recursive=True)


async def gone(processes: list[psutil.Process], what: str, seconds: float) -> None:
    await until(lambda: not [one for one in processes if alive(one)], f"{what} to be gone", seconds)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
