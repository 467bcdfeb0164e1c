"""A shell and file tools. They run in the runtime of the rollout, and what the model is shown has a bounded size.

The docstrings of the tools are what the model sees. An exception of a tool is shown to it as an error text.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ramify.core.errors import ConfigInvalid
from ramify.env import Hook, RolloutContext, Runtime, Task, TasksetHooks, ToolSet, User
from ramify.rollout.harness.chat import ChatHarness
from ramify.rollout.harness.config import BashHarnessConfig
from ramify.trace import Media, Message

if TYPE_CHECKING:
    from ramify.infer.gateway import RolloutSession

# Run by `sh`, with the command as $0. An image may have no bash. Both outputs share a pipe, so that they stay in order.
SHELL_SCRIPT = 'exec 2>&1; if command -v bash >/dev/null; then exec bash -c "$0"; else exec sh -c "$0"; fi'


class ShellTools:
    """The tools of one harness. `command_timeout` is in seconds; `max_output_chars` bounds each result."""

    def __init__(self, command_timeout: float, max_output_chars: int) -> None:
        self._command_timeout, self._max_output_chars = command_timeout, max_output_chars

    def list_tools(self) -> list[Callable[..., Any]]:
        """Return the tools as functions."""
        return [self.bash, self.read_file, self.write_file, self.edit_file]

    async def bash(self, command: str, runtime: Runtime, timeout: Annotated[float | None, Field(gt=0)] = None) -> str:
        """Run a command in a new shell, in the work directory. Returns its output.

        Args:
            command: The command line.
            timeout: Seconds after which it is killed.
        """
        seconds = self._command_timeout if timeout is None else min(timeout, self._command_timeout)
        result = await runtime.run(["/bin/sh", "-c", SHELL_SCRIPT, command], timeout=seconds)
        output = shorten_text((result.stdout + result.stderr).decode("utf-8", "replace"), self._max_output_chars)
        if result.timed_out:
            return _join_lines(output, f"[killed after {seconds:g} s]")
        if result.returncode or not output:
            return _join_lines(output, f"[exit code {result.returncode}]")
        return output

    async def read_file(
        self,
        path: str,
        runtime: Runtime,
        first_line: Annotated[int, Field(ge=1)] = 1,
        num_lines: Annotated[int | None, Field(ge=1)] = None,
    ) -> str:
        """Read a text file.

        Args:
            path: The file.
            first_line: The first line to read, from 1.
            num_lines: Lines to read; by default as many as fit.
        """
        lines = (await runtime.read(path)).decode("utf-8", "replace").splitlines(keepends=True)
        selected = lines[first_line - 1 :][:num_lines]
        if lines and not selected:
            raise ValueError(f"{path} has {len(lines)} lines; there is no line {first_line}")
        num_shown, num_chars = 0, 0
        while num_shown < len(selected) and num_chars + len(selected[num_shown]) <= self._max_output_chars:
            num_chars += len(selected[num_shown])
            num_shown += 1
        if num_shown == len(selected):
            return "".join(selected)
        if num_shown == 0:
            return shorten_text(selected[0], self._max_output_chars)
        next_line = first_line + num_shown
        note = f"[lines {next_line} to {len(lines)} left out; read on with first_line={next_line}]"
        return _join_lines("".join(selected[:num_shown]), note)

    async def write_file(self, path: str, content: str, runtime: Runtime) -> str:
        """Write a file. Replaces it if it exists.

        Args:
            path: The file.
            content: Its new content.
        """
        await runtime.write(path, content)
        return f"wrote {path}"

    async def edit_file(self, path: str, old: str, new: str, runtime: Runtime) -> str:
        """Replace a text in a file.

        Args:
            path: The file.
            old: The text to replace; it must occur exactly once.
            new: The text that replaces it.
        """
        text = (await runtime.read(path)).decode()
        count = text.count(old) if old else 0
        if count != 1:
            raise ValueError(f"old must occur exactly once in {path}; it occurs {count} times")
        await runtime.write(path, text.replace(old, new))
        return f"edited {path}"


def shorten_text(text: str, max_chars: int) -> str:
    """Return a text, without its middle part if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[len(text) - half :]}"


def _join_lines(text: str, note: str) -> str:
    """Append a note on a line of its own."""
    return f"{text}\n{note}" if text and not text.endswith("\n") else f"{text}{note}"


class BashHarness(ChatHarness):
    """Runs a conversation with a shell and file tools beside the tools of the taskset."""

    config: BashHarnessConfig

    def __init__(self, config: BashHarnessConfig) -> None:
        super().__init__(config)
        self._tools = ToolSet(ShellTools(config.command_timeout, config.max_output_chars).list_tools())

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
        """Run the chat loop with the tools of this harness and of the taskset."""
        all_tools = ToolSet([*self._tools.tools, *tools.tools])
        return await super().run(context, session, all_tools, user, stop_hooks)
