"""A program in a sandbox."""

import asyncio
import errno
import os
from collections.abc import Mapping, Sequence

from ramify.errors import AgentExit, SandboxError
from ramify.processes.cleanup import MARKER_VARIABLE
from ramify.runtime.piped_process import PipedProcess
from ramify.runtime.sandbox_channel import InitReply, SandboxChannel

REPLY_TIMEOUT = 30.0  # seconds for the box to start or kill a program
KILLED_EXIT_CODE = -9


class SandboxProcess(PipedProcess):
    """A program that the first program of a sandbox started, and all processes it started."""

    def __init__(self, channel: SandboxChannel, max_output_bytes: int, *, interactive: bool) -> None:
        super().__init__(max_output_bytes, interactive=interactive)
        self._channel = channel
        self._id = channel.add_handler(self._handle_reply)
        self._started: asyncio.Future[InitReply | None] = asyncio.get_running_loop().create_future()
        self._killed = asyncio.Event()

    async def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdin: bytes | None) -> None:
        """Start the program. Raises OSError if it cannot be run, ValueError if an argument or variable is invalid."""
        variables = {**env, MARKER_VARIABLE: str(self._id)}
        for text in (*argv, *variables, *variables.values(), cwd):
            if b"\0" in os.fsencode(text):
                raise ValueError("embedded null byte")
        try:
            await self.open_pipes(stdin)
            request = {"op": "spawn", "id": self._id, "argv": list(argv), "env": variables, "cwd": cwd}
            await self._channel.send(request, tuple(self.program_fds))
            async with asyncio.timeout(REPLY_TIMEOUT):
                reply = await self._started
            if reply is None:
                raise BrokenPipeError("the sandbox has ended")
        except BaseException as error:
            self.close_pipes()
            self._channel.remove_handler(self._id)
            if isinstance(error, TimeoutError):
                raise SandboxError(f"a sandbox did not start {argv[0]!r} in {REPLY_TIMEOUT:g} s") from error
            if isinstance(error, BrokenPipeError):
                raise AgentExit("the sandbox has ended: a program in it killed its processes") from error
            raise
        if reply.pid is None:
            self.close_pipes()
            self._channel.remove_handler(self._id)
            code = reply.errno if reply.errno is not None and reply.errno in errno.errorcode else errno.EIO  # forged
            raise OSError(code, os.strerror(code), reply.file)
        self.close_program_fds()
        self.pid = reply.pid

    async def kill_tree(self) -> None:
        """Let the box kill the program and the processes with its marker."""
        try:
            await self._channel.send({"op": "kill", "id": self._id, "marker": str(self._id)})
            async with asyncio.timeout(REPLY_TIMEOUT):
                await self._killed.wait()
        except BrokenPipeError:
            return  # the box has ended, and all its programs
        except TimeoutError as error:
            raise SandboxError(f"a sandbox did not kill a program in {REPLY_TIMEOUT:g} s") from error

    def _handle_reply(self, reply: InitReply | None) -> None:
        if not self._started.done():
            self._started.set_result(reply)
        if reply is None:  # the box has ended
            self.set_exit_code(KILLED_EXIT_CODE)
            self._killed.set()
        elif reply.status is not None:
            self.set_exit_code(reply.status)
        elif reply.killed:
            self._killed.set()
