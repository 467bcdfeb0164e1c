"""Programs of a runtime whose output is captured, and those whose standard files are pipes of this process.

`wait` depends on the exit of the program only: a background server that it started may keep the pipes open for ever.
"""

import asyncio
import contextlib
import os
from abc import abstractmethod

from ramify.core.errors import RamifyError
from ramify.env.runtime import TIMEOUT_EXIT_CODE, ExecResult, RuntimeProcess

OUTPUT_DRAIN_TIMEOUT = 0.2  # seconds to read output after an exit: a background child may keep the pipes open


class BoundedOutput:
    """Keeps the first and the last bytes of a stream, half of the limit each."""

    def __init__(self, limit: int) -> None:
        self._half_limit = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._num_dropped = 0

    def write(self, data: bytes) -> None:
        """Append data; drop bytes between the head and the tail if there are too many."""
        head_room = self._half_limit - len(self._head)
        self._head += data[:head_room]
        self._tail += data[head_room:]
        excess = len(self._tail) - self._half_limit
        if excess > 0:
            del self._tail[:excess]
            self._num_dropped += excess

    def getvalue(self) -> bytes:
        """Return the kept bytes, with a note in place of dropped ones."""
        if not self._num_dropped:
            return bytes(self._head + self._tail)
        return bytes(self._head) + f"\n[{self._num_dropped} bytes left out]\n".encode() + bytes(self._tail)


class CapturedProcess(RuntimeProcess):
    """A program whose output is captured: the first and the last bytes, and the lines of an interactive program.

    A subclass writes the output, and reports the exit with `set_exit_code`.
    """

    def __init__(self, max_output_bytes: int, *, interactive: bool) -> None:
        self._outputs = (BoundedOutput(max_output_bytes), BoundedOutput(max_output_bytes))
        self._lines = asyncio.StreamReader(limit=max(max_output_bytes, 1)) if interactive else None
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def has_exited(self) -> bool:
        """Whether the program itself has exited; its children may still run."""
        return self._exit_code.done()

    def set_exit_code(self, exit_code: int) -> None:
        """Record the exit of the program. The first call counts."""
        if not self._exit_code.done():
            self._exit_code.set_result(exit_code)

    @abstractmethod
    async def kill_tree(self) -> None:
        """Kill the program and all processes it started; return when they are gone."""

    @abstractmethod
    async def close(self) -> None:
        """Close the streams."""

    async def kill(self) -> None:
        """Kill the program and all it started, and close the streams."""
        try:
            await self.kill_tree()
        finally:
            await self.close()

    async def read_line(self, timeout: float) -> bytes:
        """Return the next line of an interactive program's output."""
        if self._lines is None:
            raise ValueError("only an interactive program's output can be read by lines")
        async with asyncio.timeout(timeout):
            return await self._lines.readline()

    def _build_result(self, *, timed_out: bool) -> ExecResult:
        returncode = TIMEOUT_EXIT_CODE if timed_out else self._exit_code.result()
        stdout, stderr = (output.getvalue() for output in self._outputs)
        return ExecResult(returncode, stdout, stderr, timed_out)


class PipedProcess(CapturedProcess):
    """A program with pipes for its standard input, output and error.

    Call `open_pipes`, start the program with `program_fds`, and then `close_program_fds`.
    """

    def __init__(self, max_output_bytes: int, *, interactive: bool) -> None:
        super().__init__(max_output_bytes, interactive=interactive)
        self._pipes_closed: list[asyncio.Future[None]] = []
        self._transports: list[asyncio.BaseTransport] = []
        self._stdin: asyncio.WriteTransport | None = None
        self._stdin_protocol = InputFlow()
        self.program_fds: list[int] = []

    async def open_pipes(self, stdin: bytes | None) -> None:
        """Create the pipes, and send `stdin`."""
        loop = asyncio.get_running_loop()
        if stdin is None and self._lines is None:
            self.program_fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        else:
            read_fd, write_fd = os.pipe()
            self.program_fds.append(read_fd)
            transport, _ = await loop.connect_write_pipe(lambda: self._stdin_protocol, os.fdopen(write_fd, "wb", 0))
            self._stdin = transport
            self._transports.append(transport)
            if stdin is not None:
                transport.write(stdin)
            if self._lines is None:
                transport.write_eof()
        for index, output in enumerate(self._outputs):
            read_fd, write_fd = os.pipe()
            self.program_fds.append(write_fd)
            closed = loop.create_future()
            self._pipes_closed.append(closed)
            protocol = _OutputPipe(output, self._lines if index == 0 else None, closed)
            transport, _ = await loop.connect_read_pipe(lambda protocol=protocol: protocol, os.fdopen(read_fd, "rb", 0))
            if protocol.lines is not None:
                protocol.lines.set_transport(transport)
            self._transports.append(transport)

    def close_program_fds(self) -> None:
        """Close the program's ends of the pipes, which the program has inherited."""
        for fd in self.program_fds:
            os.close(fd)
        self.program_fds.clear()

    def close_pipes(self) -> None:
        """Close all pipes."""
        self.close_program_fds()
        for transport in self._transports:
            transport.close()

    async def wait(self, timeout: float) -> ExecResult:
        """Wait until the program exits, or kill it after `timeout` seconds, and return its output."""
        timed_out = not (await asyncio.wait([self._exit_code], timeout=timeout))[0]
        if timed_out:
            try:
                await self.kill_tree()
            except RamifyError:
                self.close_pipes()
                raise
        await asyncio.wait(self._pipes_closed, timeout=OUTPUT_DRAIN_TIMEOUT)
        self.close_pipes()
        return self._build_result(timed_out=timed_out)

    async def close(self) -> None:
        """Close all pipes."""
        self.close_pipes()

    async def write(self, data: bytes) -> None:
        """Write to the program's standard input, and wait while its pipe is full."""
        if self._stdin is None or self._stdin.is_closing():
            raise BrokenPipeError("the program's standard input is closed")
        self._stdin.write(data)
        await self._stdin_protocol.writable.wait()


class InputFlow(asyncio.BaseProtocol):
    """Tells a writer whether the program reads: `writable` is set unless the program's input is full."""

    def __init__(self) -> None:
        self.writable = asyncio.Event()
        self.writable.set()

    def pause_writing(self) -> None:
        """Let writers wait: the input is full."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """Let writers go on."""
        self.writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let writers go on: the input is closed, which they notice."""
        self.writable.set()


class _OutputPipe(asyncio.Protocol):
    """Keeps output up to the limit, and passes it on to a reader of lines if there is one."""

    def __init__(
        self, output: BoundedOutput, lines: asyncio.StreamReader | None, closed: "asyncio.Future[None]"
    ) -> None:
        self._output, self.lines, self._closed = output, lines, closed

    def data_received(self, data: bytes) -> None:
        self._output.write(data)
        if self.lines is not None:
            self.lines.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.lines is not None:
            self.lines.feed_eof()
        with contextlib.suppress(asyncio.InvalidStateError):
            self._closed.set_result(None)
