"""The program harness: any command-line agent works on the task, and calls the policy over HTTP.

The program runs in the runtime and knows only the address, the key and the model name in its environment. The gateway
records its calls, so the program needs no change to be trained. If the taskset has a simulated user, the program is run
once for each message of the user, and continues its own conversation. Presets (`ramify.rollout.harness.presets`) are
subclasses with the command line, the environment and the configuration files of a known program.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ramify.core.errors import AgentFailed, ConfigInvalid, EnvironmentFault, ProviderError, SandboxError
from ramify.env import Hook, RolloutContext, Runtime, RuntimeProcess, Task, TasksetHooks, ToolSet, User
from ramify.env.mcp import check_mcp_library
from ramify.env.runtime import Capability, ExecResult, ResourceLimits
from ramify.env.user import ask_user
from ramify.infer.gateway.config import MCP_PATH
from ramify.infer.gateway.main_calls import find_side_calls
from ramify.model.render.prompt_images import find_image_parts
from ramify.processes.exit import SIGNAL_EXIT_OFFSET
from ramify.rollout.harness.base import Harness, build_initial_messages, get_user_prompt_texts, join_prompt_text
from ramify.rollout.harness.config import HarnessConfig
from ramify.rollout.harness.shell_tools import shorten_text
from ramify.rollout.runtime.config import PreloadConfig

if TYPE_CHECKING:
    from ramify.infer.gateway import RolloutSession

PLACEHOLDERS = (
    *("prompt", "prompt_file", "openai_base_url", "anthropic_base_url", "mcp_url", "mcp_config", "api_key", "model"),
    *("context_length", "workdir", "home", "turn"),
)
TURN_PLACEHOLDERS = {"prompt", "turn"}  # whose values differ between the turns of a conversation
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
PROMPT_FILE = "~/prompt.md"
MCP_CONFIG_FILE = "~/mcp.json"
MCP_CONFIG = """\
{"mcpServers": {"taskset": {"type": "http", "url": "{mcp_url}", "headers": {"Authorization": "Bearer {api_key}"}}}}
"""
DEFAULT_CONTEXT_LENGTH = 131072  # told to programs that need a number, if the policy does not state its own
HOME_TIMEOUT = 30.0  # seconds for a shell in the runtime to print $HOME
SANDBOX_DIRECTORIES = {"sandbox": "/sandbox/", "local": None}  # runtimes that write only beneath it; None: it varies
EXCERPT_CHARS = 2000  # of the program's output, in an error message


class ProgramHarnessConfig(HarnessConfig):
    """Configuration of the program harness.

    The texts of `command`, `env` and `files` may contain placeholders: `{prompt}`, `{prompt_file}`,
    `{openai_base_url}`, `{anthropic_base_url}`, `{mcp_url}`, `{mcp_config}`, `{api_key}`, `{model}`,
    `{context_length}`, `{workdir}`, `{home}` and `{turn}`. Other braces are kept.
    """

    id: str = "program"
    tool_timeout: float | None = Field(default=300.0, gt=0)
    command: list[str] = Field(min_length=1)
    """The program and its arguments."""
    prompt: Literal["arg", "stdin", "file"] = "arg"
    """How the program gets the task: as its last argument (or where `{prompt}` is), on its standard input, or in the
    file `{prompt_file}`."""
    continue_args: list[str] = []
    """Arguments that are added to the command from the second turn on, so that the program continues its conversation
    with the message of a simulated user. A program without such an option gets the number of the turn as `{turn}`."""
    env: dict[str, str] = {}
    """Environment variables of the program."""
    pass_env: list[str] = []
    """Names of environment variables that the program gets from the worker process."""
    files: dict[str, str] = {}
    """Files that are written before the program starts: text by path. A path is relative to the work directory, or
    begins with `~/`. A file with `{prompt}` or `{turn}` is written again at each turn."""
    copy_files: dict[str, str] = {}
    """Files of this machine that are copied into the runtime before the program starts: the path of the file by its
    path in the runtime, which is relative to the work directory or begins with `~/`."""
    preload: list[str] = []
    """Packages of a Python agent that are imported once per worker. Each rollout then starts as a fork that has them;
    the runtime `sandbox` can do this."""
    max_output_chars: int = Field(default=10_000, ge=0)
    """Characters that the trace keeps of the program's standard output, and of its standard error: the first and the
    last half."""

    @field_validator("copy_files")
    @classmethod
    def _copied_files_exist(cls, files: dict[str, str]) -> dict[str, str]:
        for source in files.values():
            if not Path(source).is_file():
                raise ValueError(f"{source} is not a file of this machine, seen from {Path.cwd()}")
        return files

    @model_validator(mode="after")
    def _placeholders_match_prompt(self) -> "ProgramHarnessConfig":
        used = find_placeholders(self.texts)
        if self.prompt == "file" and "prompt_file" not in used:
            raise ValueError('prompt = "file" needs {prompt_file} in the command, such as ["agent", "{prompt_file}"]')
        if self.prompt != "file" and "prompt_file" in used:
            raise ValueError('{prompt_file} needs prompt = "file"')
        return self

    @property
    def texts(self) -> list[str]:
        """The texts that may contain placeholders."""
        return [*self.command, *self.continue_args, *self.env.values(), *self.files.values()]

    @model_validator(mode="after")
    def _preload_requires_python_command(self) -> "ProgramHarnessConfig":
        self.build_preload()
        return self

    def build_preload(self) -> PreloadConfig | None:
        """Return what a template of sandboxes imports; None without `preload`."""
        return PreloadConfig.from_command(self.command, self.preload, self.env) if self.preload else None


def find_placeholders(texts: Iterable[str]) -> set[str]:
    """Return the names of the placeholders in the texts."""
    return {name for text in texts for name in _PLACEHOLDER.findall(text)}


def fill_placeholders(text: str, values: Mapping[str, str]) -> str:
    """Return the text with the values of its placeholders."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


