"""Machines and slots for tests of launch plans."""

import tomllib
from typing import Any

from ramify.launch.launcher import ClusterNode, ProcessStart
from ramify.launch.local_launcher import LocalSlot
from ramify.launch.plan import LaunchPlan, build_plan, format_plan
from ramify.orchestrate.run_config import RunConfig
from ramify.processes.wire.listener import PortReservation

GIB = 1 << 30


def build_machine(num_gpus: int = 0, *, gpu_gib: float = 80, cores: int = 2, memory_gib: float = 64) -> ClusterNode:
    """Return a machine as the local launcher describes it."""
    return ClusterNode(
        "here",
        "127.0.0.1",
        cores,
        num_gpus,
        memory=int(memory_gib * GIB),
        gpu_memory=int(gpu_gib * GIB),
        is_head=True,
        allows_sharing=True,
    )


def plan_here(config: RunConfig, num_gpus: int = 0, *, gpu_gib: float = 80) -> LaunchPlan:
    """Plan a run for a machine with these GPUs."""
    return build_plan(config, [build_machine(num_gpus, gpu_gib=gpu_gib)])


def format_lines(plan: LaunchPlan) -> list[str]:
    """Return the plan as lines of text."""
    return format_plan(plan.config, plan.placement)


def open_place(plan: LaunchPlan, name: str, host: str = "127.0.0.1") -> tuple[LocalSlot, ProcessStart, dict[str, Any]]:
    """Give a process a slot; return it, what is started there, and its configuration."""
    spec = next(spec for spec in plan.process_specs if spec.name == name)
    slot = LocalSlot(host=host, reservation=PortReservation({name: f"tcp://{host}:0"}))
    start = spec.build_start(slot)
    (text,) = start.files.values()
    return slot, start, tomllib.loads(text)
