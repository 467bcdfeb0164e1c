"""Runs the installed `ramify` command."""

import os
import subprocess
import sys
from pathlib import Path

COMMAND = str(Path(sys.executable).parent / "ramify")


def ramify_command(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        [COMMAND, *args], capture_output=True, text=True, timeout=100, env=environment, stdin=subprocess.DEVNULL
    )