class ProgramHarness(Harness):
    """Runs a command-line agent in the runtime of the rollout.

    - `program_env`, `program_files`: environment variables and files of a preset; the config's are added.
    - `tool_files`: files of a preset for tasksets with tools; they replace `program_files` with the same path.
    - `tool_prompt`: text that a preset adds to the prompt if there are tools; a list of the tools follows.
    """

    config: ProgramHarnessConfig
    requires_endpoint = True
    program_env: ClassVar[Mapping[str, str]] = {}
    program_files: ClassVar[Mapping[str, str]] = {}
    tool_files: ClassVar[Mapping[str, str]] = {}
    tool_prompt: ClassVar[str] = ""
    _has_tools = False

    def check_compatibility(self, hooks: TasksetHooks, runtime: Runtime) -> None:
        """Raise ConfigInvalid for users whom the program cannot answer, and for what the program lacks."""
        self._has_tools = bool(hooks.static_tools.tools or hooks.tools or self.config.mcp)
        if self._has_tools:
            check_mcp_library()
        can_continue = self.config.continue_args or "turn" in find_placeholders(self.config.texts)
        if hooks.user is not None and not can_continue:
            raise ConfigInvalid(
                f"the taskset has a `user` hook, and the harness {self.config.id!r} does not say how its program "
                "continues a conversation: set harness.continue_args, put {turn} into its command, or use the harness "
                "chat"
            )
        if missing := [name for name in self.config.pass_env if name not in os.environ]:
            raise ConfigInvalid(
                f"{', '.join(missing)} not set in the environment of the worker", key="harness.pass_env"
            )
        paths = [("files", path) for path in self.config.files] + [
            ("copy_files", path) for path in self.config.copy_files
        ]
        if outside := [(key, path) for key, path in paths if _is_outside(path, runtime.config.id)]:
            key, path = outside[0]
            raise ConfigInvalid(
                f"harness.{key}: {path!r} is outside the sandbox; use a path relative to the work directory, or ~/..."
            )
        runtime.capabilities.check(Capability.GATEWAY, f"the harness {self.config.id!r}", runtime.config.id)

    def check_task(self, task: Task, hooks: TasksetHooks) -> None:
        """Raise ConfigInvalid if the task has no prompt that is a text."""
        if task.prompt is None and hooks.user is None:
            raise ConfigInvalid(f"task {task.identity} has no prompt, which the harness {self.config.id!r} needs")
        messages, media = build_initial_messages(task)
        if media or any(message.role not in ("system", "developer", "user") for message in messages):
            raise ConfigInvalid(
                f"task {task.identity} starts with images or with messages of an assistant or a tool; "
                f"the harness {self.config.id!r} can only pass on a text"
            )

    async def run(
        self,
        context: RolloutContext,
        session: "RolloutSession",
        tools: ToolSet,
        user: User | None,
        stop_hooks: Sequence[Hook],
    ) -> str:
        """Run the program, once for each message of the user, until one of them or a stop hook ends the rollout.

        `trace.info["program"]` has the result of the last turn.
        """
        assert context.runtime is not None
        prompt = join_prompt_text(context.task)
        if context.task.prompt is None:
            first_message = await _ask_user_for_text(user, context, session, reply=None, turn=0)
            if first_message is None:
                return "user"
            prompt = f"{prompt}\n\n{first_message}" if prompt else first_message
        values = await self._build_values(context.runtime, context, session)
        if self.tool_prompt and len(tools):
            prompt = "\n\n".join([prompt, fill_placeholders(self.tool_prompt, values) + _list_tools(tools)])
        turn = 0
        while True:
            turn, num_calls = turn + 1, session.num_turns
            result = await self._run_turn({**values, "prompt": prompt, "turn": str(turn)}, context, session, stop_hooks)
            if isinstance(result, str):
                return result
            stop = _find_stop_reason(result, session, context)
            if user is None or result.returncode or session.num_turns == num_calls:
                return stop
            reply = _find_last_reply(session, context)
            message = await _ask_user_for_text(user, context, session, reply=reply, turn=turn)
            if message is None:
                return "user"
            if session.exhausted_limit is not None:
                return session.exhausted_limit
            prompt = message

    async def _run_turn(
        self, values: Mapping[str, str], context: RolloutContext, session: "RolloutSession", stop_hooks: Sequence[Hook]
    ) -> ExecResult | str:
        """Run the program once; return its result, or the name of the stop hook that ended it."""
        assert context.runtime is not None
        with _signal_replies(session) as replied:
            process = await self._start(context.runtime, values)
            try:
                result = await _wait_or_stop(process, session, context, stop_hooks, replied)
            except BaseException:
                with contextlib.suppress(AgentFailed, SandboxError):  # the reason why it is killed matters, not this
                    self._record(context, await _kill(process), session, values["turn"])
                raise
        self._record(context, await _kill(process) if isinstance(result, str) else result, session, values["turn"])
        return result

    async def _start(self, runtime: Runtime, values: Mapping[str, str]) -> RuntimeProcess:
        """Write the files of a turn and start the program. Raises EnvironmentFault if the runtime cannot run it."""
        config = self.config
        is_first = values["turn"] == "1"
        env_texts = {**self.program_env, **config.env}
        file_texts = self._get_files()
        arguments = [*config.command, *(() if is_first else config.continue_args)]
        used = find_placeholders([*arguments, *env_texts.values(), *file_texts.values()])
        if config.prompt == "file":
            file_texts[PROMPT_FILE] = "{prompt}"
        if "mcp_config" in used:
            file_texts[MCP_CONFIG_FILE] = MCP_CONFIG
        for path, text in file_texts.items():
            if is_first or find_placeholders([text]) & TURN_PLACEHOLDERS:
                await runtime.write(_expand_home(path, values), fill_placeholders(text, values))
        for path, source in config.copy_files.items() if is_first else ():
            await runtime.write(_expand_home(path, values), await asyncio.to_thread(Path(source).read_bytes))
        command = [fill_placeholders(argument, values) for argument in arguments]
        if config.prompt == "arg" and "prompt" not in used:
            command.append(values["prompt"])
        env = {name: os.environ[name] for name in config.pass_env if name in os.environ}
        env |= _build_client_env(values)
        env |= {name: fill_placeholders(text, values) for name, text in env_texts.items()}
        try:
            stdin = values["prompt"].encode() if config.prompt == "stdin" else None
            return await runtime.spawn_agent(command, env=env, stdin=stdin)
        except (OSError, ValueError) as error:
            raise EnvironmentFault(
                f"the program {command[0]!r} cannot be run in the runtime: {error}; install it, and for a sandbox name "
                "its directory in runtime.read_only and runtime.prepend_path"
            ) from error

    def _get_files(self) -> dict[str, str]:
        """Return the texts of the files of the preset and of the config, by path."""
        return {**self.program_files, **(self.tool_files if self._has_tools else {}), **self.config.files}

    async def _build_values(
        self, runtime: Runtime, context: RolloutContext, session: "RolloutSession"
    ) -> dict[str, str]:
        """Return the values of the placeholders but `prompt` and `turn`. The home directory is looked up if needed."""
        assert context.endpoint is not None
        base_url = await runtime.expose(context.endpoint.base_url)
        files = self._get_files()
        texts = [*self.config.texts, *self.program_env.values(), *files.values(), *files, *self.config.copy_files]
        needs_home = self.config.prompt == "file" or bool({"home", "mcp_config"} & find_placeholders(texts))
        needs_home = needs_home or any(text.startswith("~/") for text in texts)
        home = await _find_home(runtime) if needs_home else ""
        return {
            "prompt_file": PROMPT_FILE.replace("~", home),
            "openai_base_url": base_url,
            "anthropic_base_url": base_url.removesuffix("/v1"),  # its clients append /v1
            "mcp_url": base_url + MCP_PATH,
            "mcp_config": MCP_CONFIG_FILE.replace("~", home),
            "api_key": context.endpoint.api_key,
            "model": context.endpoint.model,
            "context_length": str(session.policy.max_model_len or DEFAULT_CONTEXT_LENGTH),
            "workdir": str(runtime.workdir),
            "home": home,
        }

    def _record(self, context: RolloutContext, result: ExecResult, session: "RolloutSession", turn: str) -> None:
        """Store the result of a turn for rewards and for whoever reads the trace."""
        context.trace.info["program"] = {
            "turn": int(turn),
            "reply": _find_last_reply(session, context),
            "exit_code": None if result.timed_out else result.returncode,  # None: it was killed
            "stdout": _shorten_output(result.stdout, self.config.max_output_chars),
            "stderr": _shorten_output(result.stderr, self.config.max_output_chars),
            "num_calls": session.num_turns,
        }


