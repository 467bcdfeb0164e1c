"""The connection between the host and the first program of a sandbox (`sandbox_init` describes the messages)."""

import asyncio
import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 1 << 16
SEND_TIMEOUT = 20.0  # seconds for the sandbox to accept a request
SEND_INTERVAL = 0.01


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

    async def receive_first(self, num_fds: int) -> tuple[bytes, list[int]]:
        """Return the first message of the sandbox and the open files that it hands out."""
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._control, lambda: readable.done() or readable.set_result(None))
        try:
            await readable
        finally:
            loop.remove_reader(self._control)
        message, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, num_fds)
        for fd in fds:
            os.set_inheritable(fd, False)
        return message, list(fds)

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
        try:
            data = self._control.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.close()
            return
        with contextlib.suppress(msgspec.MsgspecError):  # a forged message
            reply = msgspec.json.decode(data, type=SandboxReply)
            handler = self._handlers.get(reply.id)
            if handler is not None:
                handler(reply)
