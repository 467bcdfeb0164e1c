"""The client of one session of an OpenEnv server: JSON messages over a WebSocket at `/ws`."""

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any, Self

from ramify.core.errors import EnvironmentFault
from ramify.infer.dialects.message_parser import build_function_tool
from ramify.model.render import ToolSchema

if TYPE_CHECKING:
    import aiohttp

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
