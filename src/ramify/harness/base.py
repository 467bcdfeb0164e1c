"""What a harness is: it is given a task and somebody who answers, and says why it stopped."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ramify.env import Hook, RolloutContext, Task, TasksetHooks, ToolSet, User
from ramify.harness.config import HarnessConfig
from ramify.runtime import Runtime

if TYPE_CHECKING:
    from ramify.gateway import RolloutSession


class Harness(ABC):
    """An agent. One object serves all rollouts of a source, so what belongs to a rollout lives in `run`."""

    config: HarnessConfig
    requires_endpoint: ClassVar[bool] = False
    """Whether it asks over HTTP, at `context.endpoint`."""

    def __init__(self, config: HarnessConfig) -> None:
        self.config = config

    @cached_property
    def trace_metadata(self) -> dict[str, Any]:
        """What a trace says about its agent."""
        return self.config.model_dump(mode="json", exclude_defaults=True, include={"timeout", "train"}) | {
            "id": self.config.id
        }

    def check_compatibility(self, hooks: TasksetHooks, runtime: Runtime) -> None:
        """Refuse, with ConfigInvalid, a taskset or runtime that this harness can do nothing with."""
        return

    def check_task(self, task: Task, hooks: TasksetHooks) -> None:
        """Refuse, with ConfigInvalid, a task that this harness cannot begin."""
        return

    @abstractmethod
    async def run(
        self,
        context: RolloutContext,
        session: "RolloutSession",
        tools: ToolSet,
        user: User | None,
        stop_hooks: Sequence[Hook],
    ) -> str:
        """Work on the task until it is done, and return why it ended. `stops` are asked after every turn.

        What the agent does wrong is raised as a failure that the policy is to blame for; whoever calls this sets the
        time limit.
        """
