"""The HTTP server: routes, error handlers, and starting and closing the engine.

The type of an error decides the status: an invalid request is 400, a full queue 503, a deadline 504, weights that do
not fit 409; any other error is 500. The body holds its name.
"""

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ramify import __version__
from ramify.dialects.http_format import decode_body, format_openai_error
from ramify.errors import ConfigInvalid, PortTaken, RamifyError, RequestInvalid
from ramify.infer.config import ServerConfig
from ramify.infer.engine import Engine
from ramify.infer.generate_api import generate
from ramify.infer.openai_api import create_chat_completion, create_completion
from ramify.infer.request_bodies import PauseBody, UpdateWeightsBody
from ramify.infer.streaming import ClientDisconnected, build_error_body, get_status
from ramify.infer.tokenize_api import detokenize, tokenize, tokenizer_info
from ramify.render import Renderer
from ramify.wire.browser_guard import BrowserGuard
from ramify.wire.http_server import HttpServer

CONTROL_PATHS = ("/pause", "/resume", "/update_weights")
ERROR_TYPES = {404: "not_found_error", 405: "method_not_allowed"}
Handler = Callable[[HttpRequest], Awaitable[Response]]


def build_app(engine: Engine, *, name: str, renderer: Renderer | None = None, timeout: float = 3600.0) -> Starlette:
    """Build the application for a started engine."""
    started = int(time.time())

    async def health(_: HttpRequest) -> Response:
        if engine.failure is not None:
            return JSONResponse({"status": "failed", "reason": engine.failure.message}, 503)
        return JSONResponse({"status": "paused" if engine.paused else "ok"})

    def model_card() -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "ramify",
            "max_model_len": engine.core.max_model_len,
            "version": engine.core.version._asdict(),
            "operators": engine.core.runner.ops_description,
        }

    async def models(_: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [model_card()]})

    async def model(http: HttpRequest) -> Response:
        if http.path_params["name"] != name:
            raise HTTPException(404, f"this server has one model, {name}")
        return JSONResponse(model_card())

    async def version(_: HttpRequest) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(_: HttpRequest) -> Response:
        return PlainTextResponse(engine.format_metrics(), media_type="text/plain; version=0.0.4")

    async def pause(http: HttpRequest) -> Response:
        mode = http.query_params.get("mode") or decode_body(await http.body(), PauseBody).mode
        if mode != "keep" and mode != "abort":
            raise RequestInvalid(f"mode: expected keep or abort, got {mode!r}")
        await engine.pause(mode)
        return JSONResponse({"status": "paused"})

    async def resume(_: HttpRequest) -> Response:
        await engine.resume()
        return JSONResponse({"status": "ok"})

    async def update_weights(http: HttpRequest) -> Response:
        body = decode_body(await http.body(), UpdateWeightsBody)
        if body.kv != "recompute" and body.kv != "keep":
            raise RequestInvalid(f"kv: expected recompute or keep, got {body.kv!r}")
        version = await engine.update_weights(Path(body.path), body.kv)
        return JSONResponse({"version": version._asdict(), "seconds": engine.swap_seconds})

    text_arguments: dict[str, Any] = {"engine": engine, "renderer": renderer}
    get_routes: dict[str, Handler] = {
        "/health": health,
        "/v1/models": models,
        "/v1/models/{name:path}": model,
        "/metrics": metrics,
        "/version": version,
        "/tokenizer_info": partial(tokenizer_info, **text_arguments),
    }
    post_routes: dict[str, Handler] = {
        "/inference/v1/generate": partial(generate, engine=engine, timeout=timeout),
        "/v1/completions": partial(create_completion, **text_arguments, timeout=timeout),
        "/v1/chat/completions": partial(create_chat_completion, **text_arguments, timeout=timeout),
        "/tokenize": partial(tokenize, **text_arguments),
        "/detokenize": partial(detokenize, renderer=renderer),
        "/pause": pause,
        "/resume": resume,
        "/update_weights": update_weights,
    }
    routes = [Route(path, handler, methods=["POST"]) for path, handler in post_routes.items()]  # most used first
    routes += [Route(path, handler, methods=["GET"]) for path, handler in get_routes.items()]
    handlers: dict[Any, Any] = {
        RamifyError: _handle_ramify_error,
        ClientDisconnected: _handle_disconnect,
        ClientDisconnect: _handle_disconnect,
        HTTPException: _handle_http_exception,
        Exception: _handle_unexpected,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


async def _handle_ramify_error(_: HttpRequest, error: RamifyError) -> Response:
    status = get_status(error)
    return JSONResponse(build_error_body(error), status, headers={"Retry-After": "1"} if status == 503 else None)


async def _handle_disconnect(_: HttpRequest, __: ClientDisconnected | ClientDisconnect) -> Response:
    return Response(status_code=499)


async def _handle_http_exception(http: HttpRequest, error: HTTPException) -> Response:
    """Respond to an unknown path, method or model."""
    error_type = ERROR_TYPES.get(error.status_code, "invalid_request_error")
    body = format_openai_error(f"{http.method} {http.url.path}: {error.detail}", error_type, error.status_code)
    return JSONResponse(body, error.status_code, headers=error.headers)


async def _handle_unexpected(http: HttpRequest, error: Exception) -> Response:
    """Respond to an unexpected exception. Starlette raises it again for the log, and uvicorn closes the connection."""
    reason = f"{type(error).__name__}: {error}; the server's log has the traceback"
    message = f"{http.method} {http.url.path} failed: {reason}"
    return JSONResponse(format_openai_error(message, "UnknownFailure", 500), 500, {"Connection": "close"})


@contextlib.asynccontextmanager
async def run_http_server(app: Starlette, config: ServerConfig) -> AsyncIterator[HttpServer]:
    """Run the server. Raises ConfigInvalid if the port is taken."""
    hosts = [config.host, *config.allowed_hosts]
    guarded = BrowserGuard(app, paths=CONTROL_PATHS, hosts=hosts, config_key="server.allowed_hosts")
    server = HttpServer(guarded, config.host, config.port, name="server.port", shutdown_timeout=config.shutdown_timeout)
    try:
        await server.start()
    except PortTaken as error:
        raise ConfigInvalid(error.message) from error
    try:
        yield server
    finally:
        await server.close()


async def serve(engine: Engine, *, name: str, config: ServerConfig, renderer: Renderer | None = None) -> None:
    """Serve until SIGINT or SIGTERM; then requests in flight get `config.shutdown` seconds to finish."""
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    if renderer is not None:
        _ = renderer.tokenizer.max_token_chars  # reads the whole vocabulary: now, not in the first request
    gc.collect()
    gc.freeze()  # the model and the modules stay; scanning them again would take tenths of a second
    engine.start()
    try:
        app = build_app(engine, name=name, renderer=renderer, timeout=config.timeout)
        async with run_http_server(app, config) as server:
            print(f"dtype: {engine.core.model.dtype_choice}")
            print(f"operators: {engine.core.runner.ops_description}")
            print(f"serving {name} ({engine.core.version}) at {server.address}", flush=True)
            tasks = [asyncio.create_task(server.wait()), asyncio.create_task(stop.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
    finally:
        await asyncio.to_thread(engine.close)
