"""An env server as a child process: `ramify env-server`.

The server prints its address. It runs under `ramify.cli.parent_watch`, so that it exits, with its workers, however this
process ends.
"""

import asyncio
import contextlib
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

from ramify.config import write_toml
from ramify.envserver.config import EnvServerConfig
from ramify.errors import ConfigInvalid, DeadlineExceeded, WorkerDied

ADDRESS_PATTERN = re.compile(r"^serving (\S+) at (\S+)$")
TAIL_LINES = 30  # lines of output in an error message
CONFIG_ERROR_EXIT_CODE = 2  # of a command with an invalid configuration


class EnvServerProcess:
    """One `ramify env-server` process; its configuration is written to `config_path`. Start it once, stop it once.

    `address` is where it listens, known after `start`.
    """

    def __init__(self, config: EnvServerConfig, config_path: Path, *, start_timeout: float = 180.0) -> None:
        self.config, self.config_path, self.start_timeout = config, config_path, start_timeout
        self.address = ""
        self._process: asyncio.subprocess.Process | None = None
        self._output_tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._reader_task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> Self:
        """Start the process and wait until it prints its address."""
        write_toml(self.config, self.config_path)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ramify.cli.parent_watch", "env-server", "@", str(self.config_path)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self.start_timeout):
                await self._wait_for_address()
        except TimeoutError:
            await self.stop()
            text = f"the env server was not ready within {self.start_timeout:g} s: {self.output_tail}"
            raise DeadlineExceeded(text) from None
        except BaseException:
            await self.stop()
            raise
        self._reader_task = asyncio.create_task(self._drain_output(), name="output of the env server")
        return self

    async def stop(self) -> int | None:
        """Stop the process, which lets running attempts finish for `grace` seconds; return its exit code."""
        process = self._process
        if process is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), timeout=self.config.grace + 30.0)
        except TimeoutError:
            process.kill()
            await process.wait()
        finally:  # also if this is cancelled: closing stdin ends the process
            if process.stdin is not None:
                process.stdin.close()
            if self._reader_task is not None:
                self._reader_task.cancel()
        return process.returncode

    async def wait(self) -> int:
        """Wait until the process exits and return its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def output_tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._output_tail)

    async def _wait_for_address(self) -> None:
        assert self._process is not None
        async for line in self._read_lines():
            if match := ADDRESS_PATTERN.match(line):
                self.address = match[2]
                return
            self._output_tail.append(line)
        code = await self._process.wait()
        if code == CONFIG_ERROR_EXIT_CODE:
            raise ConfigInvalid(self.output_tail)
        raise WorkerDied(f"the env server exited with code {code}:\n{self.output_tail}")

    async def _drain_output(self) -> None:
        async for line in self._read_lines():
            self._output_tail.append(line)

    async def _read_lines(self) -> AsyncIterator[str]:
        """Yield output lines until the process exits. All output must be read: a full pipe would block the process."""
        assert self._process is not None and self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # the line is too long; drop what was read of it
                continue
            if not line:
                return
            yield line.decode(errors="replace").rstrip()
