"""Rewards and metrics whose names are known only when an environment is loaded, as hooks of a taskset."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import ramify as rf
from ramify.core.errors import EnvironmentFault

SCORES_KEY = "scores"  # the attribute of `state` with the scores by name


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
    def read_score(self: rf.Taskset, state: SimpleNamespace) -> float:
        scores: dict[str, float] = getattr(state, SCORES_KEY, {})
        if name not in scores:
            raise EnvironmentFault(f"the environment returned no score {name!r}; it has {', '.join(scores) or 'none'}")
        return scores[name]

    return rf.reward(weight=weight)(read_score) if weight else rf.metric(read_score)


def _make_group_hook(name: str, weight: float) -> Callable[..., Any]:
    async def read_scores(self: Any, traces: list[rf.Trace]) -> list[float]:
        scores = await self.score_traces(traces)
        return [rollout_scores[name] for rollout_scores in scores]

    return rf.group_reward(weight=weight)(read_scores)
