"""Configuration of runtimes; importable without the runtimes themselves."""

from pathlib import Path

from pydantic import Field

from ramify.config import Config


class RuntimeConfig(Config):
    """Configuration common to all runtimes."""

    id: str = "local"
    """The id that selects the runtime; see `ramify.env.plugin`."""
    keep: bool = False
    """Keep the files of a rollout after it ends, for inspection."""
    max_output: int = Field(default=1 << 20, ge=0)
    """Bytes kept of a command's standard output, and of its standard error: the first and the last half of that."""
    env: dict[str, str] = {}
    """Environment variables for every program."""


class LocalRuntimeConfig(RuntimeConfig):
    """Configuration of the local runtime."""

    root: Path | None = None
    """The parent of all work directories; by default the system's temporary directory."""
    inherit: list[str] = ["PATH", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "SHELL", "VIRTUAL_ENV", "LD_LIBRARY_PATH"]
    """Environment variables that programs inherit from this process. Others, such as API keys, are not passed on."""
