"""openenv: an environment behind a server that speaks the protocol of OpenEnv.

The package of OpenEnv is not needed here, only where the server runs. A task is a seed. The observation of each step is
a user message, and each reply is an action. If the environment has MCP tools, they are offered to the policy, its calls
are the actions, and a reply without a call ends the rollout. Each rollout has a session of its own; if the server has
none free, the rollout waits.
"""

import asyncio
import atexit
import json
import random
import socket
import subprocess
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from pydantic import Field, model_validator

import ramify as rf
from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.env.adapters.conversation import PolicyConversation
from ramify.env.tasksets.code_tests import extract_code
from ramify.infer.dialects.message_parser import build_function_tool
from ramify.model.render import ToolSchema
from ramify.processes.wire.address import is_listening

if TYPE_CHECKING:
    import aiohttp

POLL_INTERVAL = 0.2  # seconds between two checks for a server that does not listen yet
PORT_PLACEHOLDER = "{port}"


class LocalServer:
    """A server process at a free port of this machine, started when it is needed. Rollouts of one worker share it."""

    def __init__(self, command: Sequence[str], *, startup_timeout: float) -> None:
        self._command, self._startup_timeout = list(command), startup_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._base_url, self._lock = "", asyncio.Lock()
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """The process id; 0 before the first start."""
        return self._process.pid if self._process is not None else 0

    async def get_base_url(self) -> str:
        """Return the address of the running server; start it if it does not run. Raises EnvironmentFault."""
        async with self._lock:
            if self._process is None or self._process.poll() is not None:
                await self._start()
            return self._base_url

    async def _start(self) -> None:
        port = _find_free_port()
        command = [argument.replace(PORT_PLACEHOLDER, str(port)) for argument in self._command]
        self._base_url = f"http://127.0.0.1:{port}"
        try:
            self._process = process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise EnvironmentFault(f"the OpenEnv server {command[0]!r} cannot be started: {error}") from error
        try:
            async with asyncio.timeout(self._startup_timeout):
                while not await is_listening(self._base_url):
                    if process.poll() is not None:
                        raise EnvironmentFault(f"the OpenEnv server exited with {process.returncode} while it started")
                    await asyncio.sleep(POLL_INTERVAL)
        except TimeoutError:
            self.stop()
            raise EnvironmentFault(
                f"the OpenEnv server did not listen on port {port} within {self._startup_timeout:g} s: its command "
                f"must contain {PORT_PLACEHOLDER}"
            ) from None

    def stop(self) -> None:
        """Kill the process."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


CAPACITY_REACHED = "CAPACITY_REACHED"  # the code of the error of a server that has no free session
INVALID = "VALIDATION_ERROR"  # the code of the error for an action that the environment does not have
RETRY_DELAY = 0.2  # seconds before the first new attempt to get a session, doubled each time
MAX_RETRY_DELAY = 2.0
MAX_MESSAGE_BYTES = 64 << 20


class ActionInvalid(Exception):
    """The server refused an action: the environment has no such action."""


class OpenEnvSession:
    """One session, which is one instance of the environment. Use it with `async with`.

    Entering waits while the server has no free session. Raises EnvironmentFault if the server cannot be reached, or
    ends the session.
    """

    def __init__(self, base_url: str, *, step_timeout: float) -> None:
        self.base_url, self._step_timeout = base_url.rstrip("/"), step_timeout
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self.num_waits = 0

    async def reset(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Start an episode and return the observation, with `reward` and `done`. Waits for a free session."""
        delay = RETRY_DELAY
        while True:
            response = await self._request({"type": "reset", "data": parameters})
            if response.get("type") != "error" or response["data"].get("code") != CAPACITY_REACHED:
                return self._get_observation(response)
            self.num_waits += 1
            await self._close_socket()
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, MAX_RETRY_DELAY)

    async def list_tools(self) -> list[ToolSchema]:
        """Return the tools of an MCP environment in the format of chat requests; none for any other environment."""
        request: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        response = await self._request({"type": "mcp", "data": request})
        if response.get("type") != "mcp":
            return []
        result: dict[str, Any] = response["data"].get("result") or {}
        tools: list[dict[str, Any]] = result.get("tools") or []
        return [
            build_function_tool(
                tool["name"], tool.get("description"), tool.get("inputSchema") or tool.get("input_schema")
            )
            for tool in tools
        ]

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """Take an action and return the observation, with `reward` and `done`. Raises ActionInvalid."""
        response = await self._request({"type": "step", "data": action})
        if response.get("type") == "error" and response["data"].get("code") == INVALID:
            raise ActionInvalid(
                json.dumps(response["data"].get("errors", response["data"].get("message")), default=str)
            )
        return self._get_observation(response)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close_socket()
        if self._http is not None:
            await self._http.close()

    async def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        import aiohttp  # takes long to load

        try:
            async with asyncio.timeout(self._step_timeout):
                socket = self._socket or await self._connect()
                await socket.send_str(json.dumps(message))
                received = await socket.receive()
        except TimeoutError:
            raise EnvironmentFault(f"{self.base_url} did not answer within {self._step_timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFault(f"the OpenEnv server at {self.base_url} cannot be reached: {error}") from error
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentFault(f"the OpenEnv server at {self.base_url} ended the session ({received.type.name})")
        return json.loads(received.data)

    async def _connect(self) -> "aiohttp.ClientWebSocketResponse":
        import aiohttp

        self._http = self._http or aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(f"{self.base_url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
        return self._socket

    async def _close_socket(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()

    def _get_observation(self, response: dict[str, Any]) -> dict[str, Any]:
        if response.get("type") != "observation":
            data = response.get("data", {})
            raise EnvironmentFault(f"{self.base_url}: {data.get('code', 'error')}: {data.get('message', response)}")
        return response["data"]


EVAL_SEED_OFFSET = 1_000_000  # the seeds of the split `eval` begin here
CONTAINER_PORT = 8000  # at which images of OpenEnv listen


class OpenEnvConfig(rf.TasksetConfig):
    """The server, its tasks, and how replies become actions."""

    base_url: str | None = None
    """The address of a running server."""
    command: list[str] = []
    """The command that starts a local server; {port} in it is a free port."""
    image: str | None = None
    """The image of a local server, which `engine` runs."""
    engine: str = "docker"
    """The program that runs images."""
    startup_timeout: float = Field(default=180.0, gt=0)
    """Seconds until a started server must listen."""
    step_timeout: float = Field(default=120.0, gt=0)
    """Seconds for one answer of the server."""
    num_tasks: int = Field(default=1000, ge=1)
    """Number of tasks. Each is a seed that the server is reset with."""
    reset: dict[str, Any] = {}
    """Further parameters of each reset."""
    instructions: str = ""
    """The system prompt."""
    action_field: str | None = None
    """The field of an action that takes the reply as text. Default: the reply is an action in JSON."""
    observation_field: str | None = None
    """The field of an observation that is shown. Default: the whole observation in JSON."""
    reward: Literal["sum", "last"] = "sum"
    """How the rewards of the steps make the reward of a rollout."""
    max_invalid_actions: int = Field(default=3, ge=1)
    """Replies in a row that are not valid actions, after which the rollout ends."""

    @model_validator(mode="after")
    def _one_server_is_named(self) -> "OpenEnvConfig":
        if sum(map(bool, (self.base_url, self.command, self.image))) != 1:
            raise ValueError("set one of base_url, command and image")
        return self


class OpenEnvTask(rf.Task):
    """A seed of the environment."""

    seed: int


class OpenEnv(rf.Taskset):
    """Episodes of an environment behind an OpenEnv server."""

    config: OpenEnvConfig
    task_type = OpenEnvTask

    def __init__(self, config: OpenEnvConfig) -> None:
        super().__init__(config)
        publish = ["-p", f"127.0.0.1:{{port}}:{CONTAINER_PORT}"]
        command = [config.engine, "run", "--rm", *publish, config.image] if config.image else config.command
        self.server = LocalServer(command, startup_timeout=config.startup_timeout) if command else None

    def load(self) -> Iterator[OpenEnvTask]:
        """Yield one task per seed; the splits have different seeds."""
        offset = EVAL_SEED_OFFSET if self.config.split == "eval" else 0
        for seed in range(offset, offset + self.config.num_tasks):
            yield OpenEnvTask(system=self.config.instructions or None, key=f"seed-{seed}", seed=seed)

    async def run_agent(self, task: OpenEnvTask, trace: rf.Trace, endpoint: rf.Endpoint, state: SimpleNamespace) -> str:
        """Play one episode: observation, reply, action, until the environment is done."""
        config = self.config
        base_url = await self.server.get_base_url() if self.server is not None else config.base_url
        assert base_url is not None  # the config names one server
        conversation = PolicyConversation(endpoint, trace, config.instructions)
        step_rewards = state.step_rewards = list[float]()
        num_invalid = 0
        async with OpenEnvSession(base_url, step_timeout=config.step_timeout) as session:
            result = await session.reset({"seed": task.seed, "episode_id": trace.id[:255], **config.reset})
            trace.info["session_waits"] = session.num_waits
            conversation.tools = await session.list_tools()
            messages = [{"role": "user", "content": self._format_observation(result)}]
            while not result.get("done"):
                reply = await conversation.send_messages(messages)
                if reply is None:
                    return conversation.stop
                if conversation.tools and not reply.tool_calls:
                    return "done"  # an environment of tools ends with the answer of the agent
                messages = list[dict[str, str]]()
                for call in reply.tool_calls or (None,):
                    message = {"role": "user"} if call is None else {"role": "tool", "tool_call_id": call.id}
                    try:
                        result = await session.step(self._parse_action(reply, call))
                    except ActionInvalid as error:
                        num_invalid += 1
                        if num_invalid == config.max_invalid_actions:
                            return "invalid_action"
                        messages.append({**message, "content": f"error: this is not a valid action: {error}"})
                        continue
                    num_invalid = 0
                    step_rewards.append(float(result.get("reward") or 0.0))
                    messages.append({**message, "content": self._format_observation(result)})
                    if result.get("done"):  # further calls would come after the end of the episode
                        break
        return "done"

    @rf.reward
    def episode(self, state: SimpleNamespace) -> float:
        """The sum of the rewards of the steps, or the last one; 0 without a step."""
        rewards: list[float] = state.step_rewards
        return sum(rewards) if self.config.reward == "sum" else (rewards or [0.0])[-1]

    @rf.metric
    def steps(self, state: SimpleNamespace) -> float:
        """The number of actions that the environment took."""
        return float(len(state.step_rewards))

    def _parse_action(self, reply: rf.Message, call: rf.ToolCall | None) -> dict[str, Any]:
        """Return the action of a call, or else of the text. Raises ActionInvalid if that should be JSON and is not."""
        if call is not None:
            return {"type": "call_tool", "tool_name": call.name, "arguments": _parse_json(call.arguments)}
        if self.config.action_field is not None:
            return {self.config.action_field: reply.text}
        return _parse_json(extract_code(reply.text))

    def _format_observation(self, result: dict[str, Any]) -> str:
        """Return the text of an observation. Raises ConfigInvalid if it lacks the field of the config."""
        observation, field = result.get("observation", result), self.config.observation_field
        if field is None or "tool_name" in observation:
            return json.dumps(observation)
        if field not in observation:
            raise ConfigInvalid(
                f"observations have {', '.join(observation)}, not {field!r}", key="taskset.observation_field"
            )
        return str(observation[field])


def _parse_json(text: str) -> dict[str, Any]:
    """Return the object of a JSON text. Raises ActionInvalid if it is anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ActionInvalid(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ActionInvalid("not a JSON object")
    return cast(dict[str, Any], value)
