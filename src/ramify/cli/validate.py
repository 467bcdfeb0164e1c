"""`ramify validate ID`: is every task sound? Found out without a model.

Each task is set up, its `validate` hook is run, and its gold replies are played through the chat harness and scored. A
task fails if anything raises, or if its gold replies earn nothing. A task without gold replies is checked in part: its
rewards run on an empty reply, and the report says so. A taskset without any reward fails.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ramify.config import Config, parse
from ramify.rollout.config import TimeoutsConfig

if TYPE_CHECKING:
    from rich.text import Text

    from ramify.env import Task
    from ramify.rollout import Environment, TaskValidation

MAX_TASKS = 10_000  # tasks that are looked at when nobody says how many: a taskset may have no end
SHORT_FLAGS = {"-n": "--num_tasks", "-c": "--concurrency"}
USAGE = """usage: ramify validate ID [-n TASKS] [-c CONCURRENCY] [@ FILE] [--key value]

  ID            a taskset: a built-in name, an entry point, a dotted path, or a .py file
  --taskset.KEY VALUE     a key of the taskset itself; likewise --runtime.KEY

A task is sound if its gold replies earn something. Without gold replies the rewards run on an empty reply, and the
task is checked in part. Exit code 0 if no task failed, 1 if one did or there is no reward at all, 2 if the taskset
cannot be loaded. All keys:
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


def run(argv: Sequence[str]) -> int:
    """Look at every task and print the report."""
    if "--help" in argv or "-h" in argv:
        print(USAGE)
    config = parse(ValidateConfig, _expand_arguments(argv), prog="ramify validate")
    from ramify.evals.plan import load_first_tasks  # the rest is loaded here, not for help
    from ramify.rollout import Environment, SourceConfig

    harness = {"id": "chat", "timeout": config.timeout}
    source = SourceConfig(taskset=config.taskset, runtime=config.runtime, harness=harness, timeouts=config.timeouts)
    env = Environment.load(source)
    tasks = load_first_tasks(env, config.num_tasks or MAX_TASKS)
    verdicts = asyncio.run(_validate_tasks(env, tasks, config))
    _print_report(env, verdicts, capped=config.num_tasks is None and len(tasks) == MAX_TASKS)
    return 1 if any(verdict.problem is not None for verdict in verdicts) or not env.has_rewards else 0


async def _validate_tasks(
    env: "Environment", tasks: Sequence["Task"], config: ValidateConfig
) -> list["TaskValidation"]:
    from ramify.gateway import Gateway
    from ramify.rollout import validate_task

    semaphore = asyncio.Semaphore(config.concurrency)

    async def validate_one(task: "Task") -> "TaskValidation":
        async with semaphore:
            return await validate_task(env, task, gateway=gateway, seed=config.seed)

    async with Gateway() as gateway:
        return await asyncio.gather(*map(validate_one, tasks))


def _print_report(env: "Environment", verdicts: Sequence["TaskValidation"], *, capped: bool) -> None:
    from ramify.cli.console import PipeConsole
    from ramify.env.decorators import MISSING_REWARD_ADVICE

    console = PipeConsole(highlight=False, soft_wrap=True)
    for line in _format_lines(verdicts):
        console.print(line)
    failed = sum(verdict.problem is not None for verdict in verdicts)
    gold = sum(verdict.has_gold and verdict.problem is None for verdict in verdicts)
    in_part = len(verdicts) - failed - gold
    if not env.has_rewards:
        console.print(f"{env.name} has no reward: no rollout can be scored, and rl refuses it; {MISSING_REWARD_ADVICE}")
        console.print(f"{env.name}: {len(verdicts)} tasks, {len(verdicts) - failed} without a problem, {failed} failed")
        return
    if in_part:
        console.print("checked in part: there are no gold replies, so the rewards ran on an empty reply; whether a")
        console.print(
            "right one earns anything was not checked. A `gold` method of the taskset gives the right replies."
        )
    if env.hooks.group_rewards:
        names = ", ".join(hook.name for hook in env.hooks.group_rewards)
        console.print(f"not checked: {names}, which compare the rollouts of a group")
    counts = f"{gold} sound, {in_part} checked in part, {failed} failed"
    capped_at = f" (the first {MAX_TASKS} tasks; -n says otherwise)" if capped else ""
    console.print(f"{env.name}: {len(verdicts)} tasks, {counts}{capped_at}")


def _format_lines(verdicts: Sequence["TaskValidation"]) -> Iterator["Text"]:
    """Yield one line for each task, and the further lines of its problem below it."""
    from rich.text import Text

    task_width = max((len(verdict.task) for verdict in verdicts), default=0)
    reward_width = max((len(_format_reward(verdict)) for verdict in verdicts), default=0)
    for verdict in verdicts:
        passed = ("ok", "green") if verdict.has_gold else ("partly", "yellow")
        word, style = passed if verdict.problem is None else ("failed", "red")
        first, *others = (verdict.problem or "").splitlines() or [""]
        reward = _format_reward(verdict)
        facts = f"  {verdict.task:<{task_width}}  {reward:<{reward_width}}  {verdict.seconds:.2f} s  {first}"
        yield Text.assemble((f"{word:<6}", style), facts.rstrip())
        for line in others:
            yield Text(f"        {line}")


def _format_reward(verdict: "TaskValidation") -> str:
    what = "gold" if verdict.has_gold else "no gold, an empty reply"
    return "" if verdict.reward is None else f"{what} {verdict.reward:.3g}"


def _expand_arguments(args: Sequence[str]) -> list[str]:
    """The arguments with the taskset's id and the short flags as the keys they stand for."""
    expanded = [SHORT_FLAGS.get(arg, arg) for arg in args]
    return ["--taskset.id", *expanded] if expanded and not expanded[0].startswith(("-", "@")) else expanded
