"""A program in a sandbox, and the connection to the sandbox's first program (`sandbox_init` describes the messages).

Programs of an agent can keep their sandbox from answering, for example by using all its memory and processor time. A
sandbox that no longer answers is therefore killed as a whole, and the agent is blamed (`AgentFailed`). Only if no
program was started yet, the failure is the machine's (`SandboxError`). `find_end_error` decides it.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.core.errors import AgentFailed, RamifyError, SandboxError
from ramify.env.runtime import ExecResult
from ramify.processes.child import wait_readable
from ramify.processes.cleanup import MARKER_VARIABLE
from ramify.rollout.runtime.piped_process import PipedProcess

MAX_MESSAGE_BYTES = 1 << 16
SEND_TIMEOUT = 20.0  # seconds for the sandbox to accept a request
SEND_INTERVAL = 0.01
CREDENTIALS = struct.Struct("iII")  # process id, user id and group id, as this process sees them
SCM_CREDENTIALS = 2


ReplyHandlerFunction = Callable[["SandboxReply | None"], None]
"""Called with each reply to a request, and with None when the sandbox ends."""


class SandboxReply(msgspec.Struct):
    """A message of `sandbox_init`. Programs of the sandbox could forge it, so the host must not trust it."""

    id: int
    pid: int | None = None
    errno: int | None = None
    file: str = ""
    status: int | None = None
    killed: bool | None = None


def create_sealed_file(name: str, content: bytes) -> int:
    """Return an open file in memory whose content nobody can change. The caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    return fd


def read_message(control: socket.socket) -> bytes | None:
    """Return the next message, None if there is none yet, and an empty one if the other end is closed."""
    try:
        return control.recv(MAX_MESSAGE_BYTES)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""


async def receive(control: socket.socket, num_fds: int) -> tuple[bytes, list[int], int]:
    """Return the next message, its open files, and the process id of its sender.

    The kernel fills in the process id if the socket asks for it (SO_PASSCRED); otherwise it is 0.
    """
    await wait_readable(control.fileno())
    space = socket.CMSG_SPACE(CREDENTIALS.size) + socket.CMSG_SPACE(4 * num_fds)
    try:
        data, ancillary, _, _ = control.recvmsg(MAX_MESSAGE_BYTES, space)
    except ConnectionError:
        return b"", [], 0
    fds: list[int] = []
    pid = 0
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += struct.unpack(f"{len(content) // 4}i", content)
        elif (level, kind) == (socket.SOL_SOCKET, SCM_CREDENTIALS):
            pid = CREDENTIALS.unpack(content)[0]
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds, pid


class SandboxChannel:
    """Sends requests to a sandbox and passes its replies to the handlers of their ids.

    - `is_closed`: whether the sandbox has ended.
    - `has_started_program`: whether a program was started, which may have damaged the sandbox.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._control.setblocking(False)
        self._handlers: dict[int, ReplyHandlerFunction] = {}
        self._next_id = 0
        self._is_reading = False
        self.is_closed = False
        self.has_started_program = False

    def start(self) -> None:
        """Deliver replies from now on."""
        asyncio.get_running_loop().add_reader(self._control, self._read)
        self._is_reading = True

    def close(self) -> None:
        """Close the connection, which ends the sandbox. Every handler gets None."""
        if self._is_reading:
            asyncio.get_running_loop().remove_reader(self._control)
            self._is_reading = False
        self.is_closed = True
        self._control.close()
        handlers, self._handlers = self._handlers, {}
        for handler in handlers.values():
            handler(None)

    def make_id(self) -> int:
        """Return a new id for requests."""
        self._next_id += 1
        return self._next_id

    def set_handler(self, id: int, handler: ReplyHandlerFunction) -> None:
        """Pass the replies to an id to `handler` from now on."""
        self._handlers[id] = handler

    def remove_handler(self, id: int) -> None:
        """Ignore the replies to an id from now on."""
        self._handlers.pop(id, None)

    async def send(self, request: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a request with open files. Raises BrokenPipeError if the sandbox has ended, TimeoutError if it hangs.

        The request is in a file of its own, since a command line may be larger than a message.
        """
        request_fd = create_sealed_file("request", json.dumps(request).encode())
        try:
            async with asyncio.timeout(SEND_TIMEOUT):
                while not self.is_closed:
                    with contextlib.suppress(BlockingIOError):
                        socket.send_fds(self._control, [b"request"], [request_fd, *fds])
                        return
                    await asyncio.sleep(SEND_INTERVAL)
            raise BrokenPipeError("the sandbox has ended")
        except ConnectionResetError as error:  # it ended while a request was on its way
            raise BrokenPipeError("the sandbox has ended") from error
        finally:
            os.close(request_fd)

    def _read(self) -> None:
        data = read_message(self._control)
        if data is None:
            return
        if not data:
            self.close()
            return
        with contextlib.suppress(msgspec.MsgspecError):  # a forged message
            reply = msgspec.json.decode(data, type=SandboxReply)
            handler = self._handlers.get(reply.id)
            if handler is not None:
                handler(reply)


REPLY_TIMEOUT = 30.0  # seconds for the sandbox to start or kill a program
KILLED_EXIT_CODE = -9


