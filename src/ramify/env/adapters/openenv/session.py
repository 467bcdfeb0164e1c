"""The client of one session of an OpenEnv server: JSON messages over a WebSocket at `/ws`."""

import asyncio
import atexit
import json
import random
import socket
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from ramify.core.errors import EnvironmentFault
from ramify.infer.dialects.message_parser import build_function_tool
from ramify.model.render import ToolSchema
from ramify.processes.wire.address import is_listening

if TYPE_CHECKING:
    import aiohttp

# A local OpenEnv server: a process that is started when it is first needed, and again after it has ended.

POLL_INTERVAL = 0.2  # seconds between two checks for a server that does not listen yet
PORT_PLACEHOLDER = "{port}"


class LocalServer:
    """One process that serves at a free port of this machine. Rollouts of one worker share it."""

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

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool and return the observation, with `reward` and `done`. Raises ActionInvalid."""
        return await self.step({"type": "call_tool", "tool_name": name, "arguments": arguments})

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
