"""What containers enforce here: it depends on the engine, on its machine, and on the arguments of the configuration."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ramify.env.runtime import Capabilities, Capability
from ramify.rollout.runtime.config import ContainerRuntimeConfig
from ramify.rollout.runtime.container_engine import ContainerEngine, get_engine_info

ALLOWED_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
REMOVED_CALLS = ("socket", "socketcall", "io_uring_setup", "io_uring_enter", "io_uring_register")


def build_seccomp_profile(engine: ContainerEngine) -> str | None:
    """Return podman's profile as JSON, without the sockets that lead out of a container's network; else None.

    A socket of the family AF_VSOCK reaches the host of a virtual machine whatever network a container has. Docker
    refuses it from version 23 on; podman's own profile does not. io_uring and socketcall could open sockets that no
    filter sees.
    """
    path = Path(get_engine_info(engine).get("host", {}).get("security", {}).get("seccompProfilePath", ""))
    if engine.name != "podman" or not engine.is_local or not path.is_file():
        return None
    profile: dict[str, Any] = json.loads(path.read_text())
    rules: list[dict[str, Any]] = []
    for rule in profile["syscalls"]:
        names = [name for name in rule["names"] if name not in REMOVED_CALLS]
        if names:
            rules.append({**rule, "names": names})
    for family in ALLOWED_FAMILIES:
        condition = {"index": 0, "value": family, "valueTwo": 0, "op": "SCMP_CMP_EQ"}
        rules.append(
            {"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [condition], "includes": {}, "excludes": {}}
        )
    return json.dumps({**profile, "syscalls": rules})


SAFE_DOCKER_VERSION = 23
# Options of `run` that give a container nothing of the machine. Any other one withdraws the isolation.
HARMLESS_OPTIONS = frozenset(
    {"--runtime", "--ulimit", "--platform", "--arch", "--init", "--shm-size", "--tmpfs", "--cap-drop", "--read-only"}
    | {"--env", "--label", "--log-driver", "--stop-timeout", "--storage-opt", "--oom-score-adj", "--tls-verify"}
    | {"--authfile", "--cpuset-cpus", "--cpuset-mems", "--quiet"}
)
LIMIT_OPTIONS = {
    "--memory": Capability.MEMORY_LIMIT,
    "-m": Capability.MEMORY_LIMIT,
    "--memory-swap": Capability.MEMORY_LIMIT,
    "--pids-limit": Capability.PROCESS_LIMIT,
    "--cpus": Capability.CPU_LIMIT,
    "--cpu-quota": Capability.CPU_LIMIT,
    "--cpu-period": Capability.CPU_LIMIT,
}


def find_capabilities(engine: ContainerEngine, config: ContainerRuntimeConfig) -> Capabilities:
    """Return what containers of the engine enforce."""
    info = get_engine_info(engine)
    isolation_problem = _find_isolation_problem(engine, config, info)
    problems: dict[Capability, str | None] = {
        Capability.IMAGES: None,
        Capability.ISOLATION: isolation_problem,
        Capability.PRIVATE_NETWORK: isolation_problem or _find_network_problem(engine, config, info),
        Capability.DISK_LIMIT: f"{engine.name} does not limit files on most disks; use the runtime 'sandbox'",
        Capability.GATEWAY: find_gateway_problem(engine, config),
        **_find_limit_problems(engine, config, info),
    }
    reasons = {capability: problem for capability, problem in problems.items() if problem is not None}
    return Capabilities(frozenset(problems.keys() - reasons.keys()), reasons)


def find_gateway_problem(engine: ContainerEngine, config: ContainerRuntimeConfig) -> str | None:
    """Return why programs of a container cannot reach the gateway, None if they can."""
    if config.network != "none":
        return None if config.gateway_url else "set gateway_url to the gateway's address in the containers' network"
    if not engine.is_local:
        return f"a container on {engine.host} without a network has no way to it; set network and gateway_url"
    if os.geteuid() != 0 and not _is_rootless(get_engine_info(engine)):
        return f"only root may enter the networks of this {engine.name}; run as root or use a rootless engine"
    return None


def find_local_problem(engine: ContainerEngine, config: ContainerRuntimeConfig) -> str | None:
    """Return why the hosts or the paths of the configuration cannot be reached from containers, None if they can."""
    if config.allow_hosts and (problem := find_gateway_problem(engine, config)):
        return f"allow_hosts cannot be used: {problem}"
    if config.read_only and not engine.is_local:
        return f"read_only names paths of this machine, but the containers are on {engine.host}"
    return None


def get_option_names(engine_args: Sequence[str]) -> Iterator[str]:
    """Yield the names of the options in arguments, without their values."""
    for argument in engine_args:
        if argument.startswith("-"):
            yield argument.partition("=")[0]


def _find_isolation_problem(
    engine: ContainerEngine, config: ContainerRuntimeConfig, info: dict[str, Any]
) -> str | None:
    """Return why programs may reach more of the machine than their container, None if they cannot."""
    for option in get_option_names(config.engine_args):
        if option not in HARMLESS_OPTIONS and option not in LIMIT_OPTIONS:
            return f"engine_args set {option}, which may open the container; known to be harmless: " + ", ".join(
                sorted(HARMLESS_OPTIONS)
            )
    if config.network == "host" or ":" in config.network:
        return f"network is {config.network!r}, the network of the machine or of another program"
    if engine.name == "docker":
        options: list[str] = info.get("SecurityOptions") or []
        has_seccomp = any(option.startswith("name=seccomp") and "unconfined" not in option for option in options)
    else:
        has_seccomp = bool(info.get("host", {}).get("security", {}).get("seccompEnabled"))
    return None if has_seccomp else f"{engine.name} info reports that containers have no seccomp filter"


def _find_network_problem(engine: ContainerEngine, config: ContainerRuntimeConfig, info: dict[str, Any]) -> str | None:
    """Return why programs may reach more than the gateway, None if they cannot."""
    if config.network != "none":
        return f"network is {config.network!r}; set it to 'none'"
    if config.allow_hosts:
        return f"allow_hosts lets programs reach {', '.join(config.allow_hosts)}"
    if engine.name == "docker":
        major = str(info.get("ServerVersion", "")).split(".")[0]
        is_new = major.isdigit() and int(major) >= SAFE_DOCKER_VERSION
        return None if is_new else f"docker before {SAFE_DOCKER_VERSION} does not refuse sockets to the host (AF_VSOCK)"
    if not engine.is_local:
        return f"podman on {engine.host} does not refuse sockets to the host (AF_VSOCK)"
    security = info.get("host", {}).get("security", {})
    has_profile = security.get("seccompEnabled") and Path(security.get("seccompProfilePath", "")).is_file()
    return None if has_profile else "this podman has no seccomp profile"


def _find_limit_problems(
    engine: ContainerEngine, config: ContainerRuntimeConfig, info: dict[str, Any]
) -> dict[Capability, str | None]:
    """Return why each limit is not enforced, None if it is."""
    if engine.name == "docker":
        supported = [bool(info.get(key)) for key in ("MemoryLimit", "PidsLimit", "CpuCfsQuota")]
    else:
        controllers: list[str] = info.get("host", {}).get("cgroupControllers") or []
        supported = [name in controllers for name in ("memory", "pids", "cpu")]
    unsupported = f"{engine.name} info reports that it is not supported on its machine"
    problems = {
        capability: None if is_supported else unsupported
        for capability, is_supported in zip(
            (Capability.MEMORY_LIMIT, Capability.PROCESS_LIMIT, Capability.CPU_LIMIT), supported
        )
    }
    for option in get_option_names(config.engine_args):
        if option in LIMIT_OPTIONS:
            problems[LIMIT_OPTIONS[option]] = f"engine_args set {option}; set runtime.limits instead"
    return problems


def _is_rootless(info: dict[str, Any]) -> bool:
    security = info.get("host", {}).get("security", {})
    options: list[str] = info.get("SecurityOptions") or []
    return bool(security.get("rootless")) or any("rootless" in option for option in options)
