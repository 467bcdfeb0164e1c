"""The HTTP server: routes, error handlers, and starting and closing the engine.

The type of an error decides the status: an invalid request is 400, a full queue 503, a deadline 504, weights that do
not fit and images that were not uploaded 409; any other error is 500. The body holds its name.
"""

import asyncio
import gc
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ramify.core.async_calls import cancel_all
from ramify.core.errors import ConfigInvalid, PortTaken, RamifyError
from ramify.infer import control_api
from ramify.infer.client import ClientSampling, Completion
from ramify.infer.client.generate_messages import GenerateRequest, RequestImage
from ramify.infer.client.stall_clock import StallClock
from ramify.infer.config import ServerConfig
from ramify.infer.control_api import detokenize, tokenize, tokenizer_info
from ramify.infer.dialects.http_format import format_openai_error
from ramify.infer.dialects.response_store import ResponseStore
from ramify.infer.engine import Engine
from ramify.infer.gateway import RolloutLimits, RolloutSession, SamplingConfig, TokenPolicy
from ramify.infer.gateway.server import build_dialect_routes
from ramify.infer.generate_api import build_sample_requests, generate, upload_image
from ramify.infer.grammar import GrammarCompiler
from ramify.infer.images import ImageReference
from ramify.infer.openai_api import create_chat_completion, create_completion
from ramify.infer.request_bodies import GenerateBody
from ramify.infer.streaming import build_error_body, get_status, submit_all
from ramify.model.render import Renderer
from ramify.processes.wire.browser_guard import BrowserGuard
from ramify.processes.wire.http_server import HttpServer
from ramify.trace import Trace, Usage, VersionSpan

DIALECT_PATHS = ("/responses", "/conversations", "/messages")
KEEPALIVE_INTERVAL = 5.0  # seconds between the keepalives of a stream that waits for its reply


class EngineTokenClient:
    """The token client of an engine in this process."""

    def __init__(self, engine: Engine, compiler: GrammarCompiler | None) -> None:
        self._engine, self._compiler = engine, compiler

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: ClientSampling,
        *,
        session: str | None = None,
        timeout: float = 600.0,
        clock: StallClock | None = None,
        images: Sequence[RequestImage] = (),
    ) -> Completion:
        """Sample tokens after `prompt` within `timeout` seconds. A cancelled call is cancelled in the engine too."""
        body = msgspec.convert(GenerateRequest(prompt, sampling).to_dict(), GenerateBody)
        loaded = [ImageReference(image.hash, image.start, image.stop, await image.load()) for image in images]
        requests = await build_sample_requests(body, self._engine, tuple(loaded), self._compiler)
        (stream,) = submit_all(self._engine, requests, timeout=timeout, incremental=False)
        try:
            output = await stream.result()
        finally:
            stream.cancel()
        assert output.finish_reason is not None
        return Completion(
            np.array(output.token_ids, np.int32),
            np.array(output.logprobs, np.float32),
            tuple(VersionSpan(*version, count) for version, count in output.version_spans),
            output.finish_reason,
            Usage(len(prompt), len(output.token_ids), output.num_cached_tokens),
            "the engine",
        )


def build_engine_dialect_routes(
    engine: Engine, *, name: str, renderer: Renderer, compiler: GrammarCompiler | None, timeout: float
) -> list[Route]:
    """Return the routes `/v1/responses` and `/v1/messages`: the gateway's dialects over the engine of this process.

    A request is the only call of a session, whose trace is discarded with the response. Only the replies that the
    Responses API may refer to are kept.
    """
    max_model_len = engine.core.max_model_len
    policy = TokenPolicy(EngineTokenClient(engine, compiler), renderer, name, max_model_len=max_model_len)
    store = ResponseStore(keeps_messages=True)

    def open_session(_: HttpRequest) -> RolloutSession:
        return RolloutSession(
            Trace(id=uuid4().hex),
            policy,
            sampling=SamplingConfig(),
            limits=RolloutLimits(),
            models={Path(name).name: policy},
            serves_any_model=False,
            response_store=store,
            call_timeout=timeout,
            reconnect_timeout=0.0,
        )

    routes = build_dialect_routes(open_session, KEEPALIVE_INTERVAL)
    return [route for route in routes if route.path.replace("/v1", "").startswith(DIALECT_PATHS)]


CONTROL_PATHS = ("/pause", "/resume", "/update_weights")
ERROR_TYPES = {404: "not_found_error", 405: "method_not_allowed"}
Handler = Callable[[HttpRequest], Awaitable[Response]]


