"""A server with the protocol of OpenEnv, for tests without its package."""

import json

from aiohttp import WSMsgType, web


class StandInServer:
    """Speaks the protocol: an episode ends after `length` steps, each with the number of the step as its reward.

    At step `ends_at_step` the server closes the session instead of answering.
    """

    def __init__(self, max_sessions: int = 8, length: int = 2, ends_at_step: int | None = None) -> None:
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

    async def _send(self, socket: web.WebSocketResponse, kind: str, data: dict[str, object]) -> None:
        await socket.send_str(json.dumps({"type": kind, "data": data}))