def _is_outside(path: str, runtime_id: str) -> bool:
    """Return whether the runtime could not write a file at this path."""
    if runtime_id not in SANDBOX_DIRECTORIES:
        return False
    sandbox_directory = SANDBOX_DIRECTORIES[runtime_id]
    is_inside = not path.startswith("/") or (sandbox_directory is not None and path.startswith(sandbox_directory))
    return not is_inside or ".." in PurePosixPath(path).parts


def _build_client_env(values: Mapping[str, str]) -> dict[str, str]:
    """Return the variables from which clients of OpenAI, Anthropic and MCP take address, key and model."""
    env = {"MCP_SERVER_URL": values["mcp_url"]}
    for name in ("openai", "anthropic"):
        env[f"{name.upper()}_BASE_URL"] = values[f"{name}_base_url"]
        env[f"{name.upper()}_API_KEY"] = values["api_key"]
        env[f"{name.upper()}_MODEL"] = values["model"]
    return env


def _list_tools(tools: ToolSet) -> str:
    """Return one line for each tool: its name, its parameters and its description."""
    functions = [schema["function"] for schema in tools.schemas]
    return "".join(
        f"\n- {function['name']} {json.dumps(function['parameters'].get('properties', {}))}: {function['description']}"
        for function in functions
    )


