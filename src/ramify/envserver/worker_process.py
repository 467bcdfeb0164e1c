"""A worker as the broker sees it: a process, a connection, and what it has in hand.

BOOTING -> READY -> RETIRING -> STOPPED      stopped by us: idle, old, too large, or the server closes
   |         |         |
   +---------+---------+------> LOST         it exited, was killed, or hung
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import msgspec
import psutil

from ramify.envserver.log import EnvServerLog, WorkerOutput
from ramify.envserver.messages import EnvServerInfo, WorkerHealth, WorkerReady, WorkerSpec
from ramify.errors import DeadlineExceeded, RamifyError, WorkerDied
from ramify.wire import LoopMonitor, WireClient, WireMessage, WireSettings

STOP_TIMEOUT = 5.0  # seconds to end by itself
MIB = 1 << 20


class WorkerState(Enum):
    """Where a worker is in its life."""

    BOOTING = "booting"
    READY = "ready"
    RETIRING = "retiring"
    STOPPED = "stopped"
    LOST = "lost"


LIVE_STATES = (WorkerState.BOOTING, WorkerState.READY, WorkerState.RETIRING)


class WorkerProcess:
    """One worker. `on_end` is called once, when it is lost or stopped."""

    def __init__(
        self,
        id: str,
        temp_root: Path,
        log: EnvServerLog,
        loop_monitor: LoopMonitor,
        on_lost: Callable[["WorkerProcess"], None],
    ) -> None:
        self.id, self.state, self.load = id, WorkerState.BOOTING, 0
        self.pid = 0
        self.started_at = time.monotonic()
        self.reason = ""
        """Why it retires, was stopped or is lost."""
        self.hung_rollout_id: str | None = None
        """The rollout whose code made it hang, where that is known."""
        self.worst_lag = 0.0
        self.info: EnvServerInfo | None = None
        self._secret = secrets.token_hex(16)
        self._temp_root, self._log, self._loop_monitor, self._on_lost = temp_root, log, loop_monitor, on_lost
        self._process: asyncio.subprocess.Process | None = None
        self._client: WireClient | None = None
        self._output: WorkerOutput | None = None
        self._exit_task: asyncio.Task[None] | None = None

    # -- birth ---------------------------------------------------------------------------------------------------------

    async def boot(self, spec: WorkerSpec, settings: WireSettings, *, private_temp: bool, timeout: float) -> None:
        """Start it and wait until it is ready; raises why it is not."""
        spec.id, spec.secret = self.id, self._secret
        temp_dir = self._temp_root / self.id
        temp_dir.mkdir(parents=True)
        self._output, out = await WorkerOutput.open(self._log, self.id)
        reading, report = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "ramify.envserver.worker_main",
                str(temp_dir),
                str(report),
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=(report,),
                start_new_session=True,
                env={**os.environ, **({"TMPDIR": str(temp_dir)} if private_temp else {})},
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(out)
            os.close(report)
        self._exit_task = asyncio.create_task(self._wait_for_exit(), name=f"exit of {self.id}")
        assert self._process.stdin is not None
        packed = msgspec.json.encode(spec)
        self._process.stdin.write(len(packed).to_bytes(8, "big") + packed)
        try:
            async with asyncio.timeout(timeout):
                ready = await _read_pipe(reading)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.id} was not ready within {timeout:g} s") from None
        try:
            said = msgspec.json.decode(ready, type=WorkerReady)
        except msgspec.DecodeError as error:  # it ended before, or while, it reported
            await asyncio.wait([self._exit_task], timeout=STOP_TIMEOUT)
            raise self._boot_error("closed its report") from error
        self.pid = said.pid
        if said.failure is not None:
            raise said.failure.to_exception()
        self._client = WireClient(
            said.address, secret=self._secret, encrypted=False, settings=settings, loop_monitor=self._loop_monitor
        )
        connecting = asyncio.create_task(self._client.start(timeout), name=f"meeting {self.id}")
        await asyncio.wait([connecting, self._exit_task], return_when=asyncio.FIRST_COMPLETED)
        if self._exit_task.done():  # even if we have met: nobody else would see it go
            connecting.cancel()
            await asyncio.wait([connecting])
            raise self._boot_error("ended")
        connecting.result()
        self.info, self.state = said.info, WorkerState.READY

    def _boot_error(self, exit_description: str) -> WorkerDied:
        tail = "\n".join(self._output.tail if self._output is not None else ())
        output = f"; it said:\n{tail}" if tail else ""
        return WorkerDied(f"{self.id} {self.reason or exit_description} while it booted{output}")

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def client(self) -> WireClient:
        """The connection; WorkerDied while there is none."""
        if self._client is None or self.state not in LIVE_STATES:
            raise WorkerDied(f"{self.id} {self.reason or 'is not ready'}")
        return self._client

    @property
    def age(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def memory(self) -> float:
        """MiB that it holds."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).memory_info().rss / MIB if self.pid else 0.0
        return 0.0

    def health(self) -> WorkerHealth:
        """How it does."""
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

    def find_hang(self, timeout: float) -> str | None:
        """What stands still, if its loop has for this long."""
        if self._client is None or self.state not in (WorkerState.READY, WorkerState.RETIRING):
            return None
        beat = self._client.last_heartbeat
        self.worst_lag = max(self.worst_lag, beat.lag)
        if beat.lag > timeout:
            self.hung_rollout_id = beat.task or None
            return f"hung: its event loop stood still for {beat.lag:.1f} s in {beat.task or 'no task'}:\n{beat.stack}"
        if self._client.seconds_since_received > timeout:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGUSR1)  # it writes its stacks into the log, if it still can
            return f"hung: no heartbeat for {self._client.seconds_since_received:.1f} s"
        return None

    # -- death ---------------------------------------------------------------------------------------------------------

    def retire(self, reason: str) -> None:
        """Give it no more work."""
        if self.state is WorkerState.READY:
            self.state, self.reason = WorkerState.RETIRING, reason

    async def stop(self) -> None:
        """End it in peace, or else by force."""
        if self.state not in LIVE_STATES:
            return
        client, self.reason = self._client, self.reason or "stopped"
        can_ask = client is not None and self.state is not WorkerState.BOOTING
        self.state = WorkerState.STOPPED
        if can_ask and client is not None:
            with contextlib.suppress(RamifyError):
                await client.call("stop", WireMessage.encode(), timeout=STOP_TIMEOUT)
            if self._exit_task is not None:
                await asyncio.wait([self._exit_task], timeout=STOP_TIMEOUT)
        await self.reap()

    def mark_lost(self, reason: str) -> None:
        """Give it up: everything it holds fails now, and the process ends with all it started."""
        if self.state in LIVE_STATES:
            self.state, self.reason = WorkerState.LOST, reason
            self._close_lifeline()
            self._on_lost(self)

    async def reap(self) -> None:
        """Wait until nothing of it is left."""
        self._close_lifeline()
        if self._exit_task is not None:
            await asyncio.wait([self._exit_task], timeout=2 * STOP_TIMEOUT)
        if self._client is not None:
            await self._client.close()
        if self._output is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._output.closed.wait(), STOP_TIMEOUT)

    def _close_lifeline(self) -> None:
        """Close the life line; the keeper does the rest."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._client is not None:
            self._client.fail_pending(f"{self.id} {self.reason}")

    async def _wait_for_exit(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        exit_description = f"was killed by signal {code - 128}" if code > 128 else f"exited with code {code}"
        if self.state is WorkerState.BOOTING:
            self.reason = self.reason or exit_description
        else:
            self.mark_lost(exit_description)
        self._close_lifeline()


async def _read_pipe(fd: int) -> bytes:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(fd, "rb", 0)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return await reader.read()
    finally:
        transport.close()


def make_temp_root() -> Path:
    """A folder for the temporary directories of all workers of a server."""
    return Path(tempfile.mkdtemp(prefix="ramify-env-"))
