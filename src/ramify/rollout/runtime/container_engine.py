"""The Docker or podman command line: what it can do here, the containers that it keeps, and programs in them.

The processes of a user on this machine start only so many containers per second. A file holds the time of the last
start. A process that wants to start a container writes its own time there if the last start is long enough ago, and
otherwise waits and tries again. Nothing is reserved, so a start that is cancelled while it waits does not delay others.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import tempfile
import time
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ramify.core.config.schema import is_dict
from ramify.core.errors import SandboxError
from ramify.env.runtime import ExecResult, ResourceLimits
from ramify.processes.program import run_program
from ramify.rollout.runtime.config import ContainerRuntimeConfig
from ramify.rollout.runtime.owner import Leftover, get_machine_id, is_owner_alive
from ramify.rollout.runtime.piped_process import InputFlow
from ramify.rollout.runtime.shell_process import ShellProcess

CLOSE_TIMEOUT = 10.0  # seconds for a killed `exec` command to end
VARIABLE_PREFIX = "RAMIFY_VAR_"
NAME_PREFIX = "ramify-"
MACHINE_LABEL = "ramify.machine"
INFO_TIMEOUT = 60.0  # seconds for the engine to describe itself
PULL_TIMEOUT = 600.0  # seconds to fetch an image
COMMAND_TIMEOUT = 60.0  # seconds for a command that neither starts a container nor fetches an image
# When memory runs out, podman's monitor writes a file `oom` where its container was started; here it cannot.
ENGINE_CWD = "/proc" if Path("/proc").is_dir() else "/"
STREAM_BUFFER_BYTES = 1 << 16  # of the output of a command
KILL_TIMEOUT = 5.0  # seconds for a killed command to be gone
PULL_OPTIONS = ("--platform", "--arch", "--authfile", "--tls-verify")  # of `run`, which `pull` has too
HOST_VARIABLES = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}
LOCKED_DELAY = 0.01  # seconds until the next try if another process has the file
START_FILE = Path(tempfile.gettempdir()) / f"ramify-container-starts-{os.getuid()}"


class ContainerProcess(ShellProcess):
    """A program in a container, run by the engine's `exec` command, which has its streams."""

    _transport: asyncio.SubprocessTransport | None = None
    _streams: "_ExecStreams | None" = None

    async def start(
        self,
        command: Sequence[str],
        container: str,
        args: Sequence[str],
        env: Mapping[str, str],
        stdin: bytes | None,
        *,
        prepend_path: Sequence[str] = (),
    ) -> None:
        """Run `sh` with these arguments in a container. `command`: the engine's `exec` command.

        Directories of `prepend_path` come before those in the PATH of the image.

        Values of environment variables are passed in variables of other names: the program's own names, such as PATH,
        would change the engine's command, and its arguments are visible to every user of the machine.
        """
        has_stdin = stdin is not None or self.is_interactive
        names = {f"{VARIABLE_PREFIX}{index}": name for index, name in enumerate(env)}
        exports = f"export PATH={shlex.quote(':'.join(prepend_path))}:$PATH\n" if prepend_path else ""
        exports += "".join(f'export {name}="${alias}"; unset {alias}\n' for alias, name in names.items())
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

    def set_exit_code(self, exit_code: int) -> None:
        """Record the exit status, and close standard input: the sandbox reads it to its end."""
        super().set_exit_code(exit_code)
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


