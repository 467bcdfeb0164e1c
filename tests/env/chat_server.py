"""A chat endpoint on a real socket whose answers a test defines."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Answer = Callable[[dict[str, Any]], "str | Response"]


class ChatServer:
    """Answers chat completions with `answer(body)`, and records the requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answer: Answer = lambda body: "hello"
        self.url = ""

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        reply = self.answer(body)
        if isinstance(reply, Response):
            return reply
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}
        return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 3}})

    def reset(self, answer: Answer) -> None:
        self.requests, self.keys, self.answer = [], [], answer


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an ASGI app and yield its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    started = threading.Event()
    startup = server.startup

    async def announce(*args: Any, **kwargs: Any) -> None:
        await startup(*args, **kwargs)
        started.set()

    server.startup = announce  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)


@contextlib.contextmanager
def chat_server() -> Iterator[ChatServer]:
    fake = ChatServer()
    with serving(Starlette(routes=[Route("/v1/chat/completions", fake.complete, methods=["POST"])])) as address:
        fake.url = f"{address}/v1"
        yield fake
