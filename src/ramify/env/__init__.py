"""Environments: tasks, and the code that judges, helps and talks to the agent that solves them.

One idea: everything a user writes is plain Python that is called with what it names. Nothing here knows how a rollout
is run; `rollout` and `harness` call what they find.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.env.calling import Hook as Hook
    from ramify.env.chat import Chat as Chat
    from ramify.env.chat import ChatConfig as ChatConfig
    from ramify.env.context import Context as Context
    from ramify.env.context import Endpoint as Endpoint
    from ramify.env.hooks import Hooks as Hooks
    from ramify.env.hooks import hooks_of as hooks_of
    from ramify.env.judge import Judge as Judge
    from ramify.env.judge import ReferenceJudge as ReferenceJudge
    from ramify.env.judge import RubricJudge as RubricJudge
    from ramify.env.marks import group_reward as group_reward
    from ramify.env.marks import metric as metric
    from ramify.env.marks import reward as reward
    from ramify.env.marks import stop as stop
    from ramify.env.marks import tool as tool
    from ramify.env.mcp import McpServer as McpServer
    from ramify.env.mcp import open_servers as open_servers
    from ramify.env.task import Task as Task
    from ramify.env.taskset import Taskset as Taskset
    from ramify.env.taskset import TasksetConfig as TasksetConfig
    from ramify.env.tools import Tool as Tool
    from ramify.env.tools import ToolSet as ToolSet
    from ramify.env.user import ModelUser as ModelUser
    from ramify.env.user import User as User

_FACE = {
    "Chat": "ramify.env.chat",
    "ChatConfig": "ramify.env.chat",
    "Context": "ramify.env.context",
    "Endpoint": "ramify.env.context",
    "Hook": "ramify.env.calling",
    "Hooks": "ramify.env.hooks",
    "Judge": "ramify.env.judge",
    "McpServer": "ramify.env.mcp",
    "ModelUser": "ramify.env.user",
    "ReferenceJudge": "ramify.env.judge",
    "RubricJudge": "ramify.env.judge",
    "Task": "ramify.env.task",
    "Taskset": "ramify.env.taskset",
    "TasksetConfig": "ramify.env.taskset",
    "Tool": "ramify.env.tools",
    "ToolSet": "ramify.env.tools",
    "User": "ramify.env.user",
    "group_reward": "ramify.env.marks",
    "hooks_of": "ramify.env.hooks",
    "metric": "ramify.env.marks",
    "open_servers": "ramify.env.mcp",
    "reward": "ramify.env.marks",
    "stop": "ramify.env.marks",
    "tool": "ramify.env.marks",
}

__all__ = [
    "Chat",
    "ChatConfig",
    "Context",
    "Endpoint",
    "Hook",
    "Hooks",
    "Judge",
    "McpServer",
    "ModelUser",
    "ReferenceJudge",
    "RubricJudge",
    "Task",
    "Taskset",
    "TasksetConfig",
    "Tool",
    "ToolSet",
    "User",
    "group_reward",
    "hooks_of",
    "metric",
    "open_servers",
    "reward",
    "stop",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'ramify.env' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value