class SandboxProcess(PipedProcess):
    """A program that the first program of a sandbox started, and all processes it started.

    - `kill_sandbox`: kills all processes of the sandbox.
    - `find_end_error`: returns the error of a sandbox that has ended.
    """

    def __init__(
        self,
        channel: SandboxChannel,
        kill_sandbox: Callable[[], None],
        find_end_error: Callable[[], Awaitable[RamifyError]],
        max_output_bytes: int,
        *,
        interactive: bool,
    ) -> None:
        super().__init__(max_output_bytes, interactive=interactive)
        self._channel, self._kill_sandbox, self._find_end_error = channel, kill_sandbox, find_end_error
        self._id = channel.make_id()
        self._started: asyncio.Future[SandboxReply | None] = asyncio.get_running_loop().create_future()
        self._killed: asyncio.Future[bool] | None = None  # of the latest request to kill: whether all are gone

    async def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdin: bytes | None,
        *,
        is_preloaded: bool = False,
    ) -> None:
        """Start the program. Raises OSError if it cannot be run, ValueError if an argument or variable is invalid.

        With `is_preloaded`, the first program of a forked sandbox forks for the Python script and its arguments.
        """
        variables = {**env, MARKER_VARIABLE: str(self._id)}
        for text in (*argv, *variables, *variables.values(), cwd):
            if b"\0" in os.fsencode(text):
                raise ValueError("embedded null byte")
        try:
            await self.open_pipes(stdin)
            request = {"op": "spawn", "id": self._id, "argv": list(argv), "env": variables, "cwd": cwd}
            request["preloaded"] = is_preloaded
            # the sandbox opens an empty input itself: the null device of the machine must not be in it
            fds = self.program_fds if self._stdin is not None else self.program_fds[1:]
            reply = await self._request_start(request, tuple(fds))
        except BaseException as error:
            self.close_pipes()
            self._channel.remove_handler(self._id)
            if isinstance(error, asyncio.CancelledError):  # the program may have been started
                with contextlib.suppress(RamifyError):  # a cancellation stays one
                    await self.kill_tree()
            raise
        if reply.pid is None:
            self.close_pipes()
            self._channel.remove_handler(self._id)
            code = reply.errno if reply.errno is not None and reply.errno in errno.errorcode else errno.EIO  # forged
            raise OSError(code, os.strerror(code), reply.file)
        self.close_program_fds()
        self._channel.has_started_program = True
        self.pid = reply.pid

    async def wait(self, timeout: float) -> ExecResult:
        """Wait for the program as usual. Raises SandboxError if the sandbox was lost meanwhile."""
        result = await super().wait(timeout)
        await self._raise_if_lost()
        return result

    async def kill_tree(self) -> None:
        """Kill the program and the processes with its marker, or the whole sandbox if it does not answer."""
        if self._killed is None or self._killed.done():
            self._killed = asyncio.get_running_loop().create_future()
            self._channel.set_handler(self._id, self._handle_reply)
        try:
            async with asyncio.timeout(REPLY_TIMEOUT):
                await self._channel.send({"op": "kill", "id": self._id, "marker": str(self._id)})
                are_gone = await asyncio.shield(self._killed)
        except BrokenPipeError:
            await self._raise_if_lost()
            return  # the sandbox has ended, and all its programs
        except TimeoutError as error:
            raise self._end_sandbox(f"it did not kill a program in {REPLY_TIMEOUT:g} s") from error
        if not are_gone:
            raise self._end_sandbox("a program of it does not end")

    async def _raise_if_lost(self) -> None:
        """Raise SandboxError if the sandbox has ended and the agent did not cause it."""
        if self._channel.is_closed and isinstance(error := await self._find_end_error(), SandboxError):
            raise error

    async def _request_start(self, request: dict[str, Any], fds: tuple[int, ...]) -> SandboxReply:
        self._channel.set_handler(self._id, self._handle_reply)
        try:
            async with asyncio.timeout(REPLY_TIMEOUT):
                await self._channel.send(request, fds)
                reply = await self._started
        except TimeoutError as error:
            raise self._end_sandbox(f"it did not start a program in {REPLY_TIMEOUT:g} s") from error
        except BrokenPipeError:
            reply = None
        if reply is None:
            raise await self._find_end_error()
        return reply

    def _end_sandbox(self, reason: str) -> RamifyError:
        """Kill the sandbox, and return the error for a sandbox that does not answer."""
        self._kill_sandbox()
        error_class = AgentFailed if self._channel.has_started_program else SandboxError
        return error_class(f"the sandbox does not answer, and was killed: {reason}")

    def _handle_reply(self, reply: SandboxReply | None) -> None:
        if not self._started.done():
            self._started.set_result(reply)
        if reply is None:  # the sandbox has ended
            self.set_exit_code(KILLED_EXIT_CODE)
        elif reply.status is not None:
            self.set_exit_code(reply.status)
        is_kill_pending = self._killed is not None and not self._killed.done()
        if is_kill_pending and (reply is None or reply.killed is not None):
            assert self._killed is not None
            self._killed.set_result(reply is None or reply.killed is True)
            is_kill_pending = False
        if self.has_exited and not is_kill_pending:
            self._channel.remove_handler(self._id)
