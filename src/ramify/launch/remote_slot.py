"""Both sides of a process that the head starts on another machine.

    head: RemoteSlot  ==exchange==>  NodeProcess  ==control socket==>  watcher ---> process

The head repeats one call, `exchange`, which does everything: it starts the process, delivers signals, fetches output
and renews the lease. A call may be lost, delayed or answered twice without harm: the start is done once, signals have
numbers, output has an offset, and renewals have numbers. A reply sends a renewal, and the next call confirms it (see
`fencing.lease`). The watcher knows the end of the lease and kills the process tree then, whether the node's side lives,
is stopped or is gone.

A call that is not answered says nothing about the process: it may run, it may be dead, or the node may only be cut off.
So the head goes on calling, until the lease of the process has ended for certain: then the process is lost.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Protocol

from ramify.core.async_calls import cancel_all, wait_for_event
from ramify.core.errors import PeerLost, ProcessReplaced, RamifyError
from ramify.launch.launcher import ProcessStart
from ramify.launch.local_launcher import LocalSlot
from ramify.processes.child import KILL_TIMEOUT, STOP_TIMEOUT
from ramify.processes.exit import EXIT_NOT_STARTED
from ramify.processes.log import ProcessLog
from ramify.processes.wire.listener import PortReservation
from ramify.run.fencing.lease import LeaseHolder, LeaseTerms, RoleLeases, read_lease_clock
from ramify.run.store import storage_call

MAX_LOG_BYTES = 64 * 1024  # of output in a reply: small replies are sent directly, not through a store of objects
RELEASE_BYTES = 1024 * 1024  # of output that the head has, before their space on the node's disk is released
NODE_PYTHON = "{python}"  # stands for the Python interpreter of the node in a command


@dataclass(frozen=True, slots=True)
class SlotAddress:
    """Where a slot is."""

    node: str
    host: str
    port: int
    directory: str


@dataclass(frozen=True, slots=True)
class ExchangeRequest:
    """What the head wants of the process."""

    granted_renewal: int = 0  # number of the renewal that the head granted last; 0 for none
    start: ProcessStart | None = None  # what to start, as long as the head does not know that it was started
    signals: tuple[tuple[int, int], ...] = ()  # numbered signals that the head does not know to be delivered
    is_stop_requested: bool = False
    log_offset: int = 0  # bytes of the output that the head has


@dataclass(frozen=True, slots=True)
class ExchangeReply:
    """What the node knows about the process."""

    renewal: int  # number of the renewal of the lease that is sent with this reply; 0 for none
    is_started: bool
    pid: int
    exit_code: int | None
    last_signal: int  # number of the last signal that was delivered
    output: bytes  # the output from `log_offset` on, at most MAX_LOG_BYTES
    log_size: int


class NodeProcess:
    """One process on this node. It is started after the first grant, and at most once.

    The disk space of output that the head has received is released in pieces of `release_bytes`.
    """

    def __init__(
        self,
        terms: LeaseTerms,
        *,
        node: str,
        host: str,
        release_bytes: int = RELEASE_BYTES,
        slot_class: type[LocalSlot] = LocalSlot,
    ) -> None:
        self._release_bytes = release_bytes
        self._reservation = PortReservation({"port": f"tcp://{host}:0"})
        self._slot = slot_class(host=host, reservation=self._reservation, is_detached=True)
        self._log = ProcessLog(self._slot.directory / "output.log", append=True)  # /dev/stdout, too
        with storage_call(self._log.path):
            self._log.open().close()
        self._node, self._lease = node, LeaseHolder(terms)
        self._is_started = self._has_start_failed = False
        self._exit_code: int | None = None  # of a process that is never started
        self._last_signal = 0
        self._num_released = 0  # bytes of the output whose space is released

    def get_address(self) -> SlotAddress:
        """Return where this slot is."""
        return SlotAddress(self._node, self._slot.host, self._slot.port, str(self._slot.directory))

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """Do what the head wants, and return what is known about the process. Raises a storage failure."""
        self._lease.record_grant(request.granted_renewal)
        if self._lease.expires_at is not None:
            self._slot.set_lease_end(self._lease.expires_at)
        if request.is_stop_requested:
            self._stop()
        if request.start is not None:
            await self._start_once(request.start)
        for number, signal_number in request.signals:
            if number > self._last_signal:
                self._slot.send_signal(signal.Signals(signal_number))
                self._last_signal = number
        exit_code = self._poll()  # before the output is read
        output, log_size = self._read_output(request.log_offset)
        return ExchangeReply(
            renewal=0 if self._has_start_failed else self._lease.send_renewal(read_lease_clock()),
            is_started=self._is_started,
            pid=self._slot.pid,
            exit_code=exit_code,
            last_signal=self._last_signal,
            output=output,
            log_size=log_size,
        )

    def _poll(self) -> int | None:
        """Return the exit code if no process runs any more, nor will start; else None."""
        exit_code = self._slot.poll() if self._exit_code is None else self._exit_code
        if exit_code is None and self._has_start_failed and self._slot.has_exited:
            return EXIT_NOT_STARTED
        return exit_code

    def _stop(self) -> None:
        """Stop the process; one that was not started yet never will be."""
        if not self._is_started:
            self._is_started, self._exit_code = True, EXIT_NOT_STARTED
        self._slot.request_stop()

    async def _start_once(self, start: ProcessStart) -> None:
        """Start the process if its lease allows it. The reason of a failure is in the output.

        A start that took too long may still happen. So a failure counts as an exit only when no process can run any
        more, and the lease is not renewed meanwhile.
        """
        if self._is_started or self._lease.is_expired(read_lease_clock()):
            return
        self._is_started = True
        command = tuple(sys.executable if word == NODE_PYTHON else word for word in start.command)
        try:
            await self._slot.start(replace(start, command=command), self._log)
        except RamifyError as error:
            self._has_start_failed = True
            self._slot.request_stop()
            with contextlib.suppress(OSError), self._log.path.open("a", encoding="utf-8") as log:
                log.write(f"{type(error).__name__}: {error.message}\n")

    def _read_output(self, offset: int) -> tuple[bytes, int]:
        """Return the output from `offset` on, and its size; what is before has arrived and is not needed any more."""
        if offset - self._num_released >= self._release_bytes:
            self._log.release_space(offset)
            self._num_released = offset
        with storage_call(self._log.path), self._log.path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(offset)
            return log.read(MAX_LOG_BYTES), size

    async def close(self) -> None:
        """Stop the process, remove its files and release its port."""
        with self._reservation:
            await self._slot.stop()


STOP_INTERVAL = 0.1  # seconds between two calls while the process is being stopped


class NodeClient(Protocol):
    """The connection to one `NodeProcess`."""

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """Call `NodeProcess.exchange`. Raises PeerLost if there is no answer: the call may or may not have arrived."""
        ...

    async def close(self, *, is_reachable: bool) -> None:
        """Release the `NodeProcess`; it is stopped first if it is reachable. Returns within seconds."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteSlotSettings:
    """Intervals and timeouts of a RemoteSlot, in seconds."""

    exchange_interval: float = 0.5
    """Time between two calls."""
    max_silence: float = 3.0
    """Time without a reply after which the node counts as unreachable."""
    stop_timeout: float = STOP_TIMEOUT + KILL_TIMEOUT + 2.0
    """Time for a stop: the time that the watcher takes, and some for the calls."""


