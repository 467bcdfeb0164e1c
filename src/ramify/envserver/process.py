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

from ramify.envserver.log import Log, Output
from ramify.envserver.messages import Info, Ready, Told, WorkerHealth
from ramify.errors import DeadlineExceeded, RamifyError, WorkerDied
from ramify.wire import LoopMonitor, WireClient, WireMessage, WireSettings

STOPPING = 5.0  # seconds to end by itself
MIB = 1 << 20


class State(Enum):
    """Where a worker is in its life."""

    BOOTING = "booting"
    READY = "ready"
    RETIRING = "retiring"
    STOPPED = "stopped"
    LOST = "lost"


LIVING = (State.BOOTING, State.READY, State.RETIRING)


class WorkerProcess:
    """One worker. `on_end` is called once, when it is lost or stopped."""

    def __init__(
        self, id: str, folder: Path, log: Log, pulse: LoopMonitor, on_end: Callable[["WorkerProcess"], None]
    ) -> None:
        self.id, self.state, self.load = id, State.BOOTING, 0
        self.pid = 0
        self.born = time.monotonic()
        self.reason = ""
        """Why it retires, was stopped or is lost."""
        self.guilty: str | None = None
        """The rollout whose code made it hang, where that is known."""
        self.worst_lag = 0.0
        self.info: Info | None = None
        self._secret = secrets.token_hex(16)
        self._folder, self._log, self._pulse, self._on_end = folder, log, pulse, on_end
        self._process: asyncio.subprocess.Process | None = None
        self._client: WireClient | None = None
        self._output: Output | None = None
        self._waiter: asyncio.Task[None] | None = None

    # -- birth ---------------------------------------------------------------------------------------------------------

    async def boot(self, told: Told, settings: WireSettings, *, private_temp: bool, deadline: float) -> None:
        """Start it and wait until it is ready; raises why it is not."""
        told.id, told.secret = self.id, self._secret
        temporary = self._folder / self.id
        temporary.mkdir(parents=True)
        self._output, out = await Output.open(self._log, self.id)
        reading, report = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "ramify.envserver.worker",
                str(temporary),
                str(report),
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=(report,),
                start_new_session=True,
                env={**os.environ, **({"TMPDIR": str(temporary)} if private_temp else {})},
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(out)
            os.close(report)
        self._waiter = asyncio.create_task(self._wait(), name=f"exit of {self.id}")
        assert self._process.stdin is not None
        packed = msgspec.json.encode(told)
        self._process.stdin.write(len(packed).to_bytes(8, "big") + packed)
        try:
            async with asyncio.timeout(deadline):
                ready = await _read_all(reading)
        except TimeoutError:
            raise DeadlineExceeded(f"{self.id} was not ready within {deadline:g} s") from None
        try:
            said = msgspec.json.decode(ready, type=Ready)
        except msgspec.DecodeError as error:  # it ended before, or while, it reported
            await asyncio.wait([self._waiter], timeout=STOPPING)
            raise self._died("closed its report") from error
        self.pid = said.pid
        if said.failure is not None:
            raise said.failure.to_exception()
        self._client = WireClient(
            said.address, secret=self._secret, encrypted=False, settings=settings, loop_monitor=self._pulse
        )
        meeting = asyncio.create_task(self._client.start(deadline), name=f"meeting {self.id}")
        await asyncio.wait([meeting, self._waiter], return_when=asyncio.FIRST_COMPLETED)
        if self._waiter.done():  # even if we have met: nobody else would see it go
            meeting.cancel()
            await asyncio.wait([meeting])
            raise self._died("ended")
        meeting.result()
        self.info, self.state = said.info, State.READY

    def _died(self, how: str) -> WorkerDied:
        tail = "\n".join(self._output.tail if self._output is not None else ())
        said = f"; it said:\n{tail}" if tail else ""
        return WorkerDied(f"{self.id} {self.reason or how} while it booted{said}")

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def client(self) -> WireClient:
        """The connection; WorkerDied while there is none."""
        if self._client is None or self.state not in LIVING:
            raise WorkerDied(f"{self.id} {self.reason or 'is not ready'}")
        return self._client

    @property
    def age(self) -> float:
        return time.monotonic() - self.born

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

    def hung(self, timeout: float) -> str | None:
        """What stands still, if its loop has for this long."""
        if self._client is None or self.state not in (State.READY, State.RETIRING):
            return None
        beat = self._client.last_heartbeat
        self.worst_lag = max(self.worst_lag, beat.lag)
        if beat.lag > timeout:
            self.guilty = beat.task or None
            return f"hung: its event loop stood still for {beat.lag:.1f} s in {beat.task or 'no task'}:\n{beat.stack}"
        if self._client.seconds_since_received > timeout:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGUSR1)  # it writes its stacks into the log, if it still can
            return f"hung: no heartbeat for {self._client.seconds_since_received:.1f} s"
        return None

    # -- death ---------------------------------------------------------------------------------------------------------

    def retire(self, reason: str) -> None:
        """Give it no more work."""
        if self.state is State.READY:
            self.state, self.reason = State.RETIRING, reason

    async def stop(self) -> None:
        """End it in peace, or else by force."""
        if self.state not in LIVING:
            return
        client, self.reason = self._client, self.reason or "stopped"
        peaceful = client is not None and self.state is not State.BOOTING
        self.state = State.STOPPED
        if peaceful and client is not None:
            with contextlib.suppress(RamifyError):
                await client.call("stop", WireMessage.encode(), timeout=STOPPING)
            if self._waiter is not None:
                await asyncio.wait([self._waiter], timeout=STOPPING)
        await self.bury()

    def lose(self, reason: str) -> None:
        """Give it up: everything it holds fails now, and the process ends with all it started."""
        if self.state in LIVING:
            self.state, self.reason = State.LOST, reason
            self._let_go()
            self._on_end(self)

    async def bury(self) -> None:
        """Wait until nothing of it is left."""
        self._let_go()
        if self._waiter is not None:
            await asyncio.wait([self._waiter], timeout=2 * STOPPING)
        if self._client is not None:
            await self._client.close()
        if self._output is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._output.ended.wait(), STOPPING)

    def _let_go(self) -> None:
        """Close the life line; the keeper does the rest."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._client is not None:
            self._client.fail_pending(f"{self.id} {self.reason}")

    async def _wait(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        how = f"was killed by signal {code - 128}" if code > 128 else f"exited with code {code}"
        if self.state is State.BOOTING:
            self.reason = self.reason or how
        else:
            self.lose(how)
        self._let_go()


async def _read_all(fd: int) -> bytes:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(fd, "rb", 0)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return await reader.read()
    finally:
        transport.close()


def make_folder() -> Path:
    """A folder for the temporary directories of all workers of a server."""
    return Path(tempfile.mkdtemp(prefix="ramify-env-"))