async def _find_home(runtime: Runtime) -> str:
    """Return the home directory of programs in the runtime."""
    result = await runtime.run(["sh", "-c", 'printf %s "$HOME"'], timeout=HOME_TIMEOUT)
    if result.returncode or not result.text.startswith("/"):
        raise EnvironmentFault(f"the runtime has no home directory: {result.text or result.error_text!r}")
    return result.text


def _expand_home(path: str, values: Mapping[str, str]) -> str:
    return values["home"] + path[1:] if path.startswith("~/") else fill_placeholders(path, values)


@contextlib.contextmanager
def _signal_replies(session: "RolloutSession") -> Generator[asyncio.Event]:
    """Yield an event that is set whenever a reply or a tool call was recorded."""
    event, previous = asyncio.Event(), session.on_reply

    def on_reply(reply: Any) -> None:
        if previous is not None:
            previous(reply)
        event.set()

    session.on_reply = on_reply
    if session.tools is not None:
        session.tools.on_call = event.set
    try:
        yield event
    finally:
        session.on_reply = previous


async def _wait_or_stop(
    process: RuntimeProcess,
    session: "RolloutSession",
    context: RolloutContext,
    stop_hooks: Sequence[Hook],
    replied: asyncio.Event,
) -> ExecResult | str:
    """Wait until the program exits and return its result, or the name of the stop hook that ends it before."""
    exited = asyncio.ensure_future(process.wait(session.call_timeout))
    try:
        while stop_hooks and not exited.done():
            next_reply = asyncio.ensure_future(replied.wait())
            try:
                await asyncio.wait({exited, next_reply}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                next_reply.cancel()
            replied.clear()
            for hook in stop_hooks:
                if session.num_turns and await hook(context):
                    return hook.name
        return await exited
    finally:
        exited.cancel()


async def _ask_user_for_text(
    user: User | None, context: RolloutContext, session: "RolloutSession", *, reply: str | None, turn: int
) -> str | None:
    """Return the text of the user's next message, or None to end the conversation.

    Model calls that the user makes meanwhile are a hook's calls, not the agent's.
    """
    session.is_agent_running = False
    try:
        message = await ask_user(user, context, reply=reply, turn=turn)
    finally:
        session.is_agent_running = True
    if message is not None and find_image_parts([message]):
        raise EnvironmentFault(
            f"task {context.task.identity}: the user's message has an image, and a program gets its messages as text: "
            "use the harness `chat`"
        )
    return None if message is None else message.text


async def _kill(process: RuntimeProcess) -> ExecResult:
    """Kill the program and return what it had written."""
    return await process.wait(0.0)


def _find_stop_reason(result: ExecResult, session: "RolloutSession", context: RolloutContext) -> str:
    """Return the stop reason of a program that has exited.

    Raises AgentFailed if it failed before the first reply, and ProviderError if it failed because the engine did.
    """
    if session.exhausted_limit is not None:
        return session.exhausted_limit
    if result.returncode == 0:
        return "done"
    failures = [refusal for refusal in context.trace.info.get("refusals", []) if refusal["status"] >= 500]
    if failures:
        raise ProviderError(f"the program failed after a model call failed: {failures[-1]['message']}")
    if session.num_turns == 0:
        output = _put_last_line_first(_shorten_output(result.stderr or result.stdout, EXCERPT_CHARS))
        assert context.runtime is not None
        ending = f"{_describe_exit(result.returncode, context.runtime.get_limits(context.task))} before the first reply"
        raise AgentFailed(f"the program {ending}{output and f': {output}'}")
    return "exit"


def _describe_exit(code: int, limits: ResourceLimits) -> str:
    """Return how a program ended. A program that exceeds the limit on memory is killed by signal 9."""
    description = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    is_killed = code in (-signal.SIGKILL, SIGNAL_EXIT_OFFSET + signal.SIGKILL)  # the second: its shell reports it
    if is_killed and limits.memory_mb is not None:
        return f"{description}, maybe because it exceeded memory_mb = {limits.memory_mb},"
    return description


def _put_last_line_first(output: str) -> str:
    """Return the last line of the output, then all of it.

    The last line often names the error, and lists of errors show only the first line of a message.
    """
    lines = output.strip().splitlines()
    return output.strip() if len(lines) < 2 else f"{lines[-1].strip()}\n{output.strip()}"


def _find_last_reply(session: "RolloutSession", context: RolloutContext) -> str:
    """Return the last reply of the conversation about the task; a program may ask for a title after it."""
    side_calls = find_side_calls(session.recorded_calls, lambda: get_user_prompt_texts(context.task))
    nodes = [call.node for call in session.recorded_calls if call.node not in side_calls]
    return context.trace.nodes[nodes[-1]].message.text if nodes else context.trace.last_reply


def _shorten_output(output: bytes, max_chars: int) -> str:
    return shorten_text(output.decode("utf-8", "replace"), max_chars)
