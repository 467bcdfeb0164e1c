"""The Docker or podman command line: how it is called, what it can do here, and the containers that it keeps."""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ramify.config.schema import is_dict
from ramify.env.runtime import Capabilities, Capability, ResourceLimits
from ramify.errors import SandboxError
from ramify.runtime.config import ContainerRuntimeConfig
from ramify.runtime.owner import is_owner_alive

NAME_PREFIX = "ramify-"
SAFE_DOCKER_VERSION = 23
MACHINE_LABEL = "ramify.machine"
INFO_TIMEOUT = 60.0  # seconds for the engine to describe itself
COMMAND_TIMEOUT = 60.0  # seconds for a command that neither starts a container nor fetches an image
# When memory runs out, podman's monitor writes a file `oom` where its container was started; here it cannot.
ENGINE_CWD = "/proc" if Path("/proc").is_dir() else "/"
HOST_VARIABLES = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}


@dataclass(frozen=True, slots=True)
class EngineResult:
    """What a command of the engine returned."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """An installed engine: its name, its program with the arguments of every command, and where it runs containers."""

    name: str
    command: tuple[str, ...]
    host: str | None

    @property
    def is_local(self) -> bool:
        """Whether containers run on this machine."""
        return self.host is None or self.host.startswith("unix:")

    async def run(self, *args: str, timeout: float = COMMAND_TIMEOUT) -> EngineResult:
        """Run a command of the engine. Raises SandboxError if it does not end in time."""
        process = await asyncio.create_subprocess_exec(
            *self.command,
            *args,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ENGINE_CWD,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout):
                stdout, stderr = await process.communicate()
        except TimeoutError as error:
            raise SandboxError(f"{self.name} {args[0]} did not end in {timeout:g} s") from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        return EngineResult(
            process.returncode or 0, stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace")
        )

    def run_blocking(self, *args: str, timeout: float = COMMAND_TIMEOUT) -> EngineResult:
        """Run a command of the engine without an event loop. Raises SandboxError if it fails or does not end."""
        try:
            result = subprocess.run(
                [*self.command, *args], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{self.name} {args[0]} failed: {error}") from error
        if result.returncode:
            raise SandboxError(f"{self.name} {args[0]} failed: {result.stderr.strip()[-500:]}")
        return EngineResult(0, result.stdout, result.stderr)


def find_engine(config: ContainerRuntimeConfig) -> ContainerEngine | None:
    """Return the engine that the configuration selects, None if it is not installed."""
    for name in ("docker", "podman") if config.engine == "auto" else (config.engine,):
        program = shutil.which(name)
        if program is not None:
            option = ("--host",) if name == "docker" else ("--url",)
            command = (program, *option, config.host) if config.host is not None else (program,)
            return ContainerEngine(name, command, config.host or os.environ.get(HOST_VARIABLES[name]))
    return None


@cache
def find_unsupported_reason(engine: ContainerEngine | None, wanted: str) -> str | None:
    """Return why containers cannot be run here, None if they can. The result is cached."""
    if engine is None:
        name = "docker or podman" if wanted == "auto" else wanted
        return f"{name} is not installed, or not in PATH"
    try:
        get_engine_info(engine)
    except SandboxError as error:
        return error.message
    return None


@cache
def get_engine_info(engine: ContainerEngine) -> dict[str, Any]:
    """Return what the engine says about itself. Raises SandboxError if it does not answer."""
    info = json.loads(engine.run_blocking("info", "--format", "{{json .}}", timeout=INFO_TIMEOUT).stdout)
    if not is_dict(info) or info.get("ServerErrors"):
        raise SandboxError(f"{engine.name} info: {info}")
    return info


def find_capabilities(engine: ContainerEngine, config: ContainerRuntimeConfig) -> Capabilities:
    """Return what containers of the engine enforce."""
    info = get_engine_info(engine)
    available = {Capability.WALLS, Capability.IMAGES}
    reasons = {Capability.DISK_LIMIT: f"{engine.name} does not limit files on most disks; use the runtime 'sandbox'"}
    if reason := _find_network_problem(engine, config, info):
        reasons[Capability.PRIVATE_NETWORK] = reason
    else:
        available.add(Capability.PRIVATE_NETWORK)
    for capability, is_supported in _find_limits(engine, info).items():
        if is_supported:
            available.add(capability)
        else:
            reasons[capability] = f"{engine.name} info reports that it is not supported on its machine"
    if reason := find_gateway_problem(engine, config):
        reasons[Capability.GATEWAY] = reason
    else:
        available.add(Capability.GATEWAY)
    return Capabilities(frozenset(available), reasons)


def find_gateway_problem(engine: ContainerEngine, config: ContainerRuntimeConfig) -> str | None:
    """Return why programs of a container cannot reach the gateway, None if they can."""
    if config.network != "none":
        return None if config.gateway_url else "set gateway_url to the gateway's address in the containers' network"
    if not engine.is_local:
        return f"a container on {engine.host} without a network has no way to it; set network and gateway_url"
    if os.geteuid() != 0 and not _is_rootless(get_engine_info(engine)):
        return f"only root may enter the networks of this {engine.name}; run as root or use a rootless engine"
    return None


def build_limit_options(limits: ResourceLimits) -> list[str]:
    """Return the options of `run` for limits."""
    options: list[str] = []
    if limits.memory_mb is not None:
        options += ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
    if limits.max_processes is not None:
        options += ["--pids-limit", str(limits.max_processes)]
    if limits.cpus is not None:
        options += ["--cpus", f"{limits.cpus:g}"]
    return options


def remove_abandoned_containers(engine: ContainerEngine) -> list[str]:
    """Remove the containers of processes of this machine that have ended; return their names."""
    machine = f"label={MACHINE_LABEL}={get_machine_id()}"
    listing = engine.run_blocking("ps", "--all", "--filter", machine, "--format", "{{.Names}}").stdout
    removed: list[str] = []
    for name in listing.split():
        if not is_owner_alive(name.removeprefix(NAME_PREFIX)):
            engine.run_blocking("rm", "--force", "--volumes", name)
            removed.append(name)
    return removed


def get_machine_id() -> str:
    """Return an id of this machine, or of the container that this process runs in: process ids are unique in it."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/etc/machine-id").read_text())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _find_network_problem(engine: ContainerEngine, config: ContainerRuntimeConfig, info: dict[str, Any]) -> str | None:
    """Return why programs may reach more than the gateway, None if they cannot."""
    if config.network != "none":
        return f"network is {config.network!r}; set it to 'none'"
    if any("seccomp" in argument for argument in config.engine_args):
        return "engine_args replace the seccomp profile, which refuses sockets to the host"
    if engine.name == "docker":
        major = str(info.get("ServerVersion", "")).split(".")[0]
        is_new = major.isdigit() and int(major) >= SAFE_DOCKER_VERSION
        return None if is_new else f"docker before {SAFE_DOCKER_VERSION} does not refuse sockets to the host (AF_VSOCK)"
    if not engine.is_local:
        return f"podman on {engine.host} does not refuse sockets to the host (AF_VSOCK)"
    security = info.get("host", {}).get("security", {})
    has_profile = security.get("seccompEnabled") and Path(security.get("seccompProfilePath", "")).is_file()
    return None if has_profile else "this podman has no seccomp profile"


def _find_limits(engine: ContainerEngine, info: dict[str, Any]) -> dict[Capability, bool]:
    if engine.name == "docker":
        keys = ("MemoryLimit", "PidsLimit", "CpuCfsQuota")
        supported = [bool(info.get(key)) for key in keys]
    else:
        controllers: list[str] = info.get("host", {}).get("cgroupControllers") or []
        supported = [name in controllers for name in ("memory", "pids", "cpu")]
    return dict(zip((Capability.MEMORY_LIMIT, Capability.PROCESS_LIMIT, Capability.CPU_LIMIT), supported))


def _is_rootless(info: dict[str, Any]) -> bool:
    security = info.get("host", {}).get("security", {})
    options: list[str] = info.get("SecurityOptions") or []
    return bool(security.get("rootless")) or any("rootless" in option for option in options)
