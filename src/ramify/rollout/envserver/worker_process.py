"""A worker as the broker sees it: a process, a connection, and its load.

BOOTING -> READY -> RETIRING -> STOPPED      stopped by the broker: idle, old, too large, or the server closes
   |         |         |
   +---------+---------+------> LOST         it exited, was killed, or hung
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from ramify.core.async_calls import cancel_all
from ramify.core.errors import DeadlineExceeded, ProcessDied, RamifyError
from ramify.infer.gateway.config import REQUEST_TASK_PREFIX
from ramify.processes.child import ChildProcess
from ramify.processes.exit import describe_exit
from ramify.processes.prefork import PreforkClient
from ramify.processes.wire import LoopMonitor, WireClient, WireMessage, WireSettings
from ramify.rollout.envserver.log import EnvServerLog, WorkerOutput
from ramify.rollout.envserver.messages import EnvServerInfo, WorkerHealth, WorkerReady, WorkerSpec

STOP_TIMEOUT = 5.0  # seconds for a worker to exit by itself
PRELOAD_MODULES = (  # what every worker imports sooner or later, all but its environment
    "ramify.rollout.envserver.env_worker",
    "ramify.model.render.template_renderer",
    "aiohttp",
    "tokenizers",
)
MIB = 1 << 20


class WorkerState(Enum):
    """The state of a worker; see the module docstring for the transitions."""

    BOOTING = "booting"
    READY = "ready"
    RETIRING = "retiring"
    STOPPED = "stopped"
    LOST = "lost"


LIVE_STATES = (WorkerState.BOOTING, WorkerState.READY, WorkerState.RETIRING)


class WorkerProcess:
    """One worker process. `on_lost` is called once, when the worker is lost; `python` is the interpreter that runs it.

    With a `prefork_client`, and without `python`, it is forked from a fork server.

    `load` is the number of attempts that run on it, `info` the description it reported when it became ready.
    """

    def __init__(
        self,
        id: str,
        temp_root: Path,
        log: EnvServerLog,
        loop_monitor: LoopMonitor,
        on_lost: Callable[["WorkerProcess"], None],
        python: Path | None = None,
        prefork_client: PreforkClient | None = None,
    ) -> None:
        self.id, self.state, self.load = id, WorkerState.BOOTING, 0
        self.pid = 0
        self.started_at = time.monotonic()
        self.reason = ""
        """Why it retires, was stopped or was lost."""
        self.is_boot_aborted = False
        """Whether it was stopped while it booted, so that another one can be started."""
        self.hung_rollout_id: str | None = None
        """The rollout whose code or request made it hang, if known."""
        self.is_hung_by_agent = False
        """Whether a request of that rollout's agent made it hang."""
        self.worst_lag = 0.0
        self.info: EnvServerInfo | None = None
        self._secret = secrets.token_hex(16)
        self._temp_root, self._log, self._loop_monitor, self._on_lost = temp_root, log, loop_monitor, on_lost
        self._python = python or sys.executable
        self._prefork_client = prefork_client
        self._child = ChildProcess(stop_timeout=2 * STOP_TIMEOUT)  # its watcher kills it at once, then it cleans up
        self._client: WireClient | None = None
        self._output: WorkerOutput | None = None
        self._exit_task: asyncio.Task[None] | None = None

    # -- boot ----------------------------------------------------------------------------------------------------------

    async def boot(self, spec: WorkerSpec, settings: WireSettings, *, private_temp: bool, timeout: float) -> None:
        """Start the process and wait until it is ready.

        Raises the error that it reports, ProcessDied if it exits, or DeadlineExceeded after `timeout` seconds.
        """
        spec.id, spec.secret = self.id, self._secret
        temp_dir = self._temp_root / self.id
        temp_dir.mkdir(parents=True)
        env = {"TMPDIR": str(temp_dir)} if private_temp else {}
        try:
            async with asyncio.timeout(timeout):
                exit_task, report_bytes = await self._start_and_read_report(msgspec.json.encode(spec), temp_dir, env)
                try:
                    report = msgspec.json.decode(report_bytes, type=WorkerReady)
                except msgspec.DecodeError as error:  # it exited before or while it reported
                    await asyncio.wait([exit_task], timeout=STOP_TIMEOUT)
                    raise self._boot_error("closed its report") from error
                self.pid = report.pid
                if report.failure is not None:
                    raise report.failure.to_exception()
                await self._connect(report.address, settings, exit_task, timeout)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.id} was not ready within {timeout:g} s") from None
        self.info, self.state = report.info, WorkerState.READY

    async def _connect(
        self, address: str, settings: WireSettings, exit_task: "asyncio.Task[None]", timeout: float
    ) -> None:
        """Connect to the process. Raises ProcessDied if it exits meanwhile."""
        self._client = WireClient(
            address, secret=self._secret, encrypted=False, settings=settings, loop_monitor=self._loop_monitor
        )
        connecting = asyncio.create_task(self._client.start(timeout), name=f"connecting to {self.id}")
        try:
            await asyncio.wait([connecting, exit_task], return_when=asyncio.FIRST_COMPLETED)
            if exit_task.done():  # even if it is connected: nothing else would notice the exit
                raise self._boot_error("exited")
            connecting.result()
        finally:
            await cancel_all([connecting])

    async def _start_and_read_report(
        self, spec: bytes, temp_dir: Path, env: Mapping[str, str]
    ) -> tuple["asyncio.Task[None]", bytes]:
        """Start the process; return the task that waits for its exit, and all that it writes to its report."""
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as inherited:
            self._output, output_fd = await WorkerOutput.open(self._log, self.id)
            inherited.callback(os.close, output_fd)
            read_fd, report_fd = os.pipe()
            inherited.callback(os.close, report_fd)
            report = stack.enter_context(os.fdopen(read_fd, "rb", 0))
            spec_file = inherited.enter_context(os.fdopen(os.memfd_create("worker spec"), "w+b", 0))
            spec_file.write(spec)
            spec_file.seek(0)
            command = (str(self._python), "-m", "ramify.rollout.envserver.worker_main", str(temp_dir))
            await self._start_child(command, env, output_fd, (report_fd, spec_file.fileno()))
            inherited.close()
            self._exit_task = asyncio.create_task(self._wait_for_exit(), name=f"exit of {self.id}")
            if self.is_boot_aborted:
                self._kill_and_fail_requests()
            return self._exit_task, await _read_pipe(report)

    async def _start_child(
        self, command: Sequence[str], env: Mapping[str, str], output_fd: int, fds: Sequence[int]
    ) -> None:
        """Fork the process from the fork server if that is possible; start it directly if not."""
        options: Mapping[str, Any] = {"env": env, "pass_fds": fds, "command_forks_watcher": True}
        client, child = self._prefork_client, self._child
        if client is not None and await child.spawn_preforked(client, PRELOAD_MODULES, command, output_fd, **options):
            return
        if self.is_boot_aborted:
            raise self._boot_error("was stopped")
        await child.spawn(command, output_fd, **options)

    def _boot_error(self, exit_description: str) -> ProcessDied:
        tail = "\n".join(self._output.tail if self._output is not None else ())
        output = f"; its output:\n{tail}" if tail else ""
        return ProcessDied(f"{self.id} {self.reason or exit_description} while it booted{output}")

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def client(self) -> WireClient:
        """The connection to the worker. Raises ProcessDied if there is none."""
        if self._client is None or self.state not in LIVE_STATES:
            raise ProcessDied(f"{self.id} {self.reason or 'is not ready'}")
        return self._client

    @property
    def age(self) -> float:
        """Seconds since the start of the process."""
        return time.monotonic() - self.started_at

    @property
    def memory(self) -> float:
        """The memory of the worker in MiB."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).memory_info().rss / MIB if self.pid else 0.0
        return 0.0

    def health(self) -> WorkerHealth:
        """Return the current state of the worker."""
        client = self._client
        return WorkerHealth(
            id=self.id,
            pid=self.pid,
            state=self.state.value,
            load=self.load,
            lag=client.last_heartbeat.lag if client is not None else 0.0,
            silence=client.seconds_since_received if client is not None else 0.0,
            age=self.age,
            memory=self.memory,
        )

    def check_hang(self, timeout: float) -> str | None:
        """Return a description of the hang if the worker's event loop has not run for `timeout` seconds, else None."""
        if self._client is None or self.state not in (WorkerState.READY, WorkerState.RETIRING):
            return None
        heartbeat, silence = self._client.last_heartbeat, self._client.seconds_since_received
        lag, task = heartbeat.lag, heartbeat.task
        self.worst_lag = max(self.worst_lag, lag)
        if lag > timeout:
            self.hung_rollout_id = task.removeprefix(REQUEST_TASK_PREFIX) or None
            self.is_hung_by_agent = task.startswith(REQUEST_TASK_PREFIX)
            return f"hung: its event loop was blocked for {lag:.1f} s in {task or 'no task'}:\n{heartbeat.stack}"
        if silence > timeout:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGUSR1)  # it writes its stacks to the log if it still can
            return f"hung: no heartbeat for {silence:.1f} s"
        return None

    # -- stop and loss -------------------------------------------------------------------------------------------------

    def retire(self, reason: str) -> None:
        """Assign no further attempts to a ready worker."""
        if self.state is WorkerState.READY:
            self.state, self.reason = WorkerState.RETIRING, reason

    def abort_boot(self, reason: str) -> None:
        """Let `boot` fail: the process is killed with all it started."""
        if self.state is WorkerState.BOOTING:
            self.is_boot_aborted, self.reason = True, reason
            self._kill_and_fail_requests()

    async def stop(self) -> None:
        """Stop the worker: ask it to exit, and kill it if it does not."""
        if self.state not in LIVE_STATES:
            return
        client = None if self.state is WorkerState.BOOTING else self._client
        self.state, self.reason = WorkerState.STOPPED, self.reason or "stopped"
        if client is not None:
            with contextlib.suppress(RamifyError):
                await client.call("stop", WireMessage.encode(), timeout=STOP_TIMEOUT)
            if self._exit_task is not None:
                await asyncio.wait([self._exit_task], timeout=STOP_TIMEOUT)
        await self.reap()

    def mark_lost(self, reason: str) -> None:
        """Mark the worker lost: fail its requests now, and kill the process with all it started."""
        if self.state in LIVE_STATES:
            self.state, self.reason = WorkerState.LOST, reason
            self._kill_and_fail_requests()
            self._on_lost(self)

    async def reap(self) -> None:
        """Kill the process, wait for its exit and the end of its output, and close the connection."""
        self._kill_and_fail_requests()
        await self._child.stop()
        if self._exit_task is not None:
            await asyncio.wait([self._exit_task], timeout=STOP_TIMEOUT)
        if self._client is not None:
            await self._client.close()
        if self._output is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._output.closed.wait(), STOP_TIMEOUT)

    def _kill_and_fail_requests(self) -> None:
        """Let the watcher process kill the worker, and fail open requests."""
        self._child.request_stop()
        if self._client is not None:
            self._client.fail_pending(f"{self.id} {self.reason}")

    async def _wait_for_exit(self) -> None:
        exit_description = describe_exit(await self._child.wait())
        if self.state is WorkerState.BOOTING:
            self.reason = self.reason or exit_description
        else:
            self.mark_lost(exit_description)
        self._kill_and_fail_requests()


async def _read_pipe(pipe: IO[bytes]) -> bytes:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return await reader.read()
    finally:
        transport.close()