class _ExecStreams(InputFlow, asyncio.SubprocessProtocol):
    """Passes the streams of an `exec` command to its process."""

    def __init__(self, process: ContainerProcess) -> None:
        super().__init__()
        self._process = process
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._process.feed(fd, data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd > 0:
            self._process.feed_eof(fd)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._process.set_exit_code(self._transport.get_returncode() or 0)
        self._process.is_closed = True
        self.ended.set()


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """An installed engine: its name, its program with the arguments of every command, and where it runs containers."""

    name: str
    command: tuple[str, ...]
    host: str | None

    @property
    def is_local(self) -> bool:
        """Whether containers run on this machine."""
        return self.host is None or self.host.startswith("unix:")

    async def run(self, *args: str, timeout: float = COMMAND_TIMEOUT) -> ExecResult:
        """Run a command of the engine; cancelling this call kills it. Raises SandboxError if it takes too long."""
        loop = asyncio.get_running_loop()  # `create_subprocess_exec` returns no transport that could be closed
        starting = asyncio.ensure_future(
            loop.subprocess_exec(
                lambda: SubprocessStreamProtocol(STREAM_BUFFER_BYTES, loop),
                *self.command,
                *args,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=ENGINE_CWD,
                start_new_session=True,
            )
        )
        try:
            async with asyncio.timeout(timeout):
                process = Process(*await asyncio.shield(starting), loop)
                stdout, stderr = await process.communicate()
        except TimeoutError as error:
            raise SandboxError(f"{self.name} {args[0]} did not end in {timeout:g} s") from error
        finally:
            transport, protocol = await starting  # it may run already when a call is cancelled while it starts
            process = Process(transport, protocol, loop)
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # a rootless podman starts itself again
                with contextlib.suppress(TimeoutError):  # `wait` also waits for descendants that hold its output
                    async with asyncio.timeout(KILL_TIMEOUT):
                        await process.wait()
            transport.close()  # its pipes stay open as long as descendants hold them
        return ExecResult(process.returncode or 0, stdout, stderr)

    def run_blocking(self, *args: str, timeout: float = COMMAND_TIMEOUT) -> str:
        """Return the output of a command, without an event loop. Raises SandboxError if it fails or does not end."""
        result = run_program([*self.command, *args], timeout=timeout)
        if not result.ok:
            raise SandboxError(f"{self.name} {args[0]} failed: {result.stderr[-500:] or result.text}")
        return result.text


def find_engine(config: ContainerRuntimeConfig) -> ContainerEngine | None:
    """Return the engine that the configuration selects, None if it is not installed."""
    for name in ("docker", "podman") if config.engine == "auto" else (config.engine,):
        program = shutil.which(name)
        if program is not None:
            option = ("--host",) if name == "docker" else ("--url",)
            command = (program, *option, config.engine_host) if config.engine_host is not None else (program,)
            return ContainerEngine(name, command, config.engine_host or os.environ.get(HOST_VARIABLES[name]))
    return None


@cache
def find_unsupported_reason(engine: ContainerEngine) -> str | None:
    """Return why an engine cannot run containers, None if it can. The result is cached."""
    try:
        get_engine_info(engine)
    except SandboxError as error:
        return error.message
    return None


@cache
def get_engine_info(engine: ContainerEngine) -> dict[str, Any]:
    """Return what the engine says about itself. Raises SandboxError if it does not answer."""
    info = json.loads(engine.run_blocking("info", "--format", "{{json .}}", timeout=INFO_TIMEOUT))
    if not is_dict(info) or info.get("ServerErrors"):
        raise SandboxError(f"{engine.name} info: {info}")
    return info


async def fetch_image(engine: ContainerEngine, image: str, config: ContainerRuntimeConfig) -> None:
    """Fetch an image where `config.pull` says so. Raises SandboxError if it cannot be fetched."""
    if config.pull == "never":
        return
    if config.pull == "missing" and not (await engine.run("image", "inspect", "--format", "{{.Id}}", image)).returncode:
        return
    options = select_options(config.engine_args, PULL_OPTIONS)
    result = await engine.run("pull", "--quiet", *options, image, timeout=PULL_TIMEOUT)
    if result.returncode:
        raise SandboxError(f"the image {image} cannot be fetched: {result.error_text.strip()[-1000:]}")


def select_options(engine_args: Sequence[str], names: Container[str]) -> list[str]:
    """Return the options of these names, with their values."""
    selected: list[str] = []
    is_selected = False
    for argument in engine_args:
        if argument.startswith("-"):
            is_selected = argument.partition("=")[0] in names
        if is_selected:
            selected.append(argument)
    return selected


def build_limit_options(limits: ResourceLimits) -> list[str]:
    """Return the options of `run` for limits."""
    options: list[str] = []
    if limits.memory_mb is not None:
        options += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
    if limits.max_processes is not None:
        options += ["--pids-limit", str(limits.max_processes)]
    if limits.cpus is not None:
        options += ["--cpus", f"{limits.cpus:g}"]
    return options


def find_leftover_containers(engine: ContainerEngine) -> list[Leftover]:
    """Return the containers of processes of this machine that have ended."""
    machine = f"label={MACHINE_LABEL}={get_machine_id()}"
    listing = engine.run_blocking("ps", "--all", "--filter", machine, "--format", "{{.Names}}")
    return [
        Leftover(f"container {name}", partial(_remove_container, engine, name))
        for name in listing.split()
        if not is_owner_alive(name.removeprefix(NAME_PREFIX))
    ]


def _remove_container(engine: ContainerEngine, name: str) -> None:
    engine.run_blocking("rm", "--force", "--volumes", name)


async def wait_for_start(max_starts_per_second: float, path: Path = START_FILE) -> None:
    """Wait until another container may be started. The caller limits the time, as `timeouts.boot` does."""
    while (delay := claim_start(path, 1 / max_starts_per_second, time.monotonic())) > 0:
        await asyncio.sleep(delay)


def claim_start(path: Path, interval: float, now: float) -> float:
    """Record a start and return 0, or return the seconds after which one may be possible.

    `now` is on the monotonic clock, which all processes of the machine share. It begins again with every boot, so a
    later time in the file is ignored. Raises SandboxError if the file cannot be used.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SandboxError(f"the file of container starts cannot be opened: {error}; remove it") from error
    with os.fdopen(fd, "r+") as file:
        if os.fstat(fd).st_uid != os.getuid():
            raise SandboxError(f"the file of container starts {path} belongs to another user; remove it")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return LOCKED_DELAY
        try:
            last_start = float(file.read() or "-inf")
        except ValueError:  # somebody has written to it
            last_start = float("-inf")
        if last_start <= now < last_start + interval:
            return last_start + interval - now
        file.seek(0)
        file.truncate()
        file.write(repr(now))
        return 0.0
