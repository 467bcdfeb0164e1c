"""Forked sandboxes as the host sees them: starts the template, asks it for forks, and checks each from outside.

Importing the packages of a Python agent takes a second of CPU time. The template (`sandbox_template`) does it once per
worker and source; a sandbox is then a fork of it, in namespaces of its own (`sandbox_namespaces`). What a fork says of
itself counts for nothing: before the host sends it anything of a rollout, it reads from /proc that the fork is in new
namespaces and has no privileges.

Where the kernel does not allow this, or a package cannot be forked, bubblewrap starts the sandboxes as without a
template. The reason is logged once.
"""

import asyncio
import base64
import contextlib
import errno
import json
import logging
import os
import re
import signal
import socket
import struct
from pathlib import Path
from typing import Any

from ramify.core.errors import EnvironmentFault, SandboxError
from ramify.rollout.runtime import sandbox_init, sandbox_namespaces, sandbox_template
from ramify.rollout.runtime.bwrap import (
    INIT_FILE,
    Mount,
    build_env,
    build_seccomp_filter,
    find_interpreter,
    iter_mounts,
)
from ramify.rollout.runtime.config import PreloadConfig, SandboxRuntimeConfig
from ramify.rollout.runtime.running_sandbox import RunningSandbox
from ramify.rollout.runtime.sandbox_process import MAX_MESSAGE_BYTES, SandboxChannel, create_sealed_file

IMPORT_TIMEOUT = 120.0  # seconds for the packages to be imported
STOP_TIMEOUT = 10.0  # seconds for the kernel to end a sandbox, or the template with all its sandboxes
TRANSIENT_ERRORS = (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.ENFILE)  # a later fork may succeed
MAX_REASON_BYTES = 2000  # of standard error, in an error message
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
CREDENTIALS = struct.Struct("iII")  # process id, user id and group id, as this process sees them
SCM_CREDENTIALS = 2

_logger = logging.getLogger("ramify.runtimes")


class SandboxTemplate:
    """The template of a source's sandboxes. It is started for the first of them, and again after its death."""

    def __init__(self, config: SandboxRuntimeConfig, preload: PreloadConfig) -> None:
        self.preload = preload
        self.config = config
        self._running: RunningTemplate | None = None
        self._lock = asyncio.Lock()
        self._is_refused = False

    async def get_running(self) -> "RunningTemplate | None":
        """Return the running template; None if sandboxes cannot be forked here.

        Raises EnvironmentFault if a package cannot be imported, SandboxError if the template does not start.
        """
        async with self._lock:
            if self._is_refused:
                return None
            if self._running is not None and self._running.is_closed:
                await self.close()
            if self._running is None:
                running = RunningTemplate()
                try:
                    async with asyncio.timeout(IMPORT_TIMEOUT):
                        reason = await running.start(self.config, self.preload)
                except BaseException as error:
                    await running.stop()
                    if isinstance(error, TimeoutError):
                        names = ", ".join(self.preload.modules)
                        raise SandboxError(f"{names} were not imported after {IMPORT_TIMEOUT:g} s") from error
                    raise
                if reason is not None:
                    await running.stop()
                    self.refuse(reason)
                    return None
                self._running = running
            return self._running

    def refuse(self, reason: str) -> None:
        """Start no more forked sandboxes, and log why."""
        if not self._is_refused:
            _logger.warning("sandboxes are started without preloaded packages: %s", reason)
        self._is_refused = True

    async def close(self) -> None:
        """End the template with all its sandboxes."""
        running, self._running = self._running, None
        if running is not None:
            await running.stop()


