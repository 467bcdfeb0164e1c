"""Saved rollouts under the rewards as they are now. Nothing is sampled, and the run stays as it is."""

import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ramify.config import parse
from ramify.errors import ConfigInvalid
from ramify.evals.config import EvalConfig
from ramify.rollout import Environment, score, score_group
from ramify.rollout.scoring import due
from ramify.store import Row, RunStore
from ramify.trace import Trace


@dataclass(frozen=True, slots=True)
class Rescored:
    """A rollout, what it scored, and what it scores now; `failure` says why it could not be scored."""

    id: str
    old: float | None
    new: float | None
    failure: str | None = None


def environment_of(store: RunStore) -> Environment:
    """The run's environment, with its code as it is now."""
    path = store.path / "config.toml"
    if not path.is_file() or "taskset" not in tomllib.loads(path.read_text("utf-8")):
        raise ConfigInvalid(f"{store.path} is no run of `ramify eval`: only their rollouts can be scored again")
    return Environment.load(parse(EvalConfig, ["@", str(path)]).source)


async def replay(store: RunStore, environment: Environment) -> AsyncIterator[Rescored]:
    """Every rollout of the run that counts, scored again, task by task."""
    groups: dict[str, list[Row]] = {}
    for row in store.rows(source=""):
        if row.failure is None:
            groups.setdefault(row.task, []).append(row)
    for rows in groups.values():
        traces = [store.read(row.id)[0] for row in rows]
        task = environment.taskset.task_type.read(traces[0].task)
        for trace in traces:
            trace.rewards, trace.errors = due(environment), []
            await score(environment, task, trace)
        if environment.hooks.group_rewards:
            await score_group(environment, task, traces)
        for row, trace in zip(rows, traces, strict=True):
            yield Rescored(row.id, row.reward, trace.reward, _failure(trace))


def _failure(trace: Trace) -> str | None:
    return f"{trace.errors[0].name}: {trace.errors[0].message}" if trace.errors else None
