"""Several processes as one trainer: FSDP2 under torchrun, gloo between CPUs, NCCL between GPUs.

Every rank holds a share of each weight and runs its own packs; weights are gathered when a layer is entered, gradients
are **summed** when it is left. Summed, not averaged: N_c already counts all ranks, so one rank and many do the same.
Ranks meet in every pack and in every collective below, so a rank that is gone is noticed within `DEADLINE`.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ramify.errors import ConfigInvalid, RamifyError
from ramify.train.config import TrainerConfig
from ramify.train.metrics import MetricSums
from ramify.train.policy import PolicyModel

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # for one collective


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others; alone where torchrun did not start it."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes, prints and speaks."""
        return self.rank == 0

    def merge_metric_sums(self, sums: MetricSums) -> MetricSums:
        """The sums of all ranks together."""
        return MetricSums.merge(self.all_gather(sums)) if self.world_size > 1 else sums

    def all_gather(self, value: Any) -> list[Any]:
        """What every rank says here, in their order."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value)
        return found

    def broadcast(self, value: Any) -> Any:
        """What the first rank says here."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    @contextlib.contextmanager
    def raise_together(self) -> Iterator[None]:
        """What fails by name on one rank fails on all, by the same name."""
        problem: RamifyError | None = None
        try:
            yield
        except RamifyError as error:
            problem = error
        for said in self.all_gather(problem):
            if said is not None:
                raise said

    def barrier(self) -> None:
        """Until all are here."""
        if self.world_size > 1:
            dist.barrier()


@contextlib.contextmanager
def init_distributed(config: TrainerConfig) -> Iterator[Ranks]:
    """Meet the other ranks that torchrun started, and part from them in the end."""
    if config.threads:
        torch.set_num_threads(config.threads)
    cuda = torch.cuda.is_available() if config.device == "auto" else config.device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise ConfigInvalid("trainer.device: torch sees no GPU here; use 'cpu', or 'auto' for what there is")
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks(torch.device("cuda" if cuda else "cpu"))
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        yield Ranks(device, dist.get_rank(), size)
    finally:
        dist.destroy_process_group()


def apply_fsdp(policy: PolicyModel, ranks: Ranks, dtype: torch.dtype) -> None:
    """Spread the policy's weights over the ranks, layer by layer, in place; masters stay float32."""
    mesh = dist.device_mesh.init_device_mesh(ranks.device.type, (ranks.world_size,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor that may be spread over ranks; every rank must ask."""
    full: Any = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor
