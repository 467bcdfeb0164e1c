"""Rendezvous of a gang: the ranks of one trainer, on one or several machines, find each other within a deadline.

Rank 0 serves a key-value store, whose address all ranks are given. Each start of a gang has a token of its own, and a
rank of an earlier start may live on and connect to the store of a later one. Therefore a rank compares its token with
the store's before it joins, and the token is the prefix of every key that the ranks use afterwards.
"""

# pyright: reportPrivateImportUsage=false
# The stores are documented as part of torch.distributed, which does not list them in __all__.

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch.distributed as dist

from ramify.core.errors import ConfigInvalid, DeadlineExceeded, PeerLost, ProcessReplaced
from ramify.processes.wire.listener import open_listener, to_bind_error
from ramify.run.fencing.token import GANG_TOKEN_VARIABLE, FencingToken

RENDEZVOUS_TIMEOUT = 300.0  # seconds for all ranks to join, after the first one has imported torch
RECONNECT_INTERVAL = 0.2  # seconds between two looks at the store of an older gang
TOKEN_KEY = "ramify/gang"
MIN_WAIT = 0.001  # seconds; torch takes a timeout of 0 for none


@dataclass(frozen=True, slots=True)
class GangMember:
    """This process as one rank of a gang: who it is, and where rank 0 serves the store."""

    token: FencingToken
    rank: int
    world_size: int
    host: str
    port: int

    @classmethod
    def from_environment(cls) -> "GangMember | None":
        """Read the variables that a launcher sets; None for a process that is not part of a gang.

        Raises ConfigInvalid for a missing or malformed variable.
        """
        token = os.environ.get(GANG_TOKEN_VARIABLE)
        if token is None:
            return None
        try:
            return cls(
                FencingToken.parse(token),
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                host=os.environ["MASTER_ADDR"],
                port=int(os.environ["MASTER_PORT"]),
            )
        except (KeyError, ValueError) as error:
            needed = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            raise ConfigInvalid(f"{GANG_TOKEN_VARIABLE} is set, so {needed} are needed: {error}") from error

    @property
    def label(self) -> str:
        """The rank and its gang, for messages."""
        return f"rank {self.rank} of gang {self.token}"

    @property
    def address(self) -> str:
        """The address of the store."""
        return f"tcp://{self.host}:{self.port}"


def join_gang(member: GangMember, *, timeout: float = RENDEZVOUS_TIMEOUT) -> dist.Store:
    """Wait until all ranks have joined, and return the store of the gang for `dist.init_process_group`.

    Raises DeadlineExceeded with the missing ranks after `timeout` seconds, ProcessReplaced if a newer gang or another
    process has this rank's place, PortTaken if rank 0 cannot listen, PeerLost if it is gone.
    """
    rendezvous = _Rendezvous(member, timeout)
    try:
        store = rendezvous.serve() if member.rank == 0 else rendezvous.connect()
        return rendezvous.join(store)
    except dist.DistNetworkError as error:
        raise PeerLost(f"{member.label}: rank 0 at {member.address} is gone: {error}") from error


class _Rendezvous:
    def __init__(self, member: GangMember, timeout: float) -> None:
        self.member, self.timeout, self.deadline = member, timeout, time.monotonic() + timeout

    def serve(self) -> dist.TCPStore:
        """Serve the store of the gang at its address alone; torch would listen on every address of the machine."""
        member = self.member
        try:
            listener = open_listener(member.host, member.port)
        except OSError as error:
            raise to_bind_error(member.label, member.address, error.errno, str(error.strerror)) from error
        store = dist.TCPStore(
            member.host,
            member.port,
            is_master=True,
            timeout=self._remaining,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        store.set(TOKEN_KEY, str(member.token))
        return store

    def connect(self) -> dist.TCPStore:
        """Connect to the store of this gang. A store of an older gang may be in its place for a while."""
        member, reason = self.member, "missing ranks: 0, at least"
        while True:
            with contextlib.suppress(dist.DistError):  # rank 0 does not listen yet, or has just exited
                store = dist.TCPStore(member.host, member.port, timeout=self._remaining, wait_for_workers=False)
                token = FencingToken.parse(store.get(TOKEN_KEY).decode())
                if member.token == token:
                    return store
                if member.token < token:
                    problem = f"{member.label} may not join: gang {token} has replaced it at {member.address}"
                    raise ProcessReplaced(f"{problem}; this copy must exit")
                reason = f"the older gang {token} still has this address"
            if time.monotonic() >= self.deadline:
                raise self._to_error(reason)
            time.sleep(RECONNECT_INTERVAL)

    def join(self, store: dist.TCPStore) -> dist.Store:
        """Wait for all ranks of the gang."""
        member, gang = self.member, dist.PrefixStore(f"gang {self.member.token}", store)
        keys = [f"joined/{rank}" for rank in range(member.world_size)]
        if gang.add(keys[member.rank], 1) > 1:
            raise ProcessReplaced(f"{member.label} has already joined at {member.address}; this copy must exit")
        try:
            gang.wait(keys, self._remaining)
        except dist.DistStoreError:
            if missing := [str(rank) for rank, key in enumerate(keys) if not gang.check([key])]:
                raise self._to_error(f"missing ranks: {', '.join(missing)}") from None
        return gang

    @property
    def _remaining(self) -> timedelta:
        return timedelta(seconds=max(MIN_WAIT, self.deadline - time.monotonic()))

    def _to_error(self, reason: str) -> DeadlineExceeded:
        member = self.member
        waited = f"not all {member.world_size} ranks joined at {member.address} within {self.timeout:g} s"
        return DeadlineExceeded(f"{member.label}: {waited}; {reason}; look at the logs of these ranks and their nodes")


def find_interface(host: str) -> str | None:
    """Return the network interface through which this machine reaches `host`; None if there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # chooses a route and sends nothing
        local_address = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address.partition("%")[0] == local_address for address in addresses):
                return name
    return None
