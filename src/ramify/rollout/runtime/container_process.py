"""A program in a container, started by `docker exec` or `podman exec`."""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence

from ramify.core.errors import SandboxError
from ramify.rollout.runtime.shell_process import ShellProcess

CLOSE_TIMEOUT = 10.0  # seconds for a killed `exec` command to end
VARIABLE_PREFIX = "RAMIFY_VAR_"


class ContainerProcess(ShellProcess):
    """A program in a container, run by the engine's `exec` command, which has its streams."""

    _transport: asyncio.SubprocessTransport | None = None
    _streams: "_ExecStreams | None" = None

    async def start(
        self, command: Sequence[str], container: str, args: Sequence[str], env: Mapping[str, str], stdin: bytes | None
    ) -> None:
        """Run `sh` with these arguments in a container. `command`: the engine's `exec` command.

        Values of environment variables are passed in variables of other names: the program's own names, such as PATH,
        would change the engine's command, and its arguments are visible to every user of the machine.
        """
        has_stdin = stdin is not None or self.is_interactive
        names = {f"{VARIABLE_PREFIX}{index}": name for index, name in enumerate(env)}
        exports = "".join(f'export {name}="${alias}"; unset {alias}\n' for alias, name in names.items())
        argv = [*command, *(["--interactive"] if has_stdin else []), *(f"--env={alias}" for alias in names)]
        option, script, *rest = args
        transport, streams = await asyncio.get_running_loop().subprocess_exec(
            lambda: _ExecStreams(self),
            *argv,
            container,
            "sh",
            option,
            exports + script,
            *rest,
            stdin=asyncio.subprocess.PIPE if has_stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **{alias: env[name] for alias, name in names.items()}},
            start_new_session=True,
        )
        self._transport, self._streams = transport, streams
        output = transport.get_pipe_transport(1)
        if isinstance(output, asyncio.ReadTransport):
            self.limit_unread_output(output)
        pipe = transport.get_pipe_transport(0)
        if isinstance(pipe, asyncio.WriteTransport):
            if stdin:
                pipe.write(stdin)
            if not self.is_interactive:
                pipe.write_eof()

    def set_exit_code(self, status: int) -> None:
        """Record the exit status, and close standard input: the sandbox reads it to its end."""
        super().set_exit_code(status)
        pipe = None if self._transport is None else self._transport.get_pipe_transport(0)
        if pipe is not None and self.is_interactive:
            pipe.close()

    async def write(self, data: bytes) -> None:
        """Write to the program's standard input, and wait while its pipe is full."""
        pipe = None if self._transport is None else self._transport.get_pipe_transport(0)
        if not isinstance(pipe, asyncio.WriteTransport) or pipe.is_closing() or self.has_exited or self.is_closed:
            raise BrokenPipeError("the program's standard input is closed")
        pipe.write(data)
        if self._streams is not None:
            await self._streams.writable.wait()

    async def close(self) -> None:
        """End the `exec` command. The program itself is not affected."""
        self.is_closed = True
        if self._transport is not None and self._streams is not None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()
            self._transport.close()
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await self._streams.ended.wait()
            except TimeoutError as error:
                raise SandboxError(f"the exec command {self._transport.get_pid()} did not end") from error


class _ExecStreams(asyncio.SubprocessProtocol):
    """Passes the streams of an `exec` command to its process."""

    def __init__(self, process: ContainerProcess) -> None:
        self._process = process
        self.writable = asyncio.Event()
        self.writable.set()
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._process.feed(fd, data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd > 0:
            self._process.feed_eof(fd)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.set_exit_code(self._transport.get_returncode() or 0)
        self._process.is_closed = True
        self.writable.set()
        self.ended.set()
