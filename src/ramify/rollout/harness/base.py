"""The interface of harnesses. A harness runs the agent on one task against a session and returns the stop reason."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ramify.core.errors import ConfigInvalid, EnvironmentFault, RamifyError
from ramify.env import Hook, RolloutContext, Runtime, Task, TasksetHooks, ToolSet, User
from ramify.infer.dialects.chat_format import format_message, parse_tool_calls
from ramify.infer.dialects.media import read_environment_url
from ramify.infer.dialects.message_parser import MessageParser
from ramify.infer.gateway.config import RolloutLimits
from ramify.rollout.harness.config import HarnessConfig
from ramify.trace import Media, Message

if TYPE_CHECKING:
    from ramify.infer.gateway import RolloutSession


ALLOWED_ROLES = ("system", "developer", "user", "assistant", "tool")


def build_initial_messages(task: Task) -> tuple[list[Message], dict[str, Media]]:
    """Return the initial messages of a task, and their images by hash. Raises EnvironmentFault for an invalid one."""
    messages = [] if task.system is None else [Message("system", task.system)]
    parser = MessageParser(read_url=read_environment_url)
    if isinstance(task.prompt, str):
        messages.append(Message("user", task.prompt))
    for index, message in enumerate(() if task.prompt is None or isinstance(task.prompt, str) else task.prompt):
        try:
            messages.append(_parse_message(message, parser))
        except (LookupError, TypeError, AttributeError, ValueError, RamifyError) as error:
            reason = error.message if isinstance(error, RamifyError) else repr(error)
            raise EnvironmentFault(f"task.prompt[{index}] is not a chat message: {reason}") from error
    return messages, parser.media


def join_prompt_text(task: Task) -> str:
    """Return the initial messages of a task as one text, for a program that takes one.

    Raises EnvironmentFault if they have images, which the program would not see.
    """
    messages, media = build_initial_messages(task)
    if media:
        raise EnvironmentFault(
            f"task {task.identity} has images in its prompt, and a program gets its prompt as text: write them to "
            "files in `setup`, or use the harness `chat`"
        )
    return "\n\n".join(message.text for message in messages)


def get_user_prompt_texts(task: Task) -> list[str]:
    """Return the texts by which a conversation about the task is recognized.

    They are the user messages in its prompt, without messages of several parts, and the whole prompt as one text.
    """
    if isinstance(task.prompt, str):
        return [task.prompt, join_prompt_text(task)]
    contents = [message.get("content") for message in task.prompt or () if message.get("role") == "user"]
    return [content for content in contents if isinstance(content, str)]


def _parse_message(data: Mapping[str, Any], parser: MessageParser) -> Message:
    if data["role"] not in ALLOWED_ROLES:
        raise ValueError(f"role {data['role']!r}, expected one of {', '.join(ALLOWED_ROLES)}")
    content = data.get("content") or ""
    return Message(
        role=data["role"],
        content=content if isinstance(content, str) else parser.parse_parts(content),
        reasoning=data.get("reasoning_content"),
        tool_calls=parse_tool_calls(data.get("tool_calls")),
        tool_call_id=data.get("tool_call_id"),
    )


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
        messages, media = build_initial_messages(task)
        return [format_message(message, media) for message in messages]

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


class TasksetHarness(Harness):
    """Calls the hook `run_agent` of the taskset.

    It is the harness of tasksets that bring an agent loop of their own, such as environments of other projects. Their
    model calls go to the rollout's endpoint.
    """

    requires_endpoint = True
    _run_agent: Hook | None = None

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
