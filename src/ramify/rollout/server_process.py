"""A `ramify` command that serves at an address, as a child process.

The command reads its configuration from a file and prints one line when it is ready: `serving NAME at ADDRESS`.
"""

import re
from pathlib import Path
from typing import Self

from ramify.core.config import Config, write_toml
from ramify.core.errors import ConfigInvalid, DeadlineExceeded, RamifyError
from ramify.processes.child import RAMIFY_COMMAND, ChildProcess, wait_until_ready
from ramify.processes.exit import describe_exit
from ramify.processes.log import ProcessLog
from ramify.run.store import storage_call

ADDRESS_PATTERN = re.compile(r"^serving .+ at (\S+)$", re.MULTILINE)
POLL_INTERVAL = 0.05  # seconds between two looks at the log


class ServerProcess(ChildProcess):
    """One process that serves. Start it once, stop it once; it is also an async context manager.

    Attributes:
        title: what it is, as the subject of a sentence.
        exit_error: the failure to raise if it exits before it is ready.
        address: where it listens; empty before `start` has returned.
        log: the file with its output.
    """

    title: str
    exit_error: type[RamifyError]

    def __init__(
        self,
        command: str,
        config: Config,
        config_path: Path,
        log_path: Path,
        *,
        start_timeout: float,
        stop_timeout: float,
        python: str | None = None,
    ) -> None:
        super().__init__(stop_timeout=stop_timeout)
        self.config_path, self.log, self.address = config_path, ProcessLog(log_path), ""
        self._config, self._ready_timeout = config, start_timeout
        ramify = RAMIFY_COMMAND if python is None else (python, *RAMIFY_COMMAND[1:])
        self._command = (*ramify, command, "@", str(config_path))

    async def start(self) -> Self:
        """Start the process and wait until it has printed its address.

        Raises ConfigInvalid, `exit_error` or DeadlineExceeded, with the end of the log, if it does not, and StorageFull
        or StorageFailed.
        """
        with storage_call(self.log.path):
            write_toml(self._config, self.config_path)
            log = self.log.open()
        try:
            with log:
                await self.spawn(self._command, log.fileno())
            await self._wait_for_address()
        except BaseException:
            await self.stop()
            raise
        return self

    async def _wait_for_address(self) -> None:
        try:
            is_ready = await wait_until_ready(
                self.poll, self._has_address, timeout=self._ready_timeout, poll_interval=POLL_INTERVAL
            )
        except TimeoutError:
            message = f"{self.title} was not ready within {self._ready_timeout:g} s"
            raise DeadlineExceeded(f"{message}; {self.log.describe_tail()}") from None
        if not is_ready:
            code, failure = await self.wait(), self.log.read_failure()
            if isinstance(failure, ConfigInvalid):
                raise failure
            raise self.exit_error(f"{self.title} {describe_exit(code)}; {self.log.describe_tail()}")

    async def _has_address(self) -> bool:
        match = ADDRESS_PATTERN.search(self.log.tail(None))
        self.address = match[1] if match else ""
        return bool(match)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