class RunningTemplate:
    """A template process that has imported its packages.

    - `is_closed`: whether it has ended.
    - `namespaces`: the ids of its namespaces.
    """

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None  # the parent of the template
        self._template_fd = -1
        self._exits: dict[int, asyncio.Future[int | None]] = {}
        self.namespaces: dict[str, str] = {}
        self.is_closed = False

    async def start(self, config: SandboxRuntimeConfig, preload: PreloadConfig) -> str | None:
        """Start the template and wait until it has imported the packages. Return why it is refused, None if it is not.

        Raises EnvironmentFault if a package cannot be imported, SandboxError if it does not start.
        """
        scripts = {
            INIT_FILE: sandbox_init.__file__,
            sandbox_template.NAMESPACES_FILE: sandbox_namespaces.__file__,
            sandbox_template.TEMPLATE_FILE: sandbox_template.__file__,
        }
        setup = {
            "mounts": list(iter_mounts(config, config.limits.disk_mb, scripts)),
            "python": preload.python,
            "env": {**build_env(config), **preload.env},
            "modules": preload.modules,
            "filter": base64.b64encode(build_seccomp_filter() or b"").decode(),
        }
        self._control, theirs = open_socket_pair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    find_interpreter(),
                    "-I",
                    "-S",
                    sandbox_template.__file__,
                    str(theirs.fileno()),
                    sandbox_namespaces.__file__,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=[theirs.fileno()],
                    env={"PATH": os.defpath},
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"the template of sandboxes cannot be started: {error}") from error
        _send_file(self._control, setup)
        data, _, pid = await receive(self._control, 0)
        reply: dict[str, Any] = json.loads(data) if data else {}
        if "failed" in reply:
            raise EnvironmentFault(f"harness.preload: {reply['failed']}")
        if "refused" in reply:
            return str(reply["refused"])
        if "ready" not in reply:
            assert self._process.stderr is not None
            text = (await self._process.stderr.read(MAX_REASON_BYTES)).decode(errors="replace").strip()
            raise SandboxError(f"the template of sandboxes has ended: {text or 'it gave no reason'}")
        self._template_fd = os.pidfd_open(pid)
        self.namespaces = read_namespaces(pid)
        asyncio.get_running_loop().add_reader(self._control, self._read)
        return find_open_wall(pid, [read_namespaces(os.getpid())], has_filter=False)

    def fork(self, control: socket.socket, config: SandboxRuntimeConfig, disk_mb: int | None) -> None:
        """Ask for a new sandbox, which gets `control`. Raises SandboxError if the template has ended."""
        mounts: list[Mount] = [
            (kind, target if kind.startswith("ro-bind") else source, target)
            for kind, source, target in iter_mounts(config, disk_mb, {})
        ]
        try:
            if self._control is None or self.is_closed:
                raise BrokenPipeError
            _send_file(self._control, {"mounts": mounts}, control.fileno())
        except (BrokenPipeError, ConnectionResetError, BlockingIOError) as error:
            raise SandboxError("the template of sandboxes was killed from outside") from error

    async def wait_for_exit(self, pid: int) -> int | None:
        """Wait until a process of the template has exited and return its exit code; None if the template has ended.

        `pid`: its id in the template's namespace.
        """
        if self.is_closed:
            return None
        future = self._exits.get(pid)
        return None if future is None else await asyncio.shield(future)

    def watch_exit(self, pid: int) -> None:
        """Keep the exit code of a process until `forget_exit`."""
        self._exits[pid] = asyncio.get_running_loop().create_future()

    def forget_exit(self, pid: int) -> None:
        """Drop the exit code of a process."""
        self._exits.pop(pid, None)

    async def stop(self) -> None:
        """Kill the template, and so all its sandboxes, and wait until they are gone."""
        self._close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                if self._template_fd >= 0:
                    signal.pidfd_send_signal(self._template_fd, signal.SIGKILL)  # its parent exits after all of them
                else:
                    self._process.kill()  # the kernel kills the template with it
            try:
                async with asyncio.timeout(STOP_TIMEOUT):
                    await self._process.wait()
            except TimeoutError as error:
                raise SandboxError(f"the template {self._process.pid} did not end after {STOP_TIMEOUT:g} s") from error
        if self._template_fd >= 0:
            os.close(self._template_fd)
        self._template_fd = -1

    def _read(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._close()
            return
        message: dict[str, int] = json.loads(data)
        future = self._exits.get(message["pid"])
        if future is not None and not future.done():
            future.set_result(message["status"])

    def _close(self) -> None:
        self.is_closed = True
        control, self._control = self._control, None
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()
        exits, self._exits = self._exits, {}
        for future in exits.values():
            if not future.done():
                future.set_result(None)


class ForkedSandbox(RunningSandbox):
    """A sandbox that is a fork of the template.

    - `refusal`: why sandboxes cannot be forked on this machine, after `start`; None if this one is ready.
    """

    is_forked = True

    def __init__(self, disk_mb: int | None, template: RunningTemplate) -> None:
        super().__init__(disk_mb)
        self.refusal: str | None = None
        self._template = template
        self._template_pid = 0  # of the first process, in the template's namespace

    async def _boot(self, config: SandboxRuntimeConfig) -> None:
        ours, theirs = open_socket_pair()
        self.channel = SandboxChannel(ours)
        with theirs:
            self._template.fork(theirs, config, self.disk_mb)
        message, _, pid = await receive(ours, 0)
        if message == b"forked":
            if self._cgroup is not None:
                self._cgroup.add_process(pid)  # before it has a namespace of control groups
            ours.send(b"go on")
            message, fds, pid = await receive(ours, 2)
            if message == b"ready" and len(fds) == 2:
                self._take_files(fds, pid)
                self.refusal = find_open_wall(pid, [read_namespaces(os.getpid()), self._template.namespaces])
                self._template_pid = int(read_status(pid)["NSpid"].split()[-2])
                self._template.watch_exit(self._template_pid)
                return
        if not message:
            raise self._explain("its template or its first program was killed", config)
        reply: dict[str, Any] = json.loads(message)
        if reply["errno"] in TRANSIENT_ERRORS:
            raise self._explain(reply["refused"], config)
        self.refusal = str(reply["refused"])

    async def _wait_for_exit(self) -> int | None:
        return await self._template.wait_for_exit(self._template_pid)

    async def _wait_until_gone(self) -> None:
        if self._first_process_fd >= 0:
            try:
                async with asyncio.timeout(STOP_TIMEOUT):
                    await _wait_readable(self._first_process_fd)
            except TimeoutError as error:
                raise SandboxError(f"a forked sandbox did not end after {STOP_TIMEOUT:g} s") from error
        self._template.forget_exit(self._template_pid)


async def _wait_readable(file: socket.socket | int) -> None:
    """Wait until a socket can be read, or the process of a pidfd has ended."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(file, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(file)


def open_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection. The first is this process's, and learns who sends a message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setblocking(False)
    return ours, theirs


async def receive(control: socket.socket, num_fds: int) -> tuple[bytes, list[int], int]:
    """Return the next message, its open files, and the process id of its sender, which the kernel fills in."""
    await _wait_readable(control)
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


def read_namespaces(pid: int) -> dict[str, str]:
    """Return the ids of the namespaces of a process."""
    return {name: str(Path(f"/proc/{pid}/ns/{name}").readlink()) for name in NAMESPACES}


def read_status(pid: int) -> dict[str, str]:
    """Return what the kernel reports of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def find_open_wall(pid: int, others: list[dict[str, str]], *, has_filter: bool = True) -> str | None:
    """Return what of a process is not closed as a sandbox must be; None if it is a sandbox.

    - `others`: the namespaces of processes with which it must share none.
    """
    status = read_status(pid)
    namespaces = read_namespaces(pid)
    for name, id in namespaces.items():
        if any(other[name] == id for other in others):
            return f"the process {pid} has no {name} namespace of its own"
    if status["NSpid"].split()[-1] != "1":
        return f"the process {pid} is not the first of its namespace"
    expected = {**dict.fromkeys(("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"), "0" * 16), "NoNewPrivs": "1"}
    if has_filter:
        expected |= {"Seccomp": "2", "Threads": "1"}
    for name, value in expected.items():
        if status[name] != value:
            return f"the process {pid} has {name} {status[name]}, expected {value}"
    if re.search(r"^\S+ .w.s ", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE):
        return f"the process {pid} has memory that others share"
    return None


def _send_file(control: socket.socket, content: dict[str, Any], *fds: int) -> None:
    fd = create_sealed_file("request", json.dumps(content).encode())
    try:
        socket.send_fds(control, [b"request"], [fd, *fds])
    finally:
        os.close(fd)
