"""A model server as a child: `ramify serve`, for an eval that was given a model and no address.

    NEW -> STARTING -> READY -> STOPPED
               |                  ^
               +------------------+   it exited, or was not ready in time: the end of its log says why

Its address is the one it prints. It runs on a leash (`ramify.cli.parent_watch`), so it ends with us in any case.
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

LOG_TAIL_LINES = 30  # lines of the log that a failure shows
POLL_INTERVAL = 0.05  # seconds between two looks at the log
STOP_TIMEOUT = 10.0  # seconds to end by itself
ADDRESS_PATTERN = re.compile(r"^serving .* at (http://\S+)$", re.MULTILINE)
CONFIG_ERROR_EXIT_CODE = 2  # the exit code of a command whose configuration cannot be used


class EngineProcessState(Enum):
    """Where the server is in its life."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    STOPPED = "stopped"


class EngineProcess:
    """One `ramify serve`. Start it once, stop it once."""

    def __init__(self, config: ServeConfig, run_dir: Path, *, start_timeout: float) -> None:
        self.config, self.start_timeout = config, start_timeout
        self.config_path, self.log_path = run_dir / "configs" / "serve.toml", run_dir / "logs" / "inference.log"
        self.state = EngineProcessState.NEW
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> Self:
        """Start it and wait until it says where it answers."""
        if self.state is not EngineProcessState.NEW:
            raise ProviderError(f"a server starts once; this one is {self.state.value}")
        with wrap_storage_errors(self.log_path):
            write_toml(self.config, self.config_path)
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            log = self.log_path.open("wb")
        with log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ramify.cli.parent_watch", "serve", "@", str(self.config_path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: rollouts in flight still need it
            )
        self.state = EngineProcessState.STARTING
        try:
            self.url = await self._wait_for_address()
        except BaseException:
            await self.stop()
            raise
        self.state = EngineProcessState.READY
        return self

    async def stop(self) -> None:
        """End it: asked first, killed after a while."""
        process, self.state = self._process, EngineProcessState.STOPPED
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        try:
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(POLL_INTERVAL)
        finally:  # even if we are told to hurry
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError), self.log_path.open(errors="replace") as log:
            return "".join(deque(log, LOG_TAIL_LINES)).strip()
        return "(no log)"

    async def _wait_for_address(self) -> str:
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout
        while True:
            exit_code = self._process.poll()  # looked at before the log: what it wrote last counts
            if match := ADDRESS_PATTERN.search(self.log_path.read_text(errors="replace")):
                return match[1]
            if exit_code == CONFIG_ERROR_EXIT_CODE:
                raise ConfigInvalid(self.log_tail())
            if exit_code is not None:
                raise ProviderError(
                    f"the model server ended with exit code {exit_code}; the end of {self.log_path}:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                message = f"the model server was not ready within {self.start_timeout:g} s"
                raise DeadlineExceeded(f"{message}; the end of {self.log_path}:\n{self.log_tail()}")
            await asyncio.sleep(POLL_INTERVAL)
