"""A model server as a child process: `ramify serve`, for an eval that names a model and no server.

The server prints its address. It runs under `ramify.cli.parent_watch`, so it ends however this process ends.
"""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Self

from ramify.config import write_toml
from ramify.errors import ConfigInvalid, DeadlineExceeded, ProviderError
from ramify.infer.config import ServeConfig
from ramify.store import wrap_storage_errors

LOG_TAIL_LINES = 30  # lines of the log that an error message shows
POLL_INTERVAL = 0.05  # seconds
STOP_TIMEOUT = 10.0  # seconds between SIGTERM and SIGKILL
ADDRESS_PATTERN = re.compile(r"^serving .* at (http://\S+)$", re.MULTILINE)
CONFIG_ERROR_EXIT_CODE = 2


class EngineProcess:
    """One `ramify serve` process. Start it once, stop it once; it is also an async context manager.

    `url` is its address, empty before `start` has returned; `log_path` is the file with its output.
    """

    def __init__(self, config: ServeConfig, run_dir: Path, *, start_timeout: float) -> None:
        self.config, self.start_timeout = config, start_timeout
        self.config_path, self.log_path = run_dir / "configs" / "serve.toml", run_dir / "logs" / "inference.log"
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None before `start`."""
        return None if self._process is None else self._process.pid

    async def start(self) -> Self:
        """Start the process and wait until it has printed its address.

        Raises ConfigInvalid, ProviderError or DeadlineExceeded, with the end of the log, if it does not.
        """
        if self._process is not None:
            raise ProviderError("the model server was started before")
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
                start_new_session=True,  # Ctrl-C must not reach it: rollouts in flight still need the server
            )
        try:
            self.url = await self._wait_for_address(self._process)
        except BaseException:
            await self.stop()
            raise
        return self

    async def stop(self) -> None:
        """Send SIGTERM, and kill the process if it does not exit within STOP_TIMEOUT seconds."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT
        try:
            while process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(POLL_INTERVAL)
        finally:  # also if this task is cancelled
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        with contextlib.suppress(OSError), self.log_path.open(errors="replace") as log:
            return "".join(deque(log, LOG_TAIL_LINES)).strip()
        return "(no log)"

    async def _wait_for_address(self, process: subprocess.Popen[bytes]) -> str:
        deadline = time.monotonic() + self.start_timeout
        while True:
            exit_code = process.poll()  # before the log is read, so that its last lines are seen
            if match := ADDRESS_PATTERN.search(self.log_path.read_text(errors="replace")):
                return match[1]
            if exit_code == CONFIG_ERROR_EXIT_CODE:
                raise ConfigInvalid(self.log_tail())
            if exit_code is not None:
                raise ProviderError(
                    f"the model server exited with code {exit_code}; last lines of {self.log_path}:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                message = f"the model server was not ready within {self.start_timeout:g} s"
                raise DeadlineExceeded(f"{message}; last lines of {self.log_path}:\n{self.log_tail()}")
            await asyncio.sleep(POLL_INTERVAL)
