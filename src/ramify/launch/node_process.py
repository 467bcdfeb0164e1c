"""The node's side of a process that the head starts on another machine.

    head: RemoteSlot  ==exchange==>  NodeProcess  ==control socket==>  watcher ---> process

The head repeats one call, `exchange`, which does everything: it starts the process, delivers signals, fetches output
and renews the lease. A call may be lost, delayed or answered twice without harm: the start is done once, signals have
numbers, output has an offset, and renewals have numbers. A reply is the sending of a renewal, and the next call is its
grant (see `fencing.lease`). The watcher knows the end of the lease and kills the process tree then, whether this
process lives, is stopped or is gone.
"""

import contextlib
import signal
import sys
from dataclasses import dataclass, replace

from ramify.core.errors import RamifyError
from ramify.launch.launcher import ProcessStart
from ramify.launch.local_launcher import LocalSlot
from ramify.processes.exit_codes import EXIT_NOT_STARTED
from ramify.processes.log import ProcessLog
from ramify.processes.wire.listener import PortReservation
from ramify.run.fencing.lease import LeaseHolder, LeaseTerms, read_lease_clock
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

    granted_renewal: int = 0
    """Number of the renewal that the head granted last; 0 for none."""
    start: ProcessStart | None = None
    """What to start, as long as the head does not know that it was started."""
    signals: tuple[tuple[int, int], ...] = ()
    """Numbered signals that the head does not know to be delivered."""
    is_stop_requested: bool = False
    log_offset: int = 0
    """Bytes of the output that the head has."""


@dataclass(frozen=True, slots=True)
class ExchangeReply:
    """What the node knows about the process."""

    renewal: int
    """Number of the renewal of the lease that is sent with this reply; 0 for none."""
    is_started: bool
    pid: int
    exit_code: int | None
    last_signal: int
    """Number of the last signal that was delivered."""
    output: bytes
    """The output from `log_offset` on, at most MAX_LOG_BYTES."""
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
