"""The cores, the memory and the GPUs that this process may use.

A container shows the cores and memory of its host, and a scheduler may pin a process to fewer cores. So the result is
the minimum of the hardware, the affinity of this process, and all its control groups up to the root.
"""

import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from ramify.core.errors import ConfigInvalid
from ramify.launch.launcher import ASSUMED_GPU_BYTES, ClusterNode
from ramify.processes.program import run_program
from ramify.rollout.envserver.config import count_available_cores

GIB = 1 << 30
HOST = "127.0.0.1"
QUERY_TIMEOUT = 10.0  # seconds
GPU_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
MIG_QUERY = ("nvidia-smi", "-L")
MIG_PATTERN = re.compile(r"MIG \d+g\.(\d+)gb\S*\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")
ASSUMED_CORES_PER_GPU = 8
ASSUMED_GPUS_PATTERN = re.compile(r"(\d+)x(\d+(?:\.\d+)?)")

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The limits of control groups: number of CPUs and bytes of memory; None without a limit."""

    cpus: float | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine, or a MIG device, by the name that selects it in CUDA_VISIBLE_DEVICES.

    `memory` is in bytes.
    """

    index: str
    memory: int
    uuid: str = ""


def list_visible_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use; none without a driver."""
    gpus, visible = parse_gpus(_query_driver(GPU_QUERY)), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    return select_gpus([*gpus, *(parse_mig_devices(_query_driver(MIG_QUERY)) if "MIG-" in visible else [])], visible)


def _query_driver(command: Sequence[str]) -> str:
    probe = run_program(command, timeout=QUERY_TIMEOUT)
    return probe.text if probe.ok else ""


def parse_gpus(text: str) -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists. One without memory of its own uses the machine's."""
    rows = [line.split(", ") for line in text.splitlines()]
    return [
        Gpu(index, int(memory) << 20 if memory.isdigit() else get_usable_memory(), uuid) for index, uuid, memory in rows
    ]


def parse_mig_devices(text: str) -> list[Gpu]:
    """Return the MIG devices that nvidia-smi lists; the profile, such as 1g.10gb, has the size."""
    return [Gpu(uuid, int(gigabytes) * GIB, uuid) for gigabytes, uuid in MIG_PATTERN.findall(text)]


def select_gpus(gpus: Sequence[Gpu], visible: str) -> list[Gpu]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES selects by index or by the first characters of a UUID.

    As in CUDA, an unknown name ends the list.
    """
    selected: list[Gpu] = []
    for name in (name.strip() for name in visible.split(",")):
        gpu = next((gpu for gpu in gpus if name == gpu.index or (name and gpu.uuid.startswith(name))), None)
        if gpu is None:
            break
        selected.append(replace(gpu, index=name))
    return selected


def uses_gpu(device: Device, num_gpus: float) -> bool:
    """Return whether a process with the setting `device` computes on a GPU, given the number of GPUs there are."""
    return device == "cuda" or (device == "auto" and num_gpus > 0)


def describe_machine(gpus: list[Gpu] | None = None) -> ClusterNode:
    """Return this machine as a cluster of one node; `gpus` are those that it has, if they are known."""
    gpus = list_visible_gpus() if gpus is None else gpus
    return ClusterNode(
        socket.gethostname(),
        HOST,
        num_cpus=count_usable_cores(),
        num_gpus=len(gpus),
        memory=get_usable_memory(),
        gpu_memory=min((gpu.memory for gpu in gpus), default=ASSUMED_GPU_BYTES),
        is_head=True,
        allows_sharing=True,
    )


def assume_machine(text: str) -> ClusterNode:
    """Return a machine like this one with other GPUs, for a dry run: `8x80` is eight GPUs of 80 GiB each.

    Its memory is unknown. Raises ConfigInvalid.
    """
    match = ASSUMED_GPUS_PATTERN.fullmatch(text)
    if match is None or not int(match[1]) or not float(match[2]):
        raise ConfigInvalid(f"expected COUNTxGIB, such as 8x80, got {text!r}", key="--assume-gpus")
    return ClusterNode(
        "assumed",
        HOST,
        num_cpus=max(count_usable_cores(), ASSUMED_CORES_PER_GPU * int(match[1])),
        num_gpus=int(match[1]),
        gpu_memory=int(float(match[2]) * GIB),
        is_head=True,
        allows_sharing=True,
        is_assumed=True,
    )


def count_usable_cores(limits: CgroupLimits | None = None) -> int:
    """Return the number of cores that this process may use."""
    limits = read_cgroup_limits() if limits is None else limits
    allowed = count_available_cores()
    return allowed if limits.cpus is None else min(allowed, max(1, int(limits.cpus)))


def get_usable_memory(limits: CgroupLimits | None = None) -> int:
    """Return the bytes of memory that this process and the others of its control group may use."""
    limits = read_cgroup_limits() if limits is None else limits
    total = psutil.virtual_memory().total
    return total if limits.memory is None else min(total, limits.memory)


def read_cgroup_limits(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> CgroupLimits:
    """Return the tightest limits of the control groups of this process, v1 or v2."""
    cpus: list[float] = []
    memory: list[int] = []
    for group in _iter_cgroups(cgroup_root, membership):
        quota, period = _read_words(group / "cpu.max") or ("max", "")
        if quota != "max":
            cpus.append(int(quota) / int(period))
        for word in _read_words(group / "memory.max") + _read_words(group / "memory.limit_in_bytes"):
            if word != "max":
                memory.append(int(word))
        v1_cpu = _read_words(group / "cpu.cfs_quota_us") + _read_words(group / "cpu.cfs_period_us")
        if len(v1_cpu) == 2 and int(v1_cpu[0]) > 0:
            cpus.append(int(v1_cpu[0]) / int(v1_cpu[1]))
    return CgroupLimits(min(cpus, default=None), min(memory, default=None))


def _iter_cgroups(cgroup_root: Path, membership: Path) -> Iterator[Path]:
    """Yield the control groups of this process and their ancestors, in each hierarchy."""
    for line in _read_text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        base = cgroup_root / controllers
        group = base / path.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(base))


def _read_words(path: Path) -> list[str]:
    return _read_text(path).split()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""  # the controller does not exist or is not readable: no known limit
