"""Rescoring of saved rollouts with the current reward code. Nothing is sampled, and the run is not changed."""

import asyncio
import random
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ramify.core.config import CONFIG_FILE, read_stored_config
from ramify.core.errors import ConfigInvalid, EnvironmentFault, Failure
from ramify.env import RolloutContext, Task
from ramify.env.judges.cache import set_cache_directory
from ramify.rollout import Environment, score_group, score_trace
from ramify.rollout.evals.config import EvalConfig
from ramify.rollout.rewards import SCORING_STATE_KEY, build_unscored_rewards, load_state
from ramify.run.store import RolloutRecord, RunStore
from ramify.trace import Trace


@dataclass(frozen=True, slots=True)
class RescoredRollout:
    """The stored and the new reward of a rollout; `failure` says why it could not be scored."""

    id: str
    old_reward: float | None
    new_reward: float | None
    failure: str | None = None


def load_environment(store: RunStore) -> Environment:
    """Return the run's environment, with its current code."""
    path = store.path / CONFIG_FILE
    if not path.is_file() or "taskset" not in tomllib.loads(path.read_text("utf-8")):
        raise ConfigInvalid(f"{store.path} is not an eval run; replay works on eval runs only")
    return Environment.load(read_stored_config(EvalConfig, path).source)


async def rescore(store: RunStore, environment: Environment) -> AsyncIterator[RescoredRollout]:
    """Score every rollout without a system failure again, and yield the results task by task."""
    groups: dict[str, list[RolloutRecord]] = {}
    for row in store.rollouts(source=""):
        if row.failure is None:
            groups.setdefault(row.task, []).append(row)
    check_replayable(environment)
    set_cache_directory(store.path)
    for rows in groups.values():
        traces = [store.read_traces(row.id)[0] for row in rows]
        task = environment.taskset.task_type.from_wire(traces[0].task)
        for trace in traces:
            trace.rewards, trace.errors = build_unscored_rewards(environment), []
        await asyncio.gather(*(_rescore_trace(environment, task, trace) for trace in traces))
        if environment.hooks.group_rewards:
            await score_group(environment, task, traces)
        for row, trace in zip(rows, traces, strict=True):
            yield RescoredRollout(row.id, row.reward, trace.reward, _format_failure(trace))


def check_replayable(environment: Environment) -> None:
    """Raise ConfigInvalid if a reward uses the runtime or the endpoint, which ended with the rollout."""
    for hook in environment.hooks.rewards:
        if unavailable := sorted({"runtime", "endpoint"} & hook.injected_parameters):
            raise ConfigInvalid(
                f"`{hook.name}` cannot be rescored: it uses `{unavailable[0]}`, which ended with the rollout. "
                "Read what it needs in `finalize` and put it into `state`, which is saved"
            )


async def _rescore_trace(environment: Environment, task: Task, trace: Trace) -> None:
    """Run the current rewards with the saved state. Metrics are not shown, so they are not run."""
    context = RolloutContext(task, trace, rng=random.Random(f"{trace.id}:{task.identity}"))
    hooks_using_state = [hook.name for hook in environment.hooks.rewards if "state" in hook.injected_parameters]
    if hooks_using_state:
        saved_state = trace.info.get(SCORING_STATE_KEY, {"refused": "no reward used it when the rollout ran"})
        if "saved" not in saved_state:
            reason = f"`{hooks_using_state[0]}` uses `state`, which was not saved: {saved_state['refused']}"
            trace.errors.append(Failure.from_exception(EnvironmentFault(reason)))
            return
        context.state = load_state(saved_state["saved"])
    await score_trace(environment, context, with_metrics=False)


def _format_failure(trace: Trace) -> str | None:
    return f"{trace.errors[0].name}: {trace.errors[0].message}" if trace.errors else None
