"""Configuration of the runtimes; importable without the runtimes themselves."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from ramify.env.runtime import ResourceLimits, RuntimeConfig


class LocalRuntimeConfig(RuntimeConfig):
    """Configuration of the local runtime."""

    renamed_keys: ClassVar = {"root": "workdir_root", "inherit": "inherit_env"}

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


class SandboxRuntimeConfig(RuntimeConfig):
    """Configuration of the sandbox runtime.

    Its limits are on by default. A machine that cannot enforce one refuses the run: set the limit to `"None"` to
    run without it.
    """

    id: str = "sandbox"
    limits: ResourceLimits = ResourceLimits(memory_mb=2048, max_processes=512, disk_mb=1024)
    warm: int = Field(default=2, ge=0)
    read_only: list[str] = []
    """Directories and files of this machine that programs can read, such as the installation of an agent: `PATH`, or
    `PATH:PATH_IN_THE_SANDBOX`."""
    path: list[str] = []
    """Directories that are searched for programs before those of the system."""

    @field_validator("read_only")
    @classmethod
    def _read_only_paths_exist(cls, entries: list[str]) -> list[str]:
        for entry in entries:
            source, _, target = entry.partition(":")
            if not Path(source).exists():
                raise ValueError(f"{source} does not exist")
            if target and not Path(target).is_absolute():
                raise ValueError(f"{entry}: the path in the sandbox must be absolute")
        return entries

    @property
    def read_only_paths(self) -> dict[Path, Path]:
        """The paths in the sandbox by the absolute paths of this machine."""
        pairs = (entry.partition(":") for entry in self.read_only)
        return {Path(source).resolve(): Path(target or Path(source).absolute()) for source, _, target in pairs}
