"""A server with the protocol of OpenEnv for quick tests, and servers made with the package for `make test-envs`.

`python openenv_servers.py NAME PORT MAX_SESSIONS` runs `echo` or `counter` with the package `openenv`.
"""

import json
import sys

from aiohttp import WSMsgType, web


class StandInServer:
    """Speaks the protocol: an episode ends after `length` steps, each with the number of the step as its reward."""

    def __init__(self, max_sessions: int = 8, length: int = 2) -> None:
        self.max_sessions, self.length = max_sessions, length
        self.num_open = self.most_open = 0
        self.sockets: list[web.WebSocketResponse] = []
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
        self.sockets.append(socket)
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
            observation = {"text": f"step {num_steps}", "seed": request["data"].get("seed")}
            is_over = num_steps == self.length
            await self._send(
                socket, "observation", {"observation": observation, "reward": float(num_steps), "done": is_over}
            )

    async def _send(self, socket: web.WebSocketResponse, kind: str, data: dict[str, object]) -> None:
        await socket.send_str(json.dumps({"type": kind, "data": data}))


def serve_with_package(name: str, port: int, max_sessions: int) -> None:
    """Run an environment in a server of the package."""
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class TextAction(Action):
        message: str

    class TextObservation(Observation):
        text: str

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            return TextObservation(text=f"Say something, seed {seed}.", reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            return TextObservation(text=action.message, reward=1.0 / (1 + len(action.message)), done=True)

        @property
        def state(self):
            return State()

    class Counter(Environment):
        """Counts the letters of all messages; the third ends the episode."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.steps, self.letters = 0, 0
            return TextObservation(text="Write as many letters as you can.", reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            self.steps += 1
            self.letters += sum(character.isalpha() for character in action.message)
            return TextObservation(text=f"{self.letters} letters", reward=self.letters / 100, done=self.steps == 3)

        @property
        def state(self):
            return State(step_count=self.steps)

    environment = {"echo": Echo, "counter": Counter}[name]
    app = create_fastapi_app(environment, TextAction, TextObservation, max_concurrent_envs=max_sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    serve_with_package(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