def build_app(engine: Engine, *, name: str, renderer: Renderer | None = None, timeout: float = 3600.0) -> Starlette:
    """Build the application for a started engine."""
    text_arguments: dict[str, Any] = {"engine": engine, "renderer": renderer}
    sample_arguments: dict[str, Any] = {"compiler": _build_compiler(engine, renderer), "timeout": timeout}
    model_arguments: dict[str, Any] = {"engine": engine, "name": name, "created": int(time.time())}
    post_routes: dict[str, Handler] = {
        "/inference/v1/generate": partial(generate, engine=engine, **sample_arguments),
        "/v1/completions": partial(create_completion, **text_arguments, name=name, **sample_arguments),
        "/v1/chat/completions": partial(create_chat_completion, **text_arguments, name=name, **sample_arguments),
        "/tokenize": partial(tokenize, **text_arguments),
        "/detokenize": partial(detokenize, renderer=renderer),
        "/pause": partial(control_api.pause, engine=engine),
        "/resume": partial(control_api.resume, engine=engine),
        "/update_weights": partial(control_api.update_weights, engine=engine),
    }
    get_routes: dict[str, Handler] = {
        "/health": partial(control_api.health, engine=engine),
        "/v1/models": partial(control_api.list_models, **model_arguments),
        "/v1/models/{name:path}": partial(control_api.show_model, **model_arguments),
        "/metrics": partial(control_api.metrics, engine=engine),
        "/version": control_api.version,
        "/tokenizer_info": partial(tokenizer_info, **text_arguments),
    }
    routes = [Route(path, handler, methods=["POST"]) for path, handler in post_routes.items()]  # most used first
    routes.append(Route("/inference/v1/images/{hash}", partial(upload_image, engine=engine), methods=["PUT"]))
    routes += [Route(path, handler, methods=["GET"]) for path, handler in get_routes.items()]
    if renderer is not None:
        routes += build_engine_dialect_routes(engine, name=name, renderer=renderer, **sample_arguments)
    handlers: dict[Any, Any] = {
        RamifyError: _handle_ramify_error,
        ClientDisconnect: _handle_disconnect,
        HTTPException: _handle_http_exception,
        Exception: _handle_unexpected,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


def _build_compiler(engine: Engine, renderer: Renderer | None) -> GrammarCompiler | None:
    """Return the compiler of grammars; None if the server has no tokenizer."""
    if renderer is None:
        return None
    model = engine.core.model
    return GrammarCompiler(
        renderer.tokenizer, vocab_size=model.shape.vocab_size, stop_ids={*model.eos_ids, *renderer.stop_ids}
    )


async def _handle_ramify_error(_: HttpRequest, error: RamifyError) -> Response:
    status = get_status(error)
    return JSONResponse(build_error_body(error), status, headers={"Retry-After": "1"} if status == 503 else None)


async def _handle_disconnect(_: HttpRequest, __: ClientDisconnect) -> Response:
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


def build_http_server(app: Starlette, config: ServerConfig) -> HttpServer:
    """Build the server of an application; its control endpoints refuse requests from web pages."""
    hosts = [config.host, *config.allowed_hosts]
    guarded = BrowserGuard(app, paths=CONTROL_PATHS, hosts=hosts, config_key="server.allowed_hosts")
    return HttpServer(guarded, config.host, config.port, name="server.port", shutdown_timeout=config.shutdown_timeout)


async def serve(engine: Engine, *, name: str, config: ServerConfig, renderer: Renderer | None = None) -> None:
    """Serve until SIGINT or SIGTERM; then requests in flight get `config.shutdown_timeout` seconds to finish.

    Raises ConfigInvalid if the port is taken, and the error that ended the engine or the HTTP server: the process exits
    with its traceback, and a supervisor restarts it, unless the same error comes again and again.
    """
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
        async with build_http_server(app, config) as server:
            print(f"dtype: {engine.core.model.dtype_choice}")
            print(f"operators: {engine.core.runner.ops_description}")
            print(f"serving {name} ({engine.core.version}) at {server.address}", flush=True)
            engine_ended = asyncio.wrap_future(engine.ended)
            tasks = [asyncio.create_task(server.wait()), asyncio.create_task(stop.wait()), engine_ended]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                await cancel_all(tasks)
        if engine.failure is not None:
            raise engine.failure.__cause__ or engine.failure
    except PortTaken as error:
        raise ConfigInvalid(error.message) from error
    finally:
        gc.unfreeze()  # libraries may report what is not freed at exit, after the error in the log
        await asyncio.to_thread(engine.close)
