"""The tools of the harness `rlm`: `python`, which runs code in the REPL, and the tools of the taskset.

The model calls a tool of the taskset directly or as a function in its code. The code of several
conversations may run at the same time, so a lock lets the calls of a rollout run one after the other.
"""

import asyncio
import keyword
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ramify.core.errors import ConfigInvalid
from ramify.env import RolloutContext, Tool, ToolSet
from ramify.env.tools import ToolContent
from ramify.rollout.harness.repl import Repl, cut_text
from ramify.trace import ToolCall

PYTHON_TOOL = "python"
REPL_NAMES = ("llm", "llm_batch", "context", "answer")


class PythonArguments(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of the tool `python`."""

    code: str


class PythonTool(Tool):
    """Runs code in a REPL. `answer` is the value that the code gave to the variable of this name, as text."""

    def __init__(self, repl: Repl) -> None:
        parameters = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
        super().__init__(PYTHON_TOOL, "Run Python code.", parameters)
        self._repl = repl
        self.answer: str | None = None

    async def call(self, context: RolloutContext, arguments: Mapping[str, Any] | str) -> ToolContent:
        """Run the code. A failure of the system is raised, not shown to the model."""
        try:
            if isinstance(arguments, str):
                code = msgspec.json.decode(arguments, type=PythonArguments).code
            else:
                code = msgspec.convert(arguments, PythonArguments).code
        except msgspec.DecodeError as error:  # also if the arguments are of other names or types
            return f"error: {PYTHON_TOOL}: {error}"
        return await self.execute(context, {"code": code})

    async def execute(self, context: RolloutContext, arguments: dict[str, Any]) -> ToolContent:
        """Run the code and return what it printed."""
        result = await self._repl.run(arguments["code"])
        self.answer = result.answer
        return result.output


class DirectTool(Tool):
    """A tool of the taskset as the model calls it directly: after the calls that are running, and with a cut result."""

    def __init__(self, tool: Tool, lock: asyncio.Lock, max_output_chars: int) -> None:
        self.name, self.schema, self.injected_parameters = tool.name, tool.schema, tool.injected_parameters
        self._tool, self._lock, self._max_output_chars = tool, lock, max_output_chars

    async def call(self, context: RolloutContext, arguments: Mapping[str, Any] | str) -> ToolContent:
        """Run the tool and return its result, cut to the budget."""
        async with self._lock:
            content = await self._tool.call(context, arguments)
        return cut_text(content, self._max_output_chars) if isinstance(content, str) else content

    async def execute(self, context: RolloutContext, arguments: dict[str, Any]) -> ToolContent:
        """Run the tool without waiting for others."""
        return await self._tool.execute(context, arguments)


class TasksetTools:
    """The tools of a taskset for one rollout: `direct_tools` for the model, and functions for its code."""

    def __init__(self, tools: ToolSet, max_output_chars: int) -> None:
        self._tools, self._lock = tools, asyncio.Lock()
        self.direct_tools = [DirectTool(tool, self._lock, max_output_chars) for tool in tools.tools]

    def describe_functions(self) -> list[dict[str, Any]]:
        """Return the functions that the REPL defines: their names, their parameters and their docstrings."""
        return [
            {
                "function": to_identifier(tool.name),
                "tool": tool.name,
                "parameters": list(tool.schema["function"]["parameters"].get("properties", {})),
                "doc": tool.schema["function"].get("description", ""),
            }
            for tool in self._tools.tools
        ]

    async def call(self, name: str, arguments: Mapping[str, Any], context: RolloutContext) -> str:
        """Run a tool for code and return the text of its result."""
        call = ToolCall("", name, msgspec.json.encode(arguments).decode())
        async with self._lock:
            message = await self._tools.call(call, context)
        return message.text


def to_identifier(tool_name: str) -> str:
    """Return the name of the function that calls a tool: `files.read` becomes `files_read`."""
    name = re.sub(r"\W", "_", tool_name)
    return f"{name}_" if keyword.iskeyword(name) else f"_{name}" if name[:1].isdigit() else name


def check_tool_names(tools: Iterable[Tool]) -> None:
    """Raise ConfigInvalid if the function of a tool would have a name that the REPL uses itself."""
    for tool in tools:
        if tool.name == PYTHON_TOOL or to_identifier(tool.name) in REPL_NAMES:
            taken = ", ".join((PYTHON_TOOL, *REPL_NAMES))
            raise ConfigInvalid(f"tool {tool.name!r}: the harness rlm uses this name itself ({taken}); rename the tool")
