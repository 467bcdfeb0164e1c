"""The HTTP server of the page: JSON for each query, and the files of the page.

Queries read files, so they run in threads. The parameters of a request are checked here; what a query refuses is
answered with the name and the message of the failure.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from ramify.errors import ConfigInvalid, RamifyError
from ramify.view.access import AccessControl
from ramify.view.queries import RunQueries
from ramify.view.rollout_filter import RolloutFilter
from ramify.wire.browser_guard import BrowserGuard

STATIC_DIR = Path(__file__).parent / "static"
MAX_CHUNK_CHARS = 200_000  # of one message in one answer

JsonQuery = Callable[[QueryParams], Any]


def build_app(queries: RunQueries, *, token: str | None = None, hosts: tuple[str, ...] = ()) -> ASGIApp:
    """Return the page as an ASGI app. Requests need the `token`, if there is one; `hosts` are names of the server."""
    routes = [Route(path, partial(_answer, query)) for path, query in build_queries(queries).items()]
    downloads = [Route("/api/media", partial(_send_media, queries)), Route("/api/file", partial(_send_file, queries))]
    static = StaticFiles(directory=STATIC_DIR)
    app = Starlette(routes=[*routes, *downloads, Route("/", _send_page), Mount("/static", static)])
    return BrowserGuard(AccessControl(app, token), paths=None, hosts=hosts, config_key="--allow-host")


def build_queries(queries: RunQueries) -> Mapping[str, JsonQuery]:
    """Return the queries that are answered with JSON, by path."""
    return {
        "/api/runs": lambda _: queries.list_runs(),
        "/api/run": lambda params: queries.get_run(params["run"]),
        "/api/config": lambda params: queries.get_config(params["run"]),
        "/api/metrics": lambda params: queries.get_metrics(
            params["run"], params.getlist("name"), _parse_int(params, "after") or 0
        ),
        "/api/rollouts": lambda params: queries.list_rollouts(
            params["run"],
            _parse_filter(params),
            sort=params.get("sort", "newest"),
            descending=params.get("order", "desc") == "desc",
            page=_parse_int(params, "page") or 1,
        ),
        "/api/excerpts": lambda params: queries.get_excerpts(params["run"], params.getlist("id")),
        "/api/rollout": lambda params: queries.get_rollout(params["run"], params["id"]),
        "/api/tokens": lambda params: queries.get_tokens(
            params["run"], params["id"], _parse_int(params, "trace") or 0, _parse_ints(params, "node")
        ),
        "/api/message": lambda params: queries.get_message(
            params["run"],
            params["id"],
            _parse_int(params, "trace") or 0,
            _parse_int(params, "node") or 0,
            max(0, _parse_int(params, "start") or 0),
            MAX_CHUNK_CHARS,
        ),
        "/api/group": lambda params: queries.get_group(params["run"], *_parse_group(params)),
        "/api/forest": lambda params: queries.get_forest(params["run"], *_parse_group(params)),
    }


async def _answer(query: JsonQuery, request: Request) -> Response:
    try:
        return _json(await run_in_threadpool(query, request.query_params))
    except KeyError as error:
        return _json({"name": "ConfigInvalid", "message": f"the request needs the parameter {error}"}, 400)
    except ConfigInvalid as error:
        return _json({"name": error.name, "message": error.message}, 404)
    except RamifyError as error:
        return _json({"name": error.name, "message": error.message}, 500)


async def _send_page(_: Request) -> Response:
    return Response((STATIC_DIR / "index.html").read_bytes(), media_type="text/html")


async def _send_media(queries: RunQueries, request: Request) -> Response:
    """Send an image. The type is one of a few that cannot hold scripts."""
    params = request.query_params
    try:
        mime, data = await run_in_threadpool(queries.get_media, params["run"], params["id"], params["hash"])
    except (KeyError, RamifyError):
        return Response(status_code=404)
    return Response(data, media_type=mime, headers={"content-security-policy": "default-src 'none'; sandbox"})


async def _send_file(queries: RunQueries, request: Request) -> Response:
    """Send a rollout as a file to save."""
    params = request.query_params
    format = "md" if params.get("format") == "md" else "json"
    try:
        text = await run_in_threadpool(queries.export_rollout, params["run"], params["id"], format)
    except (KeyError, RamifyError) as error:
        return _json({"name": type(error).__name__, "message": str(error)}, 404)
    name = "".join(character if character.isalnum() or character in "._-" else "-" for character in params["id"])
    headers = {"content-disposition": f'attachment; filename="rollout-{name}.{format}"'}
    mime = "text/markdown" if format == "md" else "application/json"
    return Response(text.encode("utf-8", "backslashreplace"), media_type=mime, headers=headers)


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def _parse_int(params: QueryParams, name: str) -> int | None:
    value = params.get(name)
    if not value:
        return None
    try:
        return int(value)
    except ValueError:
        raise ConfigInvalid(f"{name}: expected a number, got {value!r}") from None


def _parse_ints(params: QueryParams, name: str) -> list[int]:
    try:
        return [int(value) for value in params.getlist(name)]
    except ValueError:
        raise ConfigInvalid(f"{name}: expected numbers, got {params.getlist(name)}") from None


def _parse_float(params: QueryParams, name: str) -> float | None:
    value = params.get(name)
    if not value:
        return None
    try:
        return float(value)
    except ValueError:
        raise ConfigInvalid(f"{name}: expected a number, got {value!r}") from None


def _parse_group(params: QueryParams) -> tuple[int | None, str, str]:
    return _parse_int(params, "group"), params.get("source", ""), params.get("task", "")


def _parse_filter(params: QueryParams) -> RolloutFilter:
    texts = {name: params[name] for name in ("source", "stop", "error", "state", "text") if params.get(name)}
    return RolloutFilter(
        **texts,
        step=_parse_int(params, "step"),
        group=_parse_int(params, "group"),
        min_reward=_parse_float(params, "min_reward"),
        max_reward=_parse_float(params, "max_reward"),
    )
