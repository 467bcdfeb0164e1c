"""The harness `rlm`, a recursive language model: the model works by writing code, and its code calls the model.

    system ──┬── task ── reply: python ── output ── reply: python ── output ── reply        the task
             ├── prompt ── reply                                                            a call of llm()
             └── prompt ── reply: python ── output ── reply                                 another one

A conversation has a Python REPL in the runtime, whose variable `context` holds the prompt. It ends when the code sets
`answer` or the model replies without calling a tool. A call of `llm` is a conversation of its own, one level deeper.
All conversations of a rollout have the same system prompt and tools, so they are branches of one tree. The REPL sends
its calls to this process, and the session of the rollout makes them: the runtime needs no network.

The model calls a tool of the taskset directly or as a function in its code. The code of several conversations may run
at the same time, so a lock lets the calls of a rollout run one after the other.
"""

import asyncio
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ramify.core.async_calls import cancel_all
from ramify.core.errors import BudgetExceeded, ConfigInvalid, MalformedCall, RamifyError
from ramify.env import Hook, RolloutContext, Runtime, Task, TasksetHooks, Tool, ToolSet, User
from ramify.env.tools import ErrorText, ToolContent
from ramify.rollout.harness.base import build_initial_messages
from ramify.rollout.harness.chat import ChatHarness, ChatLoop
from ramify.rollout.harness.config import RlmHarnessConfig
from ramify.rollout.harness.repl import Repl, ReplFunction, check_line_limit, cut_text
from ramify.trace import Media, Message, TextPart, ToolCall

if TYPE_CHECKING:
    from ramify.infer.gateway import RolloutSession


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
            return ErrorText(f"{PYTHON_TOOL}: {error}")
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


FINAL_MARK = "FINAL("
MAX_PROMPTS = 1000  # of one `llm_batch`: each is a task of the worker
CUT_NOTE = "; `context` holds all"


class RlmHarness(ChatHarness):
    """Runs a conversation whose model writes code for a REPL, from which it can call itself."""

    config: RlmHarnessConfig

    def check_compatibility(self, hooks: TasksetHooks, runtime: Runtime) -> None:
        """Raise ConfigInvalid if a tool has a name of the REPL, or if the runtime cannot carry its messages."""
        check_tool_names(hooks.static_tools.tools)
        check_line_limit(runtime)

    async def run(
        self,
        context: RolloutContext,
        session: "RolloutSession",
        tools: ToolSet,
        user: User | None,
        stop_hooks: Sequence[Hook],
    ) -> str:
        """Work on the task. If the answer is not the last reply, `trace.info["final_answer"]` holds it."""
        check_tool_names(tools.tools)
        task_tools = TasksetTools(tools, self.config.max_output_chars)
        system = build_system_message(context.task, self.config)
        rollout = RlmRollout(context, session, task_tools, stop_hooks, self.config, system)
        messages, media = build_task_messages(context.task, self.config)
        conversation = RlmConversation(rollout, 0, get_task_context(context.task), user)
        try:
            return await conversation.run([system, *messages], media)
        finally:
            if conversation.answer != context.trace.last_reply:
                context.trace.info["final_answer"] = conversation.answer


@dataclass(frozen=True, slots=True)
class RlmRollout:
    """What the conversations of one rollout share."""

    context: RolloutContext
    session: "RolloutSession"
    tools: TasksetTools
    stop_hooks: Sequence[Hook]
    config: RlmHarnessConfig
    system: Message


class LlmArguments(msgspec.Struct):
    """The arguments of a call of `llm` or `llm_batch` in the REPL."""

    prompts: Annotated[list[str], msgspec.Meta(max_length=MAX_PROMPTS)]


class ToolArguments(msgspec.Struct):
    """The arguments of a call of a tool in the REPL."""

    tool: str
    arguments: dict[str, Any]


