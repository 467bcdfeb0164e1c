"""What a runtime can be told; importable without anything that runs."""

from pathlib import Path

from pydantic import Field

from ramify.config import Config


class RuntimeConfig(Config):
    """What every runtime can be told."""

    id: str = "local"
    keep: bool = False
    """Leave the box of a rollout where it is, to look into it."""
    max_output: int = Field(default=1 << 20, ge=0)
    """Bytes of a command's output, and of its errors, that are kept: the first half and the last."""
    env: dict[str, str] = {}
    """Variables that every program in the box sees."""


class LocalRuntimeConfig(RuntimeConfig):
    """Boxes on this machine."""

    root: Path | None = None
    """The directory boxes are made in; the system's temporary one unless given."""
    inherit: list[str] = ["PATH", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "SHELL", "VIRTUAL_ENV", "LD_LIBRARY_PATH"]
    """Variables of our own environment that programs see too; keys and tokens stay here."""
