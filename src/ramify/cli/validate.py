"""`ramify validate ID`: is every task sound? Found out without a model.

Each task is set up, its `validate` hook is run, and its gold replies, where it has some, are played through the chat
harness and scored. A task fails if anything raises, or if its gold replies earn nothing.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ramify.config import Config, parse
from ramify.rollout.config import TimeoutsConfig

if TYPE_CHECKING:
    from ramify.env import Task
    from ramify.rollout import Environment, Verdict

MOST = 10_000  # tasks that are looked at when nobody says how many: a taskset may have no end
SHORT = {"-n": "--num_tasks", "-c": "--concurrency"}
USAGE = """usage: ramify validate ID [-n TASKS] [-c CONCURRENCY] [@ FILE] [--key value]

  ID            a taskset: a built-in name, an entry point, a dotted path, or a .py file
  --taskset.KEY VALUE     a key of the taskset itself; likewise --runtime.KEY

Exit code 0 if every task is sound, 1 if one is not, 2 if the taskset cannot be loaded. All keys:
"""


class ValidateConfig(Config):
    """What is looked at."""

    taskset: dict[str, Any]
    runtime: dict[str, Any] = {"id": "local"}
    num_tasks: int | None = Field(default=None, ge=1)
    """The first so many tasks (-n); all of them unless given, up to 10,000."""
    concurrency: int = Field(default=16, ge=1)
    """Tasks at the same time (-c)."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds the gold replies of a task may take."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    seed: int = 0


def run(args: Sequence[str]) -> int:
    """Look at every task and print the report."""
    if "--help" in args or "-h" in args:
        print(USAGE)
    config = parse(ValidateConfig, _spelled_out(args), prog="ramify validate")
    from ramify.evals.plan import first_tasks  # the rest is loaded here, not for help
    from ramify.rollout import Environment, SourceConfig

    harness = {"id": "chat", "timeout": config.timeout}
    source = SourceConfig(taskset=config.taskset, runtime=config.runtime, harness=harness, timeouts=config.timeouts)
    env = Environment.load(source)
    tasks = first_tasks(env, config.num_tasks or MOST)
    verdicts = asyncio.run(_verdicts(env, tasks, config))
    _report(env, verdicts, capped=config.num_tasks is None and len(tasks) == MOST)
    return 1 if any(verdict.problem is not None for verdict in verdicts) else 0


async def _verdicts(env: "Environment", tasks: Sequence["Task"], config: ValidateConfig) -> list["Verdict"]:
    from ramify.gateway import Gateway
    from ramify.rollout import validate

    room = asyncio.Semaphore(config.concurrency)

    async def one(task: "Task") -> "Verdict":
        async with room:
            return await validate(env, task, gateway=gateway, seed=config.seed)

    async with Gateway() as gateway:
        return await asyncio.gather(*map(one, tasks))


def _report(env: "Environment", verdicts: Sequence["Verdict"], *, capped: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from ramify.cli.paper import Paper

    table = Table.grid(padding=(0, 2, 0, 0))
    for verdict in verdicts:
        state = Text("ok", "green") if verdict.problem is None else Text("failed", "red")
        earned = "no gold" if verdict.reward is None else f"gold {verdict.reward:.3g}"
        table.add_row(state, Text(verdict.task), Text(earned), f"{verdict.seconds:.2f} s", Text(verdict.problem or ""))
    failed = sum(verdict.problem is not None for verdict in verdicts)
    gold = sum(verdict.reward is not None for verdict in verdicts)
    console = Paper(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"{env.name}: {len(verdicts)} tasks, {len(verdicts) - failed} sound, {failed} failed; {gold} with gold replies"
        + (f" (the first {MOST} tasks; -n says otherwise)" if capped else "")
    )


def _spelled_out(args: Sequence[str]) -> list[str]:
    """The arguments with the taskset's id and the short flags as the keys they stand for."""
    named = [SHORT.get(arg, arg) for arg in args]
    return ["--taskset.id", *named] if named and not named[0].startswith(("-", "@")) else named
