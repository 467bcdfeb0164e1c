"""The shell commands that a task runs in its runtime before the agent starts."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from ramify.core.errors import AgentFailed, EnvironmentFault
from ramify.env import Runtime

# The files that an agent leaves for its rewards: only those that the task declares as `outputs`.


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


MAX_REASON_CHARS = 1000


async def run_task_commands(runtime: Runtime, field: str, commands: Sequence[str], timeout: float) -> None:
    """Run command lines one after the other. Raises EnvironmentFault if one fails or takes `timeout` seconds.

    - `field`: the field of the task that has the commands, for the error.
    """
    for index, command in enumerate(commands):
        result = await runtime.run(command, timeout=timeout)
        if result.timed_out:
            raise EnvironmentFault(f"task.{field}[{index}] did not end in {timeout:g} s: {command}")
        if result.returncode:
            output = (result.stdout + result.stderr).decode("utf-8", "replace").strip()[-MAX_REASON_CHARS:]
            raise EnvironmentFault(f"task.{field}[{index}] exited with {result.returncode}: {command}\n{output}")
