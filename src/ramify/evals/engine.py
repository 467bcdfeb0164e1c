"""A model server as a child: `ramify serve`, for an eval that was given a model and no address.

    NEW -> STARTING -> READY -> STOPPED
               |                  ^
               +------------------+   it exited, or was not ready in time: the end of its log says why

Its address is the one it prints. It runs on a leash (`ramify.cli.leash`), so it ends with us in any case.
"""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import time
from collections import deque
from enum import Enum
from pathlib import Path
from typing import Self

from ramify.config import write_toml
from ramify.errors import ConfigInvalid, DeadlineExceeded, ProviderError
from ramify.infer.config import ServeConfig
from ramify.store import wrap_storage_errors

TAIL = 30  # lines of the log that a failure shows
POLL = 0.05  # seconds between two looks at the log
STOPPING = 10.0  # seconds to end by itself
ADDRESS = re.compile(r"^serving .* at (http://\S+)$", re.MULTILINE)
UNUSABLE = 2  # the exit code of a command whose configuration cannot be used


class State(Enum):
    """Where the server is in its life."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class EngineChild:
    """One `ramify serve`. Start it once, stop it once."""

    def __init__(self, config: ServeConfig, folder: Path, *, deadline: float) -> None:
        self.config, self.deadline = config, deadline
        self.file, self.log = folder / "configs" / "serve.toml", folder / "logs" / "inference.log"
        self.state = State.NEW
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> Self:
        """Start it and wait until it says where it answers."""
        if self.state is not State.NEW:
            raise ProviderError(f"a server starts once; this one is {self.state.value}")
        with wrap_storage_errors(self.log):
            write_toml(self.config, self.file)
            self.log.parent.mkdir(parents=True, exist_ok=True)
            log = self.log.open("wb")
        with log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ramify.cli.leash", "serve", "@", str(self.file)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: rollouts in flight still need it
            )
        self.state = State.STARTING
        try:
            self.url = await self._address()
        except BaseException:
            await self.stop()
            raise
        self.state = State.READY
        return self

    async def stop(self) -> None:
        """End it: asked first, killed after a while."""
        process, self.state = self._process, State.STOPPED
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        end = time.monotonic() + STOPPING
        try:
            while process.poll() is None and time.monotonic() < end:
                await asyncio.sleep(POLL)
        finally:  # even if we are told to hurry
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def tail(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError), self.log.open(errors="replace") as log:
            return "".join(deque(log, TAIL)).strip()
        return "(no log)"

    async def _address(self) -> str:
        assert self._process is not None
        end = time.monotonic() + self.deadline
        while True:
            gone = self._process.poll()  # looked at before the log: what it wrote last counts
            if found := ADDRESS.search(self.log.read_text(errors="replace")):
                return found[1]
            if gone == UNUSABLE:
                raise ConfigInvalid(self.tail())
            if gone is not None:
                raise ProviderError(
                    f"the model server ended with exit code {gone}; the end of {self.log}:\n{self.tail()}"
                )
            if time.monotonic() > end:
                said = f"the model server was not ready within {self.deadline:g} s"
                raise DeadlineExceeded(f"{said}; the end of {self.log}:\n{self.tail()}")
            await asyncio.sleep(POLL)
