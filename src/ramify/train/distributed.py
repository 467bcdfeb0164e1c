"""Several processes as one trainer: FSDP2, with gloo between CPUs and NCCL between GPUs.

Every rank holds a shard of each weight and runs its own packs; weights are gathered before a layer runs, gradients are
**summed** after it. They are summed, not averaged, because N_c already counts the entries of all ranks: the result does
not depend on the number of ranks. Ranks run collectives in every pack, so the loss of a rank is noticed within
`COLLECTIVE_TIMEOUT`. Ranks are started by torchrun, or by a launcher as a gang (`join_gang`).
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ramify.core.errors import ConfigInvalid, DeadlineExceeded, PeerLost, ProcessReplaced, RamifyError
from ramify.processes.wire.listener import open_listener, to_bind_error
from ramify.run.fencing.token import GANG_TOKEN_VARIABLE, FencingToken
from ramify.train.config import TrainerConfig
from ramify.train.policy_model import PolicyModel

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

    Rank 0 serves a key-value store. A rank of an earlier start of the gang may live on and connect to it, so a rank
    compares its token with the store's before it joins, and the token is the prefix of every key used afterwards.

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


COLLECTIVE_TIMEOUT = timedelta(minutes=10)
GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks of a trainer, and the collectives between them.

    If the trainer is one process, `world_size` is 1, and every collective returns at once.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files, prints, and reports to the orchestrator."""
        return self.rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    @contextlib.contextmanager
    def raise_together(self) -> Iterator[None]:
        """Raise a RamifyError of any rank on every rank."""
        raised: RamifyError | None = None
        try:
            yield
        except RamifyError as error:
            raised = error
        for error in self.all_gather(raised):
            if error is not None:
                raise error

    def call_on_first(self, function: Callable[[], T]) -> T:
        """Call the function on rank 0, and return its result or raise its RamifyError on every rank."""
        result: Any = None
        with self.raise_together():
            result = function() if self.is_first else None
        return self.broadcast(result)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.world_size > 1:
            dist.barrier()


@contextlib.contextmanager
def init_distributed(config: TrainerConfig) -> Iterator[Ranks]:
    """Join the process group of the trainer, if it has several ranks, and leave it at exit.

    Raises ConfigInvalid and, for a rank of a gang, what `join_gang` raises.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    use_cuda = torch.cuda.is_available() if config.device == "auto" else config.device == "cuda"
    if use_cuda and not torch.cuda.is_available():
        raise ConfigInvalid("torch sees no GPU on this machine; use 'cpu' or 'auto'", key="trainer.device")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Ranks(torch.device("cuda" if use_cuda else "cpu"))
        return
    device = torch.device("cpu")
    if use_cuda:  # a rank may see all GPUs of its machine, or only its own
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    _init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
    try:
        yield Ranks(device, dist.get_rank(), world_size)
    finally:
        dist.destroy_process_group()


def _init_process_group(backend: str) -> None:
    """Join the gang that the environment names or, without one, the ranks of torchrun."""
    member = GangMember.from_environment()
    if member is None:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        return
    store = join_gang(member)
    if GLOO_INTERFACE_VARIABLE not in os.environ and (interface := find_interface(member.host)) is not None:
        os.environ[GLOO_INTERFACE_VARIABLE] = interface  # gloo would look up the host name, which need not resolve
    dist.init_process_group(
        backend, store=store, rank=member.rank, world_size=member.world_size, timeout=COLLECTIVE_TIMEOUT
    )


def apply_fsdp(policy: PolicyModel, ranks: Ranks, dtype: torch.dtype) -> None:
    """Shard the policy's weights over the ranks, layer by layer and in place; master weights stay float32."""
    mesh = dist.device_mesh.init_device_mesh(ranks.device.type, (ranks.world_size,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in policy.layers:
        fully_shard(layer.float(), mesh=mesh, mp_policy=precision)
    for parameter in policy.parameters():
        if parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded. A collective: every rank must call it."""
    full_tensor: Any = getattr(tensor, "full_tensor", None)
    return full_tensor() if full_tensor is not None else tensor
