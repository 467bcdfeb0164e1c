"""Configuration of the local runtime; importable without the runtime itself."""

from pathlib import Path
from typing import ClassVar

from ramify.env.runtime import RuntimeConfig


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
