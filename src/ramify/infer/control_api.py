"""Endpoints about the engine itself: its health, model and metrics, and pause, resume and weight updates."""

from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ramify import __version__
from ramify.core.errors import ModelNotFound, RequestInvalid
from ramify.infer.dialects.http_format import decode_body
from ramify.infer.engine import Engine
from ramify.infer.request_bodies import PauseBody, UpdateWeightsBody


async def health(_: HttpRequest, engine: Engine) -> Response:
    """Return 200 if the engine can answer requests, also while it is paused."""
    if engine.failure is not None:
        return JSONResponse({"status": "failed", "reason": engine.failure.message}, 503)
    return JSONResponse({"status": "paused" if engine.paused else "ok"})


async def list_models(_: HttpRequest, engine: Engine, *, name: str, created: int) -> Response:
    """Return the one model of the server."""
    return JSONResponse({"object": "list", "data": [_format_model_card(engine, name, created)]})


async def show_model(http: HttpRequest, engine: Engine, *, name: str, created: int) -> Response:
    """Return the model of the server by its name."""
    if http.path_params["name"] != name:
        raise HTTPException(404, f"this server has one model, {name}")
    return JSONResponse(_format_model_card(engine, name, created))


def check_model_name(requested: str | None, name: str) -> None:
    """Raise ModelNotFound if a request is for another model than the one of the server."""
    if requested and requested not in (name, Path(name).name):
        raise ModelNotFound(f"model: {requested!r:.200} is not served here; expected {name}, as /v1/models lists")


def _format_model_card(engine: Engine, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "ramify",
        "max_model_len": engine.core.max_model_len,
        "version": engine.core.version._asdict(),
        "operators": engine.core.runner.ops_description,
    }


async def version(_: HttpRequest) -> Response:
    """Return the version of Ramify."""
    return JSONResponse({"version": __version__})


async def metrics(_: HttpRequest, engine: Engine) -> Response:
    """Return the metrics in the Prometheus text format."""
    return PlainTextResponse(engine.format_metrics(), media_type="text/plain; version=0.0.4")


async def pause(http: HttpRequest, engine: Engine) -> Response:
    """Stop stepping; the mode is a query parameter or a field of the body."""
    mode = http.query_params.get("mode") or decode_body(await http.body(), PauseBody).mode
    if mode != "keep" and mode != "abort":
        raise RequestInvalid(f"mode: expected keep or abort, got {mode!r}")
    await engine.pause(mode)
    return JSONResponse({"status": "paused"})


async def resume(_: HttpRequest, engine: Engine) -> Response:
    """Continue stepping."""
    await engine.resume()
    return JSONResponse({"status": "ok"})


async def update_weights(http: HttpRequest, engine: Engine) -> Response:
    """Change the weights to a published version."""
    body = decode_body(await http.body(), UpdateWeightsBody)
    if body.kv != "recompute" and body.kv != "keep":
        raise RequestInvalid(f"kv: expected recompute or keep, got {body.kv!r}")
    new_version = await engine.update_weights(Path(body.path), body.kv, run=body.run)
    return JSONResponse({"version": new_version._asdict(), "seconds": engine.swap_seconds})
