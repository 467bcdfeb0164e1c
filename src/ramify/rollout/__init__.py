"""Rollouts: one attempt at one task, from an empty box to a scored trace.

One idea: **a bad rollout is data.** What the agent did wrong ends the attempt and is scored like any other; what
happened to it is no evidence about the agent, so the attempt is run again. Which of the two it was, the failure's name
says.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.rollout.attempt import run_attempt as run_attempt
    from ramify.rollout.config import SourceConfig as SourceConfig
    from ramify.rollout.config import TimeoutsConfig as TimeoutsConfig
    from ramify.rollout.environment import Environment as Environment
    from ramify.rollout.repeating import run as run
    from ramify.rollout.repeating import system_failure as system_failure
    from ramify.rollout.scoring import score as score
    from ramify.rollout.scoring import score_group as score_group
    from ramify.rollout.scripted import ScriptedPolicy as ScriptedPolicy
    from ramify.rollout.validation import Verdict as Verdict
    from ramify.rollout.validation import validate as validate

_FACE = {
    "Environment": "environment",
    "ScriptedPolicy": "scripted",
    "SourceConfig": "config",
    "TimeoutsConfig": "config",
    "Verdict": "validation",
    "run": "repeating",
    "run_attempt": "attempt",
    "score": "scoring",
    "score_group": "scoring",
    "system_failure": "repeating",
    "validate": "validation",
}

__all__ = [
    "Environment",
    "ScriptedPolicy",
    "SourceConfig",
    "TimeoutsConfig",
    "Verdict",
    "run",
    "run_attempt",
    "score",
    "score_group",
    "system_failure",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.rollout' has no attribute {name!r}")
    value = getattr(import_module(f"ramify.rollout.{_FACE[name]}"), name)
    globals()[name] = value
    return value
