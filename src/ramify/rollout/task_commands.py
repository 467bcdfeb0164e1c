"""The shell commands that a task runs in its runtime before the agent starts."""

from collections.abc import Sequence

from ramify.core.errors import EnvironmentFault
from ramify.env import Runtime

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
