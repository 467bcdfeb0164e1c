"""Several processes as one trainer: FSDP2, with gloo between CPUs and NCCL between GPUs.

Every rank holds a shard of each weight and runs its own packs; weights are gathered before a layer runs, gradients are
**summed** after it. They are summed, not averaged, because N_c already counts the entries of all ranks: the result does
not depend on the number of ranks. Ranks run collectives in every pack, so the loss of a rank is noticed within
`COLLECTIVE_TIMEOUT`. Ranks are started by torchrun, or by a launcher as a gang (`rendezvous`).
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ramify.core.errors import ConfigInvalid, RamifyError
from ramify.train.config import TrainerConfig
from ramify.train.policy import PolicyModel
from ramify.train.rendezvous import GangMember, find_interface, join_gang

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
