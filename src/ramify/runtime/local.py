"""The local runtime: a temporary directory, and processes of this machine.

No wall separates them from the rest of the machine; what is promised is that they end. Each program leads a session of
its own and carries a mark in its environment, which whatever it starts inherits (see `processes`). The directory is
made when it is first wanted: most rollouts only talk.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import stat
import subprocess
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING

from ramify.errors import ConfigInvalid, SandboxError
from ramify.runtime.base import TIMED_OUT, Command, Program, Ran, Runtime
from ramify.runtime.config import LocalConfig
from ramify.runtime.output import Kept
from ramify.runtime.processes import MARK, end_group, end_marked

if TYPE_CHECKING:
    from ramify.env import Task

LINGER = 0.2  # seconds we go on reading after a program ended: a child it left behind may hold its output open
REMOVING = 20.0  # seconds for a box that Python could not remove
SHORT_OF = (
    errno.EAGAIN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOSPC,
)  # the machine's fault, not the command's


class LocalRuntime(Runtime):
    """A box that is a directory."""

    config: LocalConfig

    def __init__(self, config: LocalConfig | None = None) -> None:
        super().__init__(config or LocalConfig())
        self._mark = f"{uuid.uuid4().hex}."
        self._box: Path | None = None
        self._inside = PurePath()
        self._programs: list[LocalProgram] = []  # that still run
        self._started = 0
        self._stopped = False

    @property
    def workdir(self) -> Path:
        if self._stopped:
            raise SandboxError("the box was stopped; nothing runs in it any more")
        if self._box is None:
            self._box = self._make()
        return self._box / "work" / self._inside

    def check(self, task: "Task") -> None:
        if task.image is not None:
            raise ConfigInvalid(f"the task asks for the image {task.image!r}, but the local runtime has no images")
        if task.workdir is not None and (PurePath(task.workdir).is_absolute() or ".." in PurePath(task.workdir).parts):
            raise ConfigInvalid(f"the task's workdir {task.workdir!r} lies outside of the box of a local runtime")

    async def start(self, task: "Task") -> None:
        self.check(task)
        self._inside = PurePath(task.workdir or "")

    async def stop(self) -> None:
        self._stopped = True
        for program in self._programs:
            program.end_group()
        if self._started:
            await asyncio.to_thread(end_marked, self._mark)
        if self._box is not None and not self.config.keep:
            await asyncio.to_thread(_remove, self._box)

    async def spawn(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | PurePath | None = None,
        stdin: bytes | None = None,
    ) -> "LocalProgram":
        line = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        workdir = self.workdir
        self._started += 1
        program = LocalProgram(f"{self._mark}{self._started}.", self.config.max_output)
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: program,
                *line,
                stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
                cwd=workdir / (cwd or ""),
                env={**self._environment(workdir), **(env or {}), MARK: program.mark},
                start_new_session=True,
            )
        except OSError as error:
            if error.errno in SHORT_OF or not workdir.is_dir():
                raise SandboxError(f"the box {workdir} cannot run {line[0]!r}: {error}") from error
            raise
        except asyncio.CancelledError:  # asyncio ends the program itself, and nothing of what it has started already
            await asyncio.to_thread(end_marked, program.mark)
            raise
        self._programs = [other for other in self._programs if not other.ended] + [program]
        program.feed(stdin)
        return program

    async def read(self, path: str | PurePath) -> bytes:
        return await asyncio.to_thread(_read, self.workdir / path)

    async def write(self, path: str | PurePath, data: bytes | str) -> None:
        target = self.workdir / path
        try:
            await asyncio.to_thread(_write, target, data.encode() if isinstance(data, str) else data)
        except OSError as error:
            if error.errno in SHORT_OF:
                raise SandboxError(f"{target} cannot be written: {error.strerror}") from error
            raise

    def _make(self) -> Path:
        try:
            box = Path(tempfile.mkdtemp(prefix="ramify-", dir=self.config.root))
            for name in ("home", "tmp", PurePath("work") / self._inside):
                (box / name).mkdir(parents=True)
        except OSError as error:
            raise SandboxError(f"no box can be made in {self.config.root or tempfile.gettempdir()}: {error}") from error
        return box

    def _environment(self, workdir: Path) -> dict[str, str]:
        box = self._box or workdir
        inherited = {name: os.environ[name] for name in self.config.inherit if name in os.environ}
        return inherited | {"HOME": str(box / "home"), "TMPDIR": str(box / "tmp")} | self.config.env


class LocalProgram(Program, asyncio.SubprocessProtocol):
    """A process that leads a session, and what it has started.

    asyncio's own `Process.wait` returns only when all output is closed, which a server left in the background never
    does. Here the end of the process is an event of its own.
    """

    def __init__(self, mark: str, max_output: int) -> None:
        self.mark = mark
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._output = {1: Kept(max_output), 2: Kept(max_output)}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport
        self.pid = transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._output[fd].add(data)

    def process_exited(self) -> None:
        self._exited.set_result(self._transport.get_returncode() or 0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set_result(None)

    @property
    def ended(self) -> bool:
        return self._exited.done()

    def feed(self, stdin: bytes | None) -> None:
        """Give it all of its input."""
        pipe = self._transport.get_pipe_transport(0)
        if isinstance(pipe, asyncio.WriteTransport):
            pipe.write(stdin or b"")
            pipe.write_eof()

    def end_group(self) -> None:
        """Kill its session at one stroke; what has left it is `kill`'s to find."""
        if not self.ended:
            end_group(self.pid)

    async def wait(self, deadline: float) -> Ran:
        timed_out = not (await asyncio.wait([self._exited], timeout=deadline))[0]
        if timed_out:
            await self.kill()
        await asyncio.wait([self._closed], timeout=LINGER)
        self._transport.close()
        code = TIMED_OUT if timed_out else self._exited.result()
        return Ran(code, self._output[1].bytes(), self._output[2].bytes(), timed_out)

    async def kill(self) -> None:
        self.end_group()
        await asyncio.to_thread(end_marked, self.mark)
        self._transport.close()


def _open(target: Path, mode: str) -> IO[bytes]:
    """The file, if it is one: at a pipe that an agent left there, opening or reading would wait for ever."""
    file = open(target, mode, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK, 0o666))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(errno.ENOENT, "not a file", str(target))
    return file


def _read(target: Path) -> bytes:
    with _open(target, "rb") as file:
        return file.read()


def _write(target: Path, data: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _open(target, "wb") as file:
        file.write(data)


def _remove(box: Path) -> None:
    """Remove the box, also where its directories go too deep for Python or are closed to their owner."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(box, ignore_errors=True)
    if box.exists():
        words = ["/bin/sh", "-c", 'chmod -R u+rwX "$0"; rm -rf "$0"', str(box)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(words, stderr=subprocess.DEVNULL, check=False, timeout=REMOVING)
    if box.exists():
        raise SandboxError(f"the box {box} cannot be removed")
