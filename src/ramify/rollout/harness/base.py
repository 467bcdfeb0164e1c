"""The interface of harnesses. A harness runs the agent on one task against a session and returns the stop reason."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ramify.env import Hook, RolloutContext, Runtime, Task, TasksetHooks, ToolSet, User
from ramify.infer.gateway.config import RolloutLimits
from ramify.rollout.harness.config import HarnessConfig
from ramify.rollout.harness.initial_messages import format_initial_messages

if TYPE_CHECKING:
    from ramify.infer.gateway import RolloutSession


class Harness(ABC):
    """Base class of agents; a subclass implements `run`.

    One object serves all rollouts of a source, so `run` must keep the state of a rollout in local variables.

    - `config`: the options, as an object of the class that annotates this attribute.
    - `requires_endpoint`: whether the agent calls the model over HTTP, at `context.endpoint`.
    """

    config: HarnessConfig
    requires_endpoint: ClassVar[bool] = False

    def __init__(self, config: HarnessConfig) -> None:
        self.config = config

    @cached_property
    def trace_metadata(self) -> dict[str, Any]:
        """The description of the agent that is stored in a trace."""
        options = self.config.model_dump(mode="json", exclude_defaults=True, include={"timeout", "train"})
        return options | {"id": self.config.id}

    def check_compatibility(self, hooks: TasksetHooks, runtime: Runtime) -> None:
        """Raise ConfigInvalid if this harness cannot work with the taskset or the runtime."""
        return

    def check_limits(self, limits: RolloutLimits) -> None:
        """Raise ConfigInvalid if this harness cannot work within the limits of a rollout."""
        return

    def check_task(self, task: Task, hooks: TasksetHooks) -> None:
        """Raise ConfigInvalid if this harness cannot start the task."""
        return

    def format_prompt(self, task: Task) -> list[dict[str, Any]]:
        """Return the system message and the prompt of a task in OpenAI's format, with its images as data URLs."""
        return format_initial_messages(task)

    @abstractmethod
    async def run(
        self,
        context: RolloutContext,
        session: "RolloutSession",
        tools: ToolSet,
        user: User | None,
        stop_hooks: Sequence[Hook],
    ) -> str:
        """Work on the task and return the stop reason. Call `stop_hooks` after every turn.

        A mistake of the agent is raised as an error whose `blame` is "policy". The caller enforces the time limit.
        """
