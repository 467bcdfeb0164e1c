"""A program in a sandbox of a provider, by way of the provider's SDK."""

import asyncio
import contextlib
import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import ClassVar, Protocol

from ramify.core.async_calls import cancel_all
from ramify.core.errors import AgentFailed, RamifyError, SandboxError
from ramify.rollout.runtime.shell_process import ShellProcess

OPEN_TIMEOUT = 60.0  # seconds for the provider to start a process
CLOSE_TIMEOUT = 30.0  # seconds for the SDK to close a process
EXIT_TIMEOUT = 30.0  # seconds for the exit status after the output has ended
INPUT_TIMEOUT = 120.0  # seconds to copy input of a program to the sandbox
MAX_UNREAD_BYTES = 64 << 20  # of an interactive program; the SDK reads on, whether or not it is read here


class SdkProcess(Protocol):
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

    async def open_process(self, sandbox_id: str, command: str, *, env: dict[str, str]) -> SdkProcess:
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
    _sdk_process: SdkProcess | None = None
    _copy_task: "asyncio.Task[None] | None" = None

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
            async with translate_sdk_errors("the input of a program cannot be copied to the sandbox", INPUT_TIMEOUT):
                await client.upload_bytes(sandbox_id, file, stdin, "stdin", int(INPUT_TIMEOUT))
            command = f"exec 3< {file}; rm -f {file}; {command} <&3 3<&-"
        elif not self.is_interactive:
            command = f"{command} < /dev/null"
        async with translate_sdk_errors("a sandbox did not start a program", OPEN_TIMEOUT):
            self._sdk_process = await client.open_process(sandbox_id, command, env=dict(env))
        copying = self._copy_streams(self._sdk_process)
        self._copy_task = asyncio.create_task(copying, name="copy the streams of a sandbox")

    async def write(self, data: bytes) -> None:
        """Write to the program's standard input."""
        if self._sdk_process is None or self.has_exited or self.is_closed:
            raise BrokenPipeError("the program's standard input is closed")
        async with translate_sdk_errors("a program of the sandbox cannot be written to", INPUT_TIMEOUT):
            await self._sdk_process.write_stdin(data)

    async def close(self) -> None:
        """Release the connection. The SDK ends what is left of the program."""
        self.is_closed = True
        sdk_process, self._sdk_process = self._sdk_process, None
        copy_task, self._copy_task = self._copy_task, None
        try:
            if sdk_process is not None:
                async with translate_sdk_errors("a program of the sandbox cannot be closed", CLOSE_TIMEOUT):
                    await sdk_process.aclose()
        finally:
            if copy_task is not None:
                await cancel_all([copy_task])
            self.feed_eof(1)
            self.feed_eof(2)
            self.set_exit_code(-9)  # unless it is known

    async def _copy_streams(self, sdk_process: SdkProcess) -> None:
        unread = _UnreadOutput()
        self.limit_unread_output(unread)

        async def copy(stream: int, chunks: AsyncIterator[bytes]) -> None:
            async for chunk in chunks:
                self.feed(stream, chunk)
                if stream == 1:
                    unread.add(len(chunk))
            self.feed_eof(stream)

        copies = [
            asyncio.create_task(copy(1, sdk_process.stdout), name="copy the standard output of a sandbox"),
            asyncio.create_task(copy(2, sdk_process.stderr), name="copy the standard error of a sandbox"),
        ]
        try:
            await asyncio.gather(*copies)
            async with asyncio.timeout(EXIT_TIMEOUT):
                self.set_exit_code(await sdk_process.wait())
        except Exception as error:  # noqa: BLE001 - the SDK raises errors of three libraries; the caller asks why
            self.feed(2, f"the connection to the sandbox was lost: {type(error).__name__}: {error}".encode())
            self.feed_eof(1)
            self.set_exit_code(-9)
            with contextlib.suppress(SandboxError):  # whoever closes this process sees it
                async with translate_sdk_errors("a program of the sandbox cannot be closed", CLOSE_TIMEOUT):
                    await sdk_process.aclose()
        finally:
            await cancel_all(copies)


class _UnreadOutput(asyncio.ReadTransport):
    """Counts what arrives while a reader of lines has enough. It cannot pause the SDK, which reads into its memory."""

    def __init__(self) -> None:
        super().__init__()
        self._num_bytes: int | None = None  # None: the reader keeps up

    def pause_reading(self) -> None:
        """Count from now on."""
        self._num_bytes = 0

    def resume_reading(self) -> None:
        """Count no longer: the reader has caught up."""
        self._num_bytes = None

    def add(self, num_bytes: int) -> None:
        """Count bytes. Raises OSError if too many of them are unread."""
        if self._num_bytes is not None:
            self._num_bytes += num_bytes
            if self._num_bytes > MAX_UNREAD_BYTES:
                raise OSError(f"the program wrote more than {MAX_UNREAD_BYTES >> 20} MiB that were not read")


@contextlib.asynccontextmanager
async def translate_sdk_errors(what: str, timeout: float) -> AsyncGenerator[None]:
    """Limit the time of calls of the SDK, and raise a named error for whatever they raise."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except (RamifyError, BrokenPipeError, asyncio.CancelledError):
        raise
    except TimeoutError as error:
        raise SandboxError(f"{what} in {timeout:g} s") from error
    except Exception as error:
        name = type(error).__name__
        if name == "SandboxOOMError":
            raise AgentFailed(f"{what}: its programs used more memory than the limit") from error
        raise SandboxError(f"{what}: {name}: {error}") from error