class RlmConversation:
    """A conversation with its REPL, about the task (depth 0) or for a call of `llm`."""

    def __init__(self, rollout: RlmRollout, depth: int, repl_context: Any, user: User | None = None) -> None:
        self._rollout, self._depth = rollout, depth
        config, runtime = rollout.config, rollout.context.runtime
        assert runtime is not None
        functions = rollout.tools.describe_functions()
        self._repl = Repl(runtime, config, {"context": repl_context}, functions, self._handle_call)
        self._python = PythonTool(self._repl)
        own_stops = [Hook(self.answer_is_set, "rlm"), *([Hook(self.max_sub_turns, "rlm")] if depth else [])]
        self._loop = ChatLoop(
            rollout.context,
            rollout.session,
            ToolSet([self._python, *rollout.tools.direct_tools]),
            user,
            [*rollout.stop_hooks, *own_stops],
            config,
        )

    async def run(self, messages: list[Message], media: Mapping[str, Media], *, fork_reason: str = "") -> str:
        """Hold the conversation and return the reason why it ended."""
        try:
            return await self._loop.run(messages, media, fork_reason=fork_reason)
        finally:
            await self._repl.close()

    @property
    def answer(self) -> str:
        """The value of the variable `answer`, or the answer in the last reply."""
        if self._python.answer is not None:
            return self._python.answer
        reply = self._loop.last_reply
        return "" if reply is None else extract_final(reply.message.text)

    async def answer_is_set(self) -> bool:
        """Stop when the code has set `answer`."""
        return self._python.answer is not None

    async def max_sub_turns(self) -> bool:
        """Stop after `max_sub_turns` replies, unless the last one is the answer."""
        reply = self._loop.last_reply
        is_unfinished = reply is not None and bool(reply.message.tool_calls)
        return is_unfinished and self._loop.num_turns >= self._rollout.config.max_sub_turns

    async def _handle_call(self, function: ReplFunction, arguments: dict[str, Any]) -> Any:
        """Answer a call from the REPL."""
        try:
            if function == "tool":
                call = msgspec.convert(arguments, ToolArguments)
                return await self._rollout.tools.call(call.tool, call.arguments, self._rollout.context)
            prompts = msgspec.convert(arguments, LlmArguments).prompts
        except msgspec.ValidationError as error:
            raise MalformedCall(f"{function}: {error}") from None
        if self._depth >= self._rollout.config.max_depth:
            raise BudgetExceeded(f"llm: calls may be nested {self._rollout.config.max_depth} deep (harness.max_depth)")
        return await self._ask_all(prompts)

    async def _ask_all(self, prompts: Sequence[str]) -> list[str]:
        """Ask the model every prompt, each in a conversation of its own, and return the answers in order."""
        semaphore = asyncio.Semaphore(self._rollout.config.max_concurrency)

        async def ask(prompt: str) -> str | RamifyError:
            async with semaphore:
                try:
                    return await self._ask(prompt)
                except RamifyError as error:  # the other prompts are answered and recorded before the code gets it
                    if error.blame == "policy":
                        return error
                    raise

        tasks = [asyncio.create_task(ask(prompt), name="llm()") for prompt in prompts]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            await cancel_all(task for task in tasks if not task.done())
        answers = [result for result in results if isinstance(result, str)]
        if len(answers) < len(results):
            raise next(result for result in results if isinstance(result, RamifyError))
        return answers

    async def _ask(self, prompt: str) -> str:
        conversation = RlmConversation(self._rollout, self._depth + 1, prompt)
        message = Message("user", cut_text(prompt, self._rollout.config.max_prompt_chars, note=CUT_NOTE))
        caller = self._loop.last_reply
        fork_reason = "llm()" if caller is None else f"llm() of [{caller.node}]"
        stop = await conversation.run([self._rollout.system, message], {}, fork_reason=fork_reason)
        if stop in ("done", "length", self.answer_is_set.__name__):
            return conversation.answer
        raise BudgetExceeded(f"llm: the call ended without an answer: {stop}")


def build_system_message(task: Task, config: RlmHarnessConfig) -> Message:
    """Return the system message of all conversations. It includes the task's if its user speaks first."""
    texts = [config.system_prompt, *([task.system] if task.prompt is None and task.system else [])]
    return Message("system", "\n\n".join(texts))


def build_task_messages(task: Task, config: RlmHarnessConfig) -> tuple[list[Message], dict[str, Media]]:
    """Return the messages that start the task's conversation after the system message, and their images by hash.

    The task's own system prompt stands before the text of its first message, and long texts are cut.
    """
    messages, media = build_initial_messages(task)
    if task.prompt is None:
        return [], media
    system = messages.pop(0).text if messages and messages[0].role == "system" else ""
    messages = [_cut_message(message, config.max_prompt_chars) for message in messages]
    if system and messages and messages[0].role == "user":
        first = messages[0]
        content = (
            f"{system}\n\n{first.content}" if isinstance(first.content, str) else (TextPart(system), *first.content)
        )
        messages[0] = msgspec.structs.replace(first, content=content)
    elif system:
        messages.insert(0, Message("user", system))
    return messages, media


def get_task_context(task: Task) -> Any:
    """Return what the variable `context` holds: the task's field `context` if it has one, else its prompt."""
    if (value := getattr(task, "context", None)) is not None:
        return value
    return "" if task.prompt is None else task.prompt


def extract_final(text: str) -> str:
    """Return the text in the last `FINAL(...)`, or the whole text if there is none."""
    start = text.rfind(FINAL_MARK)
    if start < 0:
        return text
    start, depth = start + len(FINAL_MARK), 1
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index].strip()
    return text[start:].strip()


def _cut_message(message: Message, max_chars: int) -> Message:
    if not isinstance(message.content, str) or len(message.content) <= max_chars:
        return message
    return msgspec.structs.replace(message, content=cut_text(message.content, max_chars, note=CUT_NOTE))
