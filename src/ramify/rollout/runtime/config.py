"""Configuration of the runtimes; importable without the runtimes themselves."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from pydantic import Field, field_validator, model_validator

import ramify
from ramify.env.runtime import ResourceLimits, RuntimeConfig

RESERVED_LABEL_PREFIX = "ramify."


class LocalRuntimeConfig(RuntimeConfig):
    """Configuration of the local runtime."""

    workdir_root: Path | None = None
    """The parent of all work directories; by default the system's temporary directory."""
    inherit_env: list[str] = [
        "PATH",
        "LANG",
        "LC_ALL",
        "TZ",
        "USER",
        "LOGNAME",
        "SHELL",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
    ]
    """Environment variables that programs inherit from this process. Others, such as API keys, are not passed on."""


class ReadOnlyPathsConfig(RuntimeConfig):
    """Configuration of a runtime whose programs can read paths of this machine."""

    read_only: list[str] = []
    """Directories and files of this machine that programs can read, such as the installation of an agent: `PATH`, or
    `PATH:PATH_IN_THE_SANDBOX`."""
    prepend_path: list[str] = []
    """Directories to search for programs before the system's, such as `/opt/agent/bin`."""

    @field_validator("read_only")
    @classmethod
    def _read_only_paths_exist(cls, entries: list[str]) -> list[str]:
        for entry in entries:
            source, _, target = entry.partition(":")
            if not Path(source).exists():
                raise ValueError(f"{source} does not exist")
            if target and not Path(target).is_absolute():
                raise ValueError(f"{entry}: the path in the sandbox must be absolute")
        targets = [entry.partition(":")[2] or entry for entry in entries]
        for target in targets:
            if targets.count(target) > 1:
                raise ValueError(f"the sandbox would have {target} twice")
        return entries

    @property
    def read_only_paths(self) -> list[tuple[Path, Path]]:
        """The absolute paths of this machine, each with its path in the sandbox."""
        pairs = (entry.partition(":") for entry in self.read_only)
        return [(Path(source).resolve(), Path(target or Path(source).absolute())) for source, _, target in pairs]


def find_package_paths(bound: Iterable[tuple[Path, Path]]) -> list[str]:
    """Return where a sandbox would see the package `ramify`, which is hidden: it has tasks and their answers.

    `bound`: directories of this machine, each with its path in the sandbox.
    """
    package = Path(ramify.__file__).parent.resolve()
    sources = [(source.resolve(), target) for source, target in bound]
    return [str(target / package.relative_to(source)) for source, target in sources if package.is_relative_to(source)]


class SandboxRuntimeConfig(ReadOnlyPathsConfig):
    """Configuration of the sandbox runtime.

    Its limits are on by default. A machine that cannot enforce one refuses the run: set the limit to `"None"` to
    run without it.
    """

    id: str = "sandbox"
    limits: ResourceLimits = ResourceLimits(memory_mb=2048, max_processes=512, disk_mb=1024)
    num_prepared: int = Field(default=2, ge=0)
    fallback: Literal["local"] | None = None
    """The runtime that is used on a machine where a sandbox does not work. None: the run is refused there."""


PYTHON_NAME = re.compile(r"python[0-9.]*")


@dataclass(frozen=True, slots=True)
class PreloadConfig:
    """The packages that the template of forked sandboxes imports, and the Python that imports them.

    - `python`: the program and its options, without the script.
    - `modules`: the names of the packages.
    - `env`: variables of that Python.
    """

    python: tuple[str, ...]
    modules: tuple[str, ...]
    env: Mapping[str, str]

    @classmethod
    def from_command(cls, command: Sequence[str], modules: Sequence[str], env: Mapping[str, str]) -> "PreloadConfig":
        """Return the configuration for an agent's command line and environment variables.

        Raises ValueError if the command is not a script or a module of Python.
        """
        num_options = next((i for i, text in enumerate(command[1:]) if text == "-m" or text[:1] != "-"), None)
        python = tuple(command[: 1 + (num_options or 0)])
        is_python = PYTHON_NAME.fullmatch(PurePath(command[0]).name) is not None
        if not is_python or num_options is None or "-c" in python or "-" in python:
            raise ValueError('preload needs a command such as ["python3", "agent.py"] or ["python3", "-m", "agent"]')
        python_env = {name: value for name, value in env.items() if name.startswith("PYTHON")}
        if any("{" in text for text in (*python, *python_env.values())):
            raise ValueError("with preload, Python, its options and its PYTHON... variables are the same for all tasks")
        return cls(python, tuple(modules), python_env)


