"""Slots, leases and programs for tests of launchers, and a launcher whose nodes are in this process."""

import asyncio
import contextlib
import fcntl
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from ramify.core.errors import PeerLost
from ramify.launch.launcher import ClusterNode, Launcher, Place, PlacementRequest, ProcessSlot, ProcessStart
from ramify.launch.local_launcher import LocalLauncher, LocalSlot
from ramify.launch.remote_slot import ExchangeReply, ExchangeRequest, NodeProcess, RemoteSlot, RemoteSlotSettings
from ramify.processes.log import ProcessLog
from ramify.run.fencing.lease import LeaseTerms, RoleLeases, read_lease_clock
from ramify.run.fencing.token import FencingToken

PYTHON = (sys.executable, "-S", "-c")
TIMEOUT = 60.0  # seconds for one test


def build_placement(num_ranks: int = 1, **more) -> PlacementRequest:
    """Return a placement that puts all ranks on the first node."""
    return PlacementRequest(lambda nodes: [Place(nodes[0].name)] * num_ranks, **more)


PLACEMENT = build_placement(num_cpus=0.1)


def build_leases(num_ranks: int = 1, terms: LeaseTerms | None = None) -> RoleLeases:
    return RoleLeases("role", FencingToken(), terms or LeaseTerms(), num_ranks=num_ranks, now=read_lease_clock())


@contextlib.asynccontextmanager
async def open_slots(launcher: Launcher, num_ranks: int = 1, placement: PlacementRequest | None = PLACEMENT):
    """Open slots, and stop them at the end."""
    terms = placement.lease if placement is not None else None
    slots = await launcher.open_slots(build_leases(num_ranks, terms), placement, timeout=TIMEOUT)
    try:
        yield slots
    finally:
        await asyncio.gather(*(slot.stop() for slot in slots))


@contextlib.asynccontextmanager
async def open_slot(launcher: Launcher, placement: PlacementRequest | None = PLACEMENT) -> AsyncIterator[ProcessSlot]:
    async with open_slots(launcher, placement=placement) as (slot,):
        yield slot


async def start_code(slot: ProcessSlot, code: str, log: ProcessLog, **more) -> None:
    """Start a Python program in a slot."""
    await slot.start(ProcessStart((*PYTHON, code), **more), log)


async def wait_for_line(log: ProcessLog, line: str) -> None:
    """Wait until a program has printed a line."""
    while line not in log.tail(None).splitlines():
        await asyncio.sleep(0.01)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file. A pid would not do: it belongs to another node."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def daemon_code(lock: Path) -> str:
    """Return code that starts a daemon in its own session, which holds a lock and ignores SIGTERM."""
    daemon = (
        f"import fcntl, signal; signal.signal(15, signal.SIG_IGN); file = open({str(lock)!r}, 'a'); "
        "fcntl.flock(file, fcntl.LOCK_EX); print('locked', flush=True)\nwhile 1: signal.pause()"
    )
    return f"""
import signal, subprocess, sys
daemon = subprocess.Popen([sys.executable, "-S", "-c", {daemon!r}], start_new_session=True, stdout=subprocess.PIPE)
daemon.stdout.readline()
print("up", flush=True)
"""


# -- nodes in this process: calls between head and node can be lost, repeated and cut off ----------------------------

SETTINGS = RemoteSlotSettings(exchange_interval=0.05)


class LossyClient:
    """A connection to a node that loses every third reply and repeats every call; while `is_cut`, nothing passes."""

    def __init__(self, node_process: NodeProcess) -> None:
        self.node_process = node_process
        self.num_calls, self.replied_at = 0, 0.0
        self.is_cut = False

    async def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        while self.is_cut:
            await asyncio.sleep(0.01)
        self.num_calls += 1
        await self.node_process.exchange(request)
        reply = await self.node_process.exchange(request)
        if self.num_calls % 3 == 0:
            raise PeerLost("the reply is lost")
        self.replied_at = read_lease_clock()
        return reply

    async def close(self, *, is_reachable: bool) -> None:
        await self.node_process.close()


class InProcessLauncher:
    """Starts processes through `NodeProcess` objects of this process, in slots of a class."""

    can_lose_nodes = True

    def __init__(self, settings: RemoteSlotSettings = SETTINGS, *, slot_class: type[LocalSlot] = LocalSlot) -> None:
        self.settings, self.slot_class = settings, slot_class
        self.clients: list[LossyClient] = []

    def list_nodes(self) -> list[ClusterNode]:
        return LocalLauncher().list_nodes()

    def prepare(self, specs) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def open_slots(
        self, leases: RoleLeases, placement: PlacementRequest | None, *, timeout: float
    ) -> Sequence[ProcessSlot]:
        if placement is None:
            return await LocalLauncher().open_slots(leases, placement, timeout=timeout)
        slots = []
        for rank in range(leases.num_ranks):
            node_process = NodeProcess(
                placement.lease, node=f"node-{rank}", host="127.0.0.1", slot_class=self.slot_class
            )
            self.clients.append(LossyClient(node_process))
            slots.append(RemoteSlot(self.clients[-1], node_process.get_address(), leases, rank, self.settings))
        return slots
