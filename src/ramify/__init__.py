"""Ramify: reinforcement learning for language-model agents, where a rollout stays a tree until the gradient.

This is the public face. A name is loaded when it is first used, so `import ramify` costs nothing and a worker that
never trains never loads the parts that do.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.env import Endpoint as Endpoint
    from ramify.env import Judge as Judge
    from ramify.env import Task as Task
    from ramify.env import Taskset as Taskset
    from ramify.env import TasksetConfig as TasksetConfig
    from ramify.env import User as User
    from ramify.env import group_reward as group_reward
    from ramify.env import metric as metric
    from ramify.env import reward as reward
    from ramify.env import stop as stop
    from ramify.env import tool as tool
    from ramify.evals import evaluate as evaluate
    from ramify.harness import Harness as Harness
    from ramify.launch import rl as rl
    from ramify.runtime import Runtime as Runtime
    from ramify.trace import Trace as Trace
    from ramify.train.sft import sft as sft

__version__ = "0.1.0"

_FACE = {
    "Endpoint": "ramify.env",
    "Harness": "ramify.harness",
    "Judge": "ramify.env",
    "Runtime": "ramify.runtime",
    "Task": "ramify.env",
    "Taskset": "ramify.env",
    "TasksetConfig": "ramify.env",
    "Trace": "ramify.trace",
    "User": "ramify.env",
    "evaluate": "ramify.evals",
    "group_reward": "ramify.env",
    "metric": "ramify.env",
    "reward": "ramify.env",
    "rl": "ramify.launch",
    "sft": "ramify.train.sft",
    "stop": "ramify.env",
    "tool": "ramify.env",
}

__all__ = [
    "Endpoint",
    "Harness",
    "Judge",
    "Runtime",
    "Task",
    "Taskset",
    "TasksetConfig",
    "Trace",
    "User",
    "__version__",
    "evaluate",
    "group_reward",
    "metric",
    "reward",
    "rl",
    "sft",
    "stop",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE})
