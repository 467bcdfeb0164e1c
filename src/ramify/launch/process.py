"""One process of a run: what is to be started, and one life of it.

    STARTING -> READY <-> SILENT
        |         |         |
        +---------+---------+--> ENDED   it exited, or was let go

It runs on a leash, in a session of its own (Ctrl-C is for the supervisor alone), and writes to its log, which keeps
what earlier lives have written. Its end is seen at once, through a process handle.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ramify.errors import DeadlineExceeded
from ramify.launch.leash import BY_SIGNAL
from ramify.launch.nursery import Nursery
from ramify.launch.ready import answers
from ramify.store import wrap_storage_errors

TAIL = 30  # lines of the log that a failure shows
PATIENCE = 5.0  # seconds a process gets to end by itself
KILLING = 3.0  # seconds its leash gets to end the rest
STARTING = 10.0  # seconds for a leash to say what it holds
LOADING = 120.0  # seconds for one from the nursery, which may still be loading
POLL = 0.1  # seconds between two looks at whether it answers


class Role(Enum):
    """What the end of a process means for the run."""

    LEADER = "leader"  # its exit code is the run's
    FOLLOWER = "follower"  # exit code 0 says that its part is done
    SERVICE = "service"  # should be there as long as the run is


class State(Enum):
    """Where a process is in its life."""

    WAITING = "waiting"  # for others, or for its next start
    STARTING = "starting"
    READY = "ready"
    SILENT = "silent"  # it has answered before, but no longer does
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Entry:
    """A process as the plan has it."""

    name: str
    """`inference`, `env/train/reverse`, `orchestrator`, `trainer`."""
    command: tuple[str, ...]
    log: Path
    role: Role = Role.SERVICE
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables on top of our own."""
    address: str = ""
    """Where it answers once it is ready (`http://...`, `tcp://...`); without, it is ready when it is there."""
    deadline: float = 600.0
    """Seconds until it has to answer."""
    hang_timeout: float | None = None
    """Seconds without an answer after which it is killed and started again; None leaves a silent process alone."""
    last_state: Callable[[], str] | None = None
    """Returns its last known state, for the log, when it does not answer."""
    prepare: Callable[[], None] | None = None
    """Done before each start."""
    loads: tuple[str, ...] = ()
    """Modules that are its first seconds; it may be forked from a process that has them."""


class Process:
    """One life. Start it once; stop it in any case."""

    def __init__(self, entry: Entry, *, patience: float = PATIENCE, nursery: Nursery | None = None) -> None:
        self.entry, self.patience, self.state, self.pid = entry, patience, State.STARTING, 0
        self.since = time.monotonic()
        self.silence: float | None = None
        """Seconds without an answer after which it was killed; None if it was not killed for that."""
        self._nursery = nursery
        self._line: socket.socket | None = None
        """To its leash, which lets it live for as long as this is open."""
        self._leash = 0
        self._handle: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        """The leash, unless it is the nursery's child."""
        self._log_start = 0

    async def start(self) -> None:
        """Start it. Raises StorageFull or StorageFailed if its log cannot be written."""
        entry = self.entry
        if entry.prepare is not None:
            entry.prepare()
        with wrap_storage_errors(entry.log):
            entry.log.parent.mkdir(parents=True, exist_ok=True)
            log = entry.log.open("ab")
        self._log_start = log.tell()
        with log:
            if self._nursery is not None and await self._born(self._nursery, log.fileno()):
                return
            with self._theirs() as line:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "ramify.launch.leash", str(self.patience), *entry.command],
                    stdin=line.fileno(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **entry.env},
                    start_new_session=True,
                )
        self._leash, self._handle = self._child.pid, os.pidfd_open(self._child.pid)
        await self._told(STARTING)  # where it ended at once, its exit says more

    async def _born(self, nursery: Nursery, log: int) -> bool:
        with self._theirs() as line:
            asked = nursery.ask(self.entry, self.patience, line, log)
        return asked and await self._told(LOADING)

    def _theirs(self) -> socket.socket:
        """The other end of a new line."""
        self._let_go()
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setblocking(False)
        return theirs

    def _let_go(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    async def _told(self, seconds: float) -> bool:
        """Whether a leash has told what it holds, and given a handle of itself."""
        assert self._line is not None
        try:
            await asyncio.wait_for(_readable(self._line.fileno()), seconds)
            said, handles, _, _ = socket.recv_fds(self._line, 64, 1)
        except (TimeoutError, OSError):
            return False
        if not said or not handles:
            return False
        self._leash, self.pid = map(int, said.split())
        if self._handle is not None:
            os.close(self._handle)
        self._handle = handles[0]
        return True

    async def ready(self) -> None:
        """Return when it answers. Raises DeadlineExceeded if it does not in time."""
        end = time.monotonic() + self.entry.deadline
        while self.entry.address and not await answers(self.entry.address):
            if time.monotonic() > end:
                said = f"{self.entry.name} did not answer at {self.entry.address} within {self.entry.deadline:g} s"
                raise DeadlineExceeded(f"{said}; the end of {self.entry.log}:\n{self.tail()}")
            await asyncio.sleep(POLL)
        self.state = State.READY

    async def ended(self) -> int:
        """Return its exit code when it is over."""
        assert self._handle is not None
        await _readable(self._handle)
        self.state = State.ENDED
        if self._child is not None:
            return self._child.wait()
        with contextlib.suppress(OSError):
            told = self._line.recv(64) if self._line is not None else b""
            return int(told or -signal.SIGKILL)  # a leash that was killed tells nothing
        return -signal.SIGKILL

    def signal(self, number: signal.Signals) -> None:
        """Tell it something."""
        if self.pid and self.state is not State.ENDED:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def kill(self) -> None:
        """Kill the process, and after KILLING seconds its leash, which may be stopped too; `ended` then returns."""
        self.signal(signal.SIGKILL)
        await asyncio.sleep(KILLING)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._leash, signal.SIGKILL)

    async def stop(self) -> None:
        """Let it go, and return when nothing of it is left."""
        self._let_go()
        if self._handle is None:
            return
        try:
            await asyncio.wait_for(self.ended(), self.patience + KILLING)
        except TimeoutError:  # the leash itself hangs
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._leash, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):  # what is stuck in the kernel is left to it
                await asyncio.wait_for(self.ended(), KILLING)
        finally:
            self.state = State.ENDED
            os.close(self._handle)
            self._handle = self._child = None

    def tail(self) -> str:
        """The end of what this life has written."""
        with contextlib.suppress(OSError), self.entry.log.open("rb") as log:
            log.seek(self._log_start)
            lines = deque(log, TAIL)
            return b"".join(lines).decode(errors="replace").strip() or "(nothing)"
        return "(no log)"


async def _readable(descriptor: int) -> None:
    """Return when there is something to read, or an end."""
    loop, there = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(descriptor)


def is_signal(code: int) -> bool:
    """Whether an exit code says that a signal ended the process."""
    return code < 0 or code > BY_SIGNAL


def how(code: int) -> str:
    """What an exit code says, in words."""
    if is_signal(code):
        number = -code if code < 0 else code - BY_SIGNAL
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit code {code}"
