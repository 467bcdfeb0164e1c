"""A program in a sandbox of a provider, by way of the provider's SDK."""

import asyncio
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar, Protocol

from ramify.runtime.shell_process import ShellProcess

CLOSE_TIMEOUT = 30.0  # seconds for the SDK to close a process
INPUT_TIMEOUT = 120.0  # seconds to copy the standard input of a program to the sandbox


class LiveProcess(Protocol):
    """A process of the SDK."""

    stdout: AsyncIterator[bytes]
    stderr: AsyncIterator[bytes]

    async def write_stdin(self, data: bytes) -> None:
        """Write to standard input, which cannot be ended."""

    async def wait(self) -> int:
        """Return the exit status."""
        ...

    async def aclose(self) -> None:
        """Stop the process if it runs, and release the connection."""


class SandboxClient(Protocol):
    """The part of the SDK's client that starts programs."""

    async def open_process(self, sandbox_id: str, command: str, *, env: dict[str, str]) -> LiveProcess:
        """Start a command line."""
        ...

    async def upload_bytes(
        self, sandbox_id: str, file_path: str, file_bytes: bytes, filename: str, timeout: int
    ) -> object:
        """Write a file."""
        ...


class HostedProcess(ShellProcess):
    """A program of a sandbox whose streams the SDK delivers."""

    can_end_input: ClassVar[bool] = False
    _live: LiveProcess | None = None
    _pump: "asyncio.Task[None] | None" = None

    async def start(
        self,
        client: SandboxClient,
        sandbox_id: str,
        args: Sequence[str],
        env: Mapping[str, str],
        stdin: bytes | None,
    ) -> None:
        """Run `sh` with these arguments in a sandbox. Its input is a file, since the SDK cannot end an input."""
        command = shlex.join(["sh", *args])
        if stdin:
            file = f"/tmp/.ramify-{self.marker}"
            await client.upload_bytes(sandbox_id, file, stdin, "stdin", int(INPUT_TIMEOUT))
            command = f"exec 3< {file}; rm -f {file}; {command} <&3 3<&-"
        elif not self.is_interactive:
            command = f"{command} < /dev/null"
        self._live = await client.open_process(sandbox_id, command, env=dict(env))
        self._pump = asyncio.create_task(self._copy_streams(self._live), name="copy the output of a sandbox")

    async def write(self, data: bytes) -> None:
        """Write to the program's standard input."""
        if self._live is None or self.has_exited or self.is_closed:
            raise BrokenPipeError("the program's standard input is closed")
        await self._live.write_stdin(data)

    async def close(self) -> None:
        """Release the connection. The SDK ends what is left of the program."""
        self.is_closed = True
        live, self._live = self._live, None
        pump, self._pump = self._pump, None
        if live is not None:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await live.aclose()
        if pump is not None:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)
        self.feed_eof(1)
        self.feed_eof(2)
        self.set_exit_code(-9)  # unless it is known

    async def _copy_streams(self, live: LiveProcess) -> None:
        async def copy(stream: int, chunks: AsyncIterator[bytes]) -> None:
            async for chunk in chunks:
                self.feed(stream, chunk)
            self.feed_eof(stream)

        try:
            await asyncio.gather(copy(1, live.stdout), copy(2, live.stderr))
            status = await live.wait()
        except Exception as error:  # noqa: BLE001 - the SDK raises errors of three libraries; the caller asks why
            self.feed(2, f"the connection to the sandbox was lost: {error}".encode())
            self.feed_eof(1)
            status = -9
        self.set_exit_code(status)
