"""What the taskset needs from an environment of either generation of verifiers."""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import ramify as rf
from ramify.core.errors import ConfigInvalid, EnvironmentFault

SCORES_KEY = "scores"  # the attribute of `state` with the scores by the agent's name, then by name
TOTAL = "reward"  # the one reward of an environment whose rewards have no names that are known before a rollout


def to_plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a dataset as plain data. Raises ConfigInvalid, which names the column that cannot be."""
    plain: dict[str, Any] = {}
    for name, value in row.items():
        try:
            plain[name] = _to_plain(value)
        except (TypeError, ValueError) as error:
            raise ConfigInvalid(f"the column {name!r} of the dataset has a {type(value).__name__}: {error}") from error
    return plain


def keep_plain_fields(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a state that are plain data; others are left out."""
    plain: dict[str, Any] = {}
    for name, value in state.items():
        with contextlib.suppress(TypeError, ValueError):
            plain[name] = _to_plain(value)
    return plain


def _to_plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_dump_model, allow_nan=False))


def _dump_model(value: Any) -> Any:
    """Return a pydantic model, such as a message of verifiers, as a dict."""
    if not hasattr(value, "model_dump"):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return value.model_dump(mode="json", exclude_none=True)


def add_reward_hooks(taskset: rf.Taskset, weights: Mapping[str, float], *, from_group: bool) -> None:
    """Give a taskset one hook per name: a metric where the weight is 0, else a reward.

    The hooks of one rollout read `state.scores`; `from_group` makes group rewards, which call `score_traces`.
    """
    make_hook = _make_group_hook if from_group else _make_hook
    hooks = {_get_hook_name(taskset, name): make_hook(name, weight) for name, weight in weights.items()}
    for hook_name, hook in hooks.items():
        hook.__name__ = hook_name
    taskset.__class__ = type(type(taskset).__name__, (type(taskset),), hooks)


def _get_hook_name(taskset: rf.Taskset, name: str) -> str:
    """Return the name of a reward; one that a taskset has already gets a suffix."""
    return f"{name}_score" if hasattr(taskset, name) else name


def _make_hook(name: str, weight: float) -> Callable[..., Any]:
    def read_score(self: rf.Taskset, state: SimpleNamespace, trace: rf.Trace) -> float:
        scores: Mapping[str, float] = getattr(state, SCORES_KEY, {}).get(trace.agent, {})
        if name not in scores:
            raise EnvironmentFault(f"the environment returned no score {name!r}; it has {', '.join(scores) or 'none'}")
        return scores[name]

    return rf.reward(weight=weight)(read_score) if weight else rf.metric(read_score)


def _make_group_hook(name: str, weight: float) -> Callable[..., Any]:
    async def read_scores(self: Any, traces: list[rf.Trace]) -> list[float]:
        scores = await self.score_traces(traces)
        return [rollout_scores[name] for rollout_scores in scores]

    return rf.group_reward(weight=weight)(read_scores)


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """A rollout of one agent of verifiers.

    - `stop`: the stop reason.
    - `scores`: the scores by name, one for each of `weights`; None if the rollout is scored later, with its group.
    - `metrics`: further scores by name, which are only reported.
    - `state`: its state as plain data.
    - `is_trainable`: whether the environment allows to train the agent.
    """

    stop: str
    scores: Mapping[str, float] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    is_trainable: bool = True


class VerifiersEnvironment(ABC):
    """An environment of verifiers.

    - `generation`: "v0" or "v1".
    - `weights`: the weights of its rewards by name; 0 for metrics.
    - `agents`: the names of the agents that the policy plays.
    - `scores_groups`: whether its rewards see all attempts at a task.
    - `ignored_sampling`: its own sampling parameters, which the source's parameters replace.
    """

    generation: ClassVar[str]
    weights: Mapping[str, float]
    agents: Sequence[str] = ("agent",)
    scores_groups: bool = False
    ignored_sampling: Mapping[str, Any] = {}

    @abstractmethod
    def iter_tasks(self, split: str) -> Iterator[rf.Task]:
        """Yield the tasks of a split, or of the only split that it has."""

    @abstractmethod
    async def run(self, task: rf.Task, agents: Sequence[rf.RolloutAgent]) -> list[FinishedRollout]:
        """Run one rollout, in which each of `self.agents` calls its own endpoint, and score it.

        Return the results in the same order.
        """

    async def score_group(self, tasks: list[rf.Task], states: list[dict[str, Any]]) -> list[dict[str, float]]:
        """Return the scores of all attempts at a task, from their states as plain data."""
        raise NotImplementedError(f"{self.generation} environments do not score groups")
