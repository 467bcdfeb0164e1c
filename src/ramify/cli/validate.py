"""`ramify validate ID`: check every task of a taskset, without a model.

Each task is set up, its `validate` hook is run, and its gold replies are played through the chat harness and scored. A
task fails if anything raises, or if the reward of its gold replies is not above 0. A task without gold replies is
checked in part: its rewards run on an empty reply. A taskset without any reward fails.
"""

import asyncio
from collections.abc import Iterator, Sequence

from rich.text import Text

from ramify.cli.arguments import ConfigCall
from ramify.core.console import PipeConsole
from ramify.core.hub import print_to_stderr
from ramify.core.names import format_count
from ramify.env import Task
from ramify.env.data_selection import fetch_dataset_of
from ramify.env.decorators import MISSING_REWARD_ADVICE
from ramify.infer.gateway import Gateway
from ramify.processes.interpreter import find_other_interpreter, run_command_in
from ramify.rollout import Environment, SourceConfig, TaskValidation, validate_task
from ramify.rollout.evals.config import ValidateConfig
from ramify.rollout.evals.plan import load_first_tasks

MAX_TASKS = 10_000  # default limit: a taskset may be infinite
MAX_LISTED_FAILURES = 100


def run(call: ConfigCall[ValidateConfig]) -> int:
    """Check the tasks and print the report."""
    config = call.config
    if (python := find_other_interpreter(config.python)) is not None:
        run_command_in(python, "validate", call.argv)
    harness = {"id": "chat", "timeout": config.timeout}
    source = SourceConfig(taskset=config.taskset, runtime=config.runtime, harness=harness, timeouts=config.timeouts)
    fetch_dataset_of(config.taskset, print_to_stderr)
    env = Environment.load(source)
    tasks = load_first_tasks(env, config.num_tasks or MAX_TASKS)
    results = asyncio.run(_validate_tasks(env, tasks, config))
    _print_report(env, results, capped=config.num_tasks is None and len(tasks) == MAX_TASKS)
    return 1 if any(result.problem is not None for result in results) or not env.has_rewards else 0


async def _validate_tasks(env: Environment, tasks: Sequence[Task], config: ValidateConfig) -> list[TaskValidation]:
    semaphore = asyncio.Semaphore(config.concurrency)

    async def validate_one(task: Task) -> TaskValidation:
        async with semaphore:
            return await validate_task(env, task, gateway=gateway, seed=config.seed)

    async with Gateway() as gateway:
        return await asyncio.gather(*map(validate_one, tasks))


def _print_report(env: Environment, results: Sequence[TaskValidation], *, capped: bool) -> None:
    console = PipeConsole(soft_wrap=True)
    failures = [result for result in results if result.problem is not None]
    for line in _format_failures(failures):
        console.print(line)
    failed = len(failures)
    valid = sum(result.has_gold and result.problem is None for result in results)
    in_part, num_tasks = len(results) - failed - valid, format_count(len(results), "task")
    if not env.has_rewards:
        console.print(f"{env.name} has no reward: no rollout can be scored, and rl refuses it; {MISSING_REWARD_ADVICE}")
        console.print(f"{env.name}: {num_tasks}, {len(results) - failed} without a problem, {failed} failed")
        return
    if in_part:
        console.print(
            "checked in part: there are no gold replies, so the rewards ran on an empty reply. Whether a right"
        )
        console.print(
            "reply has a reward was not checked; add a `gold` method to the taskset that returns right replies."
        )
    if env.hooks.group_rewards:
        names = ", ".join(hook.name for hook in env.hooks.group_rewards)
        console.print(f"not checked: {names}, which compare the rollouts of a group")
    counts = f"{valid} valid, {in_part} checked in part, {failed} failed"
    capped_at = f" (first {MAX_TASKS} tasks; change with -n)" if capped else ""
    console.print(f"{env.name}: {num_tasks}, {counts}{capped_at}")


def _format_failures(failures: Sequence[TaskValidation]) -> Iterator[Text]:
    """Yield one line for each task that failed, and the further lines of its problem below it."""
    task_width = max((len(result.task) for result in failures), default=0)
    for result in failures[:MAX_LISTED_FAILURES]:
        first, *others = (result.problem or "").splitlines() or [""]
        yield Text.assemble(
            ("failed", "red"), f"  {result.task:<{task_width}}  {result.seconds:.2f} s  {first}".rstrip()
        )
        for line in others:
            yield Text(f"        {line}")
    if len(failures) > MAX_LISTED_FAILURES:
        yield Text(f"and {len(failures) - MAX_LISTED_FAILURES} more failed", style="red")
