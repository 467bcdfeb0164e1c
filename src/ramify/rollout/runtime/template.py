"""Forked sandboxes as the host sees them: starts the template, asks it for forks, and checks each from outside.

Importing the packages of a Python agent takes a second of CPU time. The template (`sandbox_template`) does it once per
worker and source; a sandbox is then a fork of it, in namespaces of its own (`sandbox_namespaces`). The host does
not trust what a fork reports: before it sends the fork anything of a rollout, it reads from /proc that the fork is in
new namespaces and has no privileges.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.core.errors import EnvironmentFault, SandboxError
from ramify.processes.child import is_readable, wait_readable
from ramify.processes.exit import describe_exit
from ramify.rollout.runtime import sandbox_init, sandbox_namespaces, sandbox_template
from ramify.rollout.runtime.bwrap import (
    Mount,
    build_env,
    build_seccomp_filter,
    find_interpreter,
    iter_mounts,
)
from ramify.rollout.runtime.config import PreloadConfig, SandboxRuntimeConfig
from ramify.rollout.runtime.running_sandbox import MAX_REASON_BYTES, STOP_TIMEOUT, RunningSandbox, wait_for_end
from ramify.rollout.runtime.sandbox_process import (
    SEND_INTERVAL,
    SandboxChannel,
    create_sealed_file,
    read_message,
    receive,
)

TRANSIENT_ERRORS = (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.ENFILE)  # a later fork may succeed
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")

_logger = logging.getLogger("ramify.runtimes")


@dataclass(frozen=True, slots=True)
class TemplateTimeouts:
    """Time limits of a template, in seconds.

    - `imports`: for the packages to be imported.
    - `wait`: for a sandbox to wait for that. It is shorter than the default of `timeouts.boot`, whose error names no
      cause.
    - `fork`: for the template to fork.
    """

    imports: float = 600.0
    wait: float = 100.0
    fork: float = 15.0


class SandboxTemplate:
    """The template of a source's sandboxes. It is started for the first of them, and again after its death."""

    def __init__(
        self, config: SandboxRuntimeConfig, preload: PreloadConfig, timeouts: TemplateTimeouts | None = None
    ) -> None:
        self.preload = preload
        self.config = config
        self._timeouts = timeouts or TemplateTimeouts()
        self._start_task: asyncio.Task[RunningTemplate | None] | None = None
        self._is_refused = False

    async def get_running(self) -> "RunningTemplate | None":
        """Return the running template; None if sandboxes cannot be forked here.

        A caller that is cancelled does not stop the imports, so that the next one need not begin again. Raises
        EnvironmentFault if a package cannot be imported, SandboxError if the template does not start.
        """
        if self._is_refused:
            return None
        task = self._start_task
        ended = task.result() if task is not None and task.done() and not task.exception() else None
        if task is None or (ended is not None and ended.is_closed):
            task = self._start_task = asyncio.create_task(self._start(ended))
        try:
            async with asyncio.timeout(self._timeouts.wait):
                return await asyncio.shield(task)
        except TimeoutError as error:
            names, limit = ", ".join(self.preload.modules), self._timeouts.wait
            raise SandboxError(
                f"harness.preload: {names}: not imported after {limit:g} s; the import goes on"
            ) from error
        except Exception:
            if self._start_task is task:
                self._start_task = None  # the next sandbox tries again
            raise

    async def _start(self, ended: "RunningTemplate | None") -> "RunningTemplate | None":
        if ended is not None:
            await ended.stop()
        running = RunningTemplate(self._timeouts.fork)
        try:
            async with asyncio.timeout(self._timeouts.imports):
                reason = await running.start(self.config, self.preload)
        except BaseException as error:
            await running.stop()
            if isinstance(error, TimeoutError):
                names, limit = ", ".join(self.preload.modules), self._timeouts.imports
                raise SandboxError(f"harness.preload: {names}: not imported after {limit:g} s") from error
            if isinstance(error, OSError):
                raise SandboxError(f"the template of sandboxes cannot be started: {error}") from error
            raise
        if reason is not None:
            await running.stop()
            self.refuse(reason)
            return None
        _logger.info("sandboxes are forked from a template that has imported %s", ", ".join(self.preload.modules))
        return running

    def refuse(self, reason: str) -> None:
        """Start no more forked sandboxes, and log why."""
        if not self._is_refused:
            _logger.warning("sandboxes are started without preloaded packages: %s", reason)
        self._is_refused = True

    async def close(self) -> None:
        """End the template with all its sandboxes."""
        task, self._start_task = self._start_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and not task.exception() and (running := task.result()) is not None:
                await running.stop()