class RemoteSlot:
    """The place of one execution of a process on another machine."""

    def __init__(
        self,
        client: NodeClient,
        address: SlotAddress,
        leases: RoleLeases,
        rank: int,
        settings: RemoteSlotSettings | None = None,
    ) -> None:
        self.node, self.host, self.port = address.node, address.host, address.port
        self.directory = Path(address.directory)
        self.pid, self.is_lost, self.has_exited = 0, False, True
        self._client, self._leases, self._token, self._rank = client, leases, leases.token, rank
        self._settings = settings or RemoteSlotSettings()
        self._replied_at = time.monotonic()
        self._request = ExchangeRequest()
        self._last_signal = 0
        self._exit_code: int | None = None
        self._wake = asyncio.Event()  # there is something to send
        self._task: asyncio.Task[None] | None = None

    @property
    def unreachable_seconds(self) -> float:
        """Seconds since the last reply, if that is long ago and no exit of the process was seen; else 0."""
        seconds = time.monotonic() - self._replied_at
        is_calling = self._task is not None and not self._task.done()
        return seconds if (is_calling or self.is_lost) and seconds > self._settings.max_silence else 0.0

    async def start(self, start: ProcessStart, log: ProcessLog) -> None:
        """Begin to call the node, which starts the process; whether it could is seen by `wait` and in the log."""
        command = tuple(NODE_PYTHON if word == sys.executable else word for word in start.command)
        python_path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        env = {"PYTHONPATH": python_path, **start.env}  # the node's own process was not started in this directory
        self._request = replace(self._request, start=replace(start, command=command, env=env))
        with storage_call(log.path):
            output = log.open()
        self._replied_at, self.has_exited = time.monotonic(), False
        self._task = asyncio.create_task(self._exchange_until_exit(output), name=f"exchange {self.node}")

    def poll(self) -> int | None:
        """Return the exit code if the process and its descendants have exited, else None."""
        return self._exit_code if self._task is not None and self._task.done() else None

    async def wait(self) -> int:
        """Wait until the process has exited and its output has arrived, or until it is dead for certain."""
        assert self._task is not None, "the process was not started"
        await asyncio.wait({self._task})
        self._task.result()
        assert self._exit_code is not None
        return self._exit_code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal with the next call, and with further ones until it is known to be delivered."""
        self._last_signal += 1
        self._request = replace(self._request, signals=(*self._request.signals, (self._last_signal, number.value)))
        self._wake.set()

    def request_stop(self) -> None:
        """Let the node stop the process; its lease is not renewed any more."""
        self._request = replace(self._request, is_stop_requested=True)
        self._wake.set()

    async def kill(self) -> None:
        """Kill the process; its watcher kills the descendants. Its lease is not renewed any more."""
        self.send_signal(signal.SIGKILL)
        self.request_stop()

    async def stop(self) -> int | None:
        """Stop the process, for as long as a stop takes, and release the node's side."""
        self.request_stop()
        try:
            if self._task is not None:
                await asyncio.wait({self._task}, timeout=self._settings.stop_timeout)
        finally:
            is_reachable = self._task is None or (self._task.done() and not self.is_lost)
            if self._task is not None:
                await cancel_all([self._task])
                self._exit_code = -signal.SIGKILL if self._exit_code is None else self._exit_code
            await self._client.close(is_reachable=is_reachable)
        return self._exit_code

    async def _exchange_until_exit(self, log: IO[bytes]) -> None:
        """Call the node until the process has exited and all its output is in the log, or until it is lost."""
        with log:
            while True:
                reply = await self._exchange()
                if reply is not None and self._record_reply(reply, log):
                    return
                if read_lease_clock() >= self._leases.dead_at(self._rank):
                    self.is_lost, self.has_exited, self._exit_code = True, True, -signal.SIGKILL
                    return
                if reply is None or self._request.log_offset >= reply.log_size:
                    await self._sleep()

    async def _exchange(self) -> ExchangeReply | None:
        """Call the node; return None if it does not answer before the process is dead for certain."""
        self._wake.clear()
        timeout = self._leases.dead_at(self._rank) - read_lease_clock()
        with contextlib.suppress(TimeoutError, PeerLost):
            async with asyncio.timeout(max(0.0, timeout)):
                return await self._client.exchange(self._request)
        return None

    def _record_reply(self, reply: ExchangeReply, log: IO[bytes]) -> bool:
        """Record a reply, and grant its renewal. Return whether the process has exited and all output is here."""
        with storage_call(Path(log.name)):
            log.write(reply.output)
            log.flush()
        request, offset = self._request, self._request.log_offset + len(reply.output)
        self.pid, self._replied_at = reply.pid, time.monotonic()
        if not request.granted_renewal:
            self._wake.set()  # the node starts the process after the first grant
        self._request = replace(
            request,
            granted_renewal=self._grant(reply.renewal),
            start=None if reply.is_started else request.start,
            signals=tuple(entry for entry in request.signals if entry[0] > reply.last_signal),
            log_offset=offset,
        )
        if reply.exit_code is not None and offset >= reply.log_size:
            self.has_exited, self._exit_code = True, reply.exit_code
            return True
        return False

    def _grant(self, renewal: int) -> int:
        """Grant a renewal, unless the process is to be stopped or replaced; return the number to send."""
        if self._request.is_stop_requested or not renewal:
            return self._request.granted_renewal
        with contextlib.suppress(ProcessReplaced):
            self._leases.grant(self._token, self._rank, read_lease_clock())
            return renewal
        return self._request.granted_renewal

    async def _sleep(self) -> None:
        """Wait for the next call; one that has something to send is made at once."""
        interval = self._settings.exchange_interval
        if self._request.is_stop_requested:
            interval = min(STOP_INTERVAL, interval)
        await wait_for_event(self._wake, interval)
