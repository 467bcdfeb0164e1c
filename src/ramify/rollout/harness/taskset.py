"""The harness taskset: the taskset's own hook `run_agent` runs the agent.

It is the harness of tasksets that bring an agent loop of their own, such as environments of other projects. Their model
calls go to the rollout's endpoint.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.env import Hook, RolloutContext, Runtime, TasksetHooks, ToolSet, User
from ramify.rollout.harness.base import Harness, HarnessConfig

if TYPE_CHECKING:
    from ramify.infer.gateway import RolloutSession


class TasksetHarness(Harness):
    """Calls the hook `run_agent` of the taskset."""

    requires_endpoint = True

    def __init__(self, config: HarnessConfig | None = None) -> None:
        super().__init__(config or HarnessConfig(id="taskset"))
        self._run_agent: Hook | None = None

    def check_compatibility(self, hooks: TasksetHooks, runtime: Runtime) -> None:
        """Raise ConfigInvalid if the taskset has no hook `run_agent`, or hooks that the agent cannot use."""
        if hooks.run_agent is None:
            raise ConfigInvalid("the harness 'taskset' needs a taskset with a hook `run_agent`: use the harness chat")
        unused = [name for name, hook in (("tools", hooks.tools), ("user", hooks.user)) if hook is not None]
        unused += [tool.name for tool in hooks.static_tools.tools] + [hook.name for hook in hooks.stops]
        unused += ["harness.mcp"] if self.config.mcp else []
        if unused:
            raise ConfigInvalid(f"a taskset with `run_agent` runs its agent alone; remove {', '.join(unused)}")
        self._run_agent = hooks.run_agent

    async def run(
        self,
        context: RolloutContext,
        session: "RolloutSession",
        tools: ToolSet,
        user: User | None,
        stop_hooks: Sequence[Hook],
    ) -> str:
        """Call the hook and return its stop reason."""
        assert self._run_agent is not None
        stop = await self._run_agent(context)
        if not isinstance(stop, str):
            raise EnvironmentFault(f"run_agent: expected the stop reason, found a {type(stop).__qualname__}")
        return session.exhausted_limit or stop