class ContainerRuntimeConfig(ReadOnlyPathsConfig):
    """Configuration of the container runtime.

    Its limits are on by default. An engine that cannot enforce one refuses the run: set the limit to `"None"` to run
    without it.
    """

    id: str = "container"
    limits: ResourceLimits = ResourceLimits(memory_mb=4096, max_processes=512)
    image: str = "python:3.12-slim"
    """The image of tasks that name none."""
    workdir: str = "/sandbox/work"
    """The work directory. A task's `workdir` is relative to it, or absolute."""
    engine: Literal["auto", "docker", "podman"] = "auto"
    """The program that runs containers. "auto": the first of docker and podman that is installed."""
    engine_args: list[str] = []
    """Further arguments of `docker run` or `podman run`, such as `["--runtime", "runc"]`."""
    engine_host: str | None = None
    """The machine that runs the containers, such as `"ssh://user@machine"`. None: this one."""
    network: str = "none"
    """The network of the containers. "none": programs reach the gateway of their rollout and nothing else."""
    gateway_url: str | None = None
    """The address at which containers reach the gateway, if `network` or `engine_host` is set; its path is not used."""
    allow_hosts: list[str] = []
    """Hosts that programs can reach although `network` is "none", by HTTP and HTTPS: names or patterns such as
    `"*.example.org"`, each for the ports 80 and 443, or with a port such as `"example.org:8443"`."""
    pull: Literal["missing", "never", "always"] = "missing"
    """When images are fetched."""
    user: str | None = None
    """The user that programs run as. None: the user of the image."""
    labels: dict[str, str] = {}
    """Labels of the containers in the engine, such as `{ team = "agents" }`."""
    max_starts_per_second: float | None = Field(default=None, gt=0)
    """Most containers that the processes of this user on this machine start per second. None: no limit."""

    @field_validator("labels")
    @classmethod
    def _labels_have_names_of_their_own(cls, labels: dict[str, str]) -> dict[str, str]:
        for name in labels:
            if not name or "=" in name or name.startswith(RESERVED_LABEL_PREFIX):
                raise ValueError(
                    f"{name!r} cannot be a label: it is empty, has `=`, or begins with {RESERVED_LABEL_PREFIX}"
                )
        return labels

    @field_validator("allow_hosts")
    @classmethod
    def _hosts_are_names_with_ports(cls, hosts: list[str]) -> list[str]:
        for entry in hosts:
            name, colon, port = entry.partition(":")
            if not name or "/" in entry or (colon and not port.isdecimal()):
                raise ValueError(f"{entry!r} is not a host: expected a name such as example.org or example.org:8443")
        return hosts

    @model_validator(mode="after")
    def _allowed_hosts_require_no_network(self) -> "ContainerRuntimeConfig":
        if self.allow_hosts and self.network != "none":
            raise ValueError(
                f"allow_hosts needs network = 'none', found {self.network!r}, in which programs can reach other hosts"
            )
        return self


class HostedRuntimeConfig(RuntimeConfig):
    """Configuration of the hosted runtime: sandboxes of Prime Intellect. The API key is read from `PRIME_API_KEY`."""

    id: str = "hosted"
    limits: ResourceLimits = ResourceLimits(memory_mb=2048, disk_mb=5120, cpus=1)
    image: str = "python:3.12-slim"
    """The image of tasks that name none."""
    workdir: str = "/sandbox/work"
    """The work directory. A task's `workdir` is relative to it, or absolute."""
    gateway_url: str | None = None
    """The public address of the gateway, such as a tunnel's; its path is not used."""
    lifetime: float = Field(default=3600.0, ge=60, le=86400)
    """Seconds after which the provider ends a sandbox that was not stopped."""
    start_timeout: float = Field(default=600.0, gt=0)
    """Seconds for a sandbox to start."""
    allow_hosts: list[str] | None = None
    """The only hosts that programs can reach. None: no restriction."""
