"""The files that an agent leaves for its rewards: only those that the task declares as `outputs`."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from ramify.core.errors import AgentFailed
from ramify.env import Runtime


async def collect_outputs(runtime: Runtime, outputs: Sequence[str], target: Path) -> dict[str, str]:
    """Copy the outputs from the agent's runtime into `target`; return those that are missing, with the reason.

    What an agent did not write, made too large or replaced by a link is missing: it is the agent's result.
    """
    missing: dict[str, str] = {}
    for path in outputs:
        try:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            await runtime.download(path, target / path)
        except (AgentFailed, OSError, ValueError) as error:
            missing[path] = f"{type(error).__name__}: {error}"
            _remove_incomplete_copy(target / path)
    return missing


def _remove_incomplete_copy(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
