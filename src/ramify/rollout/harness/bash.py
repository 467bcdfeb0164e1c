"""The bash harness: the chat loop with a shell and file tools that run in the rollout's runtime."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ramify.core.errors import ConfigInvalid
from ramify.env import Hook, RolloutContext, Runtime, Task, TasksetHooks, ToolSet, User
from ramify.rollout.harness.chat import ChatHarness
from ramify.rollout.harness.config import BashHarnessConfig
from ramify.rollout.harness.shell_tools import ShellTools
from ramify.trace import Media, Message

if TYPE_CHECKING:
    from ramify.infer.gateway import RolloutSession


class BashHarness(ChatHarness):
    """Runs a conversation with a shell and file tools beside the tools of the taskset."""

    config: BashHarnessConfig  # pyright: ignore[reportIncompatibleVariableOverride] - a plugin narrows it

    def __init__(self, config: BashHarnessConfig | None = None) -> None:
        super().__init__(config or BashHarnessConfig())
        self._tools = ToolSet(ShellTools(self.config.command_timeout, self.config.max_output_chars).list_tools())

    def check_compatibility(self, hooks: TasksetHooks, runtime: Runtime) -> None:
        """Raise ConfigInvalid if a tool of the taskset has the name of a tool of this harness."""
        own_names = {tool.name for tool in self._tools.tools}
        if taken := [tool.name for tool in hooks.static_tools.tools if tool.name in own_names]:
            raise ConfigInvalid(
                f"the taskset has a tool named {', '.join(taken)}, and so has the harness 'bash'; rename the former"
            )

    def build_messages(self, task: Task) -> tuple[list[Message], dict[str, Media]]:
        """Return the messages that start the conversation: the system prompt of this harness comes first."""
        messages, media = super().build_messages(task)
        prompt = self.config.system_prompt
        if not prompt:
            return messages, media
        if messages and messages[0].role == "system" and isinstance(messages[0].content, str):
            return [Message("system", f"{prompt}\n\n{messages[0].content}"), *messages[1:]], media
        return [Message("system", prompt), *messages], media

    async def run(
        self,
        context: RolloutContext,
        session: "RolloutSession",
        tools: ToolSet,
        user: User | None,
        stop_hooks: Sequence[Hook],
    ) -> str:
        """Run the chat loop with the tools of this harness and those of the taskset."""
        all_tools = ToolSet([*self._tools.tools, *tools.tools])
        return await super().run(context, session, all_tools, user, stop_hooks)