class RunningTemplate:
    """A template process that has imported its packages.

    - `fork_timeout`: seconds for it to fork.
    - `is_closed`: whether it has ended.
    - `namespaces`: the ids of its namespaces.
    """

    def __init__(self, fork_timeout: float) -> None:
        self.fork_timeout = fork_timeout
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
            sandbox_template.INIT_FILE: sandbox_init.__file__,
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
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended; the reason follows
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
            reason = describe_exit(await self._process.wait()) + (f": {text}" if text else "")
            raise SandboxError(f"harness.preload: the template of sandboxes {reason}")
        try:
            self._template_fd = os.pidfd_open(pid)
            self.namespaces = read_namespaces(pid)
            problem = find_isolation_problem(pid, [read_namespaces(os.getpid())], has_filter=False)
        except PermissionError as error:
            return f"this process is not allowed to check the template: {error}"
        asyncio.get_running_loop().add_reader(self._control, self._read)
        return problem

    async def fork(self, control: socket.socket, config: SandboxRuntimeConfig, disk_mb: int | None) -> None:
        """Ask for a new sandbox, which gets `control`. The caller limits the time.

        Raises SandboxError if the template has ended.
        """
        mounts: list[Mount] = [
            (kind, target if kind.startswith("ro-bind") else source, target)
            for kind, source, target in iter_mounts(config, disk_mb, {})
        ]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while self._control is not None:
                with contextlib.suppress(BlockingIOError):  # too many other requests wait
                    _send_file(self._control, {"mounts": mounts}, control.fileno())
                    return
                await asyncio.sleep(SEND_INTERVAL)
        raise SandboxError("the template of sandboxes was killed from outside")

    def watch_exit(self, pid: int) -> "asyncio.Future[int | None]":
        """Return a future for the exit code of a process; None if the template ends first.

        `pid`: its id in the template's namespace. A later process may have the same.
        """
        future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        if self.is_closed:
            future.set_result(None)
        else:
            self._exits[pid] = future
        return future

    def kill(self) -> None:
        """Kill the template, and so all its sandboxes."""
        self._close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                if self._template_fd >= 0:
                    signal.pidfd_send_signal(self._template_fd, signal.SIGKILL)  # its parent exits after all of them
                else:
                    self._process.kill()  # the kernel kills the template with it

    async def stop(self) -> None:
        """Kill the template, and so all its sandboxes, and wait until they are gone."""
        self.kill()
        try:
            if self._process is not None:
                await wait_for_end(self._process, "the template")
        finally:
            if self._template_fd >= 0:
                os.close(self._template_fd)
            self._template_fd = -1

    def _read(self) -> None:
        assert self._control is not None
        data = read_message(self._control)
        if data is None:
            return
        if not data:
            self._close()
            return
        message: dict[str, int] = json.loads(data)
        future = self._exits.pop(message["pid"], None)
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
        self._exit_code: asyncio.Future[int | None] | None = None

    async def _boot(self, config: SandboxRuntimeConfig) -> None:
        ours, theirs = open_socket_pair()
        self.channel = SandboxChannel(ours)
        try:
            async with asyncio.timeout(self._template.fork_timeout):
                with theirs:
                    await self._template.fork(theirs, config, self.disk_mb)
                await wait_readable(ours.fileno())
        except TimeoutError as error:
            if not is_readable(ours.fileno()):  # it may have come while this process was busy
                self._template.kill()  # it hangs, or was stopped; the next sandbox starts another
                reason = f"the template of sandboxes did not fork after {self._template.fork_timeout:g} s"
                raise SandboxError(f"{reason}, and was killed with all its sandboxes") from error
        message, _, pid = await receive(ours, 0)
        if message == b"forked":
            self._first_process_fd = os.pidfd_open(pid)  # until the first process of the sandbox reports
            if self._cgroup is not None:
                self._cgroup.add_process(pid)  # before it has a namespace of control groups
            ours.send(b"go on")
            message, fds, pid = await receive(ours, 2)
            if message == b"ready" and len(fds) == 2:
                self._take_files(fds, pid)
                others = [read_namespaces(os.getpid()), self._template.namespaces]
                self.refusal = find_isolation_problem(pid, others)
                if self.refusal is None:
                    self._exit_code = self._template.watch_exit(int(read_status(pid)["NSpid"].split()[-2]))
                return
        if not message:
            raise self._explain("its template or its first program was killed", config)
        reply: dict[str, Any] = json.loads(message)
        if reply["errno"] in TRANSIENT_ERRORS:
            raise self._explain(reply["refused"], config)
        self.refusal = str(reply["refused"])

    async def _wait_for_exit(self) -> int | None:
        return None if self._exit_code is None else await asyncio.shield(self._exit_code)

    async def _wait_until_gone(self) -> None:
        if self._first_process_fd >= 0:
            try:
                async with asyncio.timeout(STOP_TIMEOUT):
                    await wait_readable(self._first_process_fd)
            except TimeoutError as error:
                raise SandboxError(f"a forked sandbox did not end after {STOP_TIMEOUT:g} s") from error


def open_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection. The first is this process's, and learns who sends a message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setblocking(False)
    return ours, theirs


def read_namespaces(pid: int) -> dict[str, str]:
    """Return the ids of the namespaces of a process."""
    return {name: str(Path(f"/proc/{pid}/ns/{name}").readlink()) for name in NAMESPACES}


def read_status(pid: int) -> dict[str, str]:
    """Return what the kernel reports of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def find_isolation_problem(pid: int, others: list[dict[str, str]], *, has_filter: bool = True) -> str | None:
    """Return why a process is not isolated as a sandbox must be; None if it is.

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
