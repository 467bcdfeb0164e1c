"""A server with the protocol of OpenEnv, for tests without its package."""

import json
from typing import Any

from aiohttp import WSMsgType, web

ANY_OBJECT = {"type": "object", "properties": {"message": {"type": "string"}}}


class StandInServer:
    """Speaks the protocol: an episode ends after `length` steps, each with the number of the step as its reward.

    At step `ends_at_step` the server closes the session instead of answering. With `tools` it is an MCP environment,
    which refuses calls after the end of an episode.
    """

    def __init__(
        self, max_sessions: int = 8, length: int = 2, ends_at_step: int | None = None, tools: tuple[str, ...] = ()
    ) -> None:
        self.tools = tools
        self.max_sessions, self.length, self.ends_at_step = max_sessions, length, ends_at_step
        self.num_open = self.most_open = 0
        self.app = web.Application()
        self.app.router.add_get("/ws", self.handle)

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.num_open >= self.max_sessions:
            await socket.receive()
            await self._send(socket, "error", {"message": "full", "code": "CAPACITY_REACHED"})
            return socket
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self._serve(socket)
        finally:
            self.num_open -= 1
        return socket

    async def _serve(self, socket: web.WebSocketResponse) -> None:
        num_steps = 0
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                return
            request = json.loads(message.data)
            if request["type"] == "mcp":
                await self._list_tools(socket, request["data"])
                continue
            if request["type"] == "step" and self.tools and request["data"].get("type") == "call_tool":
                num_steps += 1
                await self._call_tool(socket, request["data"], num_steps)
                continue
            if request["type"] == "step" and "message" not in request["data"]:
                await self._send(socket, "error", {"message": "Invalid message", "code": "VALIDATION_ERROR"})
                continue
            num_steps += request["type"] == "step"
            if num_steps == self.ends_at_step:
                return
            observation = {"text": f"step {num_steps}", "seed": request["data"].get("seed")}
            is_over = num_steps == self.length
            await self._send(
                socket, "observation", {"observation": observation, "reward": float(num_steps), "done": is_over}
            )

    async def _list_tools(self, socket: web.WebSocketResponse, request: dict[str, Any]) -> None:
        if not self.tools:
            await self._send(socket, "error", {"message": "Unknown message type: mcp", "code": "UNKNOWN_TYPE"})
            return
        tools = [{"name": name, "description": "A tool.", "inputSchema": ANY_OBJECT} for name in self.tools]
        await self._send(socket, "mcp", {"jsonrpc": "2.0", "id": request["id"], "result": {"tools": tools}})

    async def _call_tool(self, socket: web.WebSocketResponse, call: dict[str, Any], num_steps: int) -> None:
        if num_steps > self.length:
            await self._send(socket, "error", {"message": "the episode is over", "code": "EXECUTION_ERROR"})
            return
        result = {"tool_name": call["tool_name"], "result": call["arguments"], "error": None}
        is_over = num_steps == self.length
        await self._send(socket, "observation", {"observation": result, "reward": float(num_steps), "done": is_over})

    async def _send(self, socket: web.WebSocketResponse, kind: str, data: dict[str, object]) -> None:
        await socket.send_str(json.dumps({"type": kind, "data": data}))
