"""The native engine, made to say the replies of a script: `python -m tests.rl.scripted_server PORT MODULE:FUNCTION`.

The function gets the text of a prompt and the seed of the request, and returns the reply. The engine computes the
logprobs of the reply's tokens with its own weights, which the trainer updates as usual. So rollouts go the way that the
script wants, while everything that is trained is real.
"""

import asyncio
import importlib
import sys
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ramify.dialects.http_format import decode_body
from ramify.infer.config import EngineConfig, ServerConfig
from ramify.infer.engine import Engine
from ramify.infer.generate_api import format_choice
from ramify.infer.request import RequestOutput, SamplingParams
from ramify.infer.request_bodies import GenerateBody
from ramify.infer.server import build_app, build_http_server
from ramify.infer.streaming import json_response
from ramify.model.resolve import resolve_model_path
from ramify.render import Renderer, load_renderer

Script = Callable[[str, int], str]
TIMEOUT = 60.0  # seconds for one reply


async def say_reply(engine: Engine, renderer: Renderer, script: Script, http: Request) -> Response:
    """Answer one request for a sample with the tokens of the script."""
    body = decode_body(await http.body(), GenerateBody)
    params, prompt = body.sampling_params, body.token_ids
    text = script(renderer.tokenizer.decode(prompt), params.seed or 0)
    full_ids = [*renderer.tokenizer.encode(text, continues_text=True).ids.tolist(), renderer.stop_ids[0]]
    ids = full_ids[: params.max_tokens]
    stream = engine.submit([*prompt, *ids], SamplingParams(max_tokens=1, prompt_logprobs=True), timeout=TIMEOUT)
    scored = await stream.result()
    logprobs = [logprob for logprob in scored.prompt_logprobs[len(prompt) :] if logprob is not None]
    assert len(logprobs) == len(ids)
    ((version, _),) = scored.version_runs
    finish_reason = "stop" if len(ids) == len(full_ids) else "length"
    output = RequestOutput(
        token_ids=ids, logprobs=logprobs, version_runs=[(version, len(ids))], finish_reason=finish_reason
    )
    return json_response({"request_id": "scripted", "choices": [format_choice(0, output, with_logprobs=True)]})


async def serve_script(port: int, script: Script) -> None:
    """Serve `tiny` until the process is killed."""
    renderer = load_renderer(resolve_model_path("tiny"))
    engine = Engine.load("tiny", EngineConfig(threads=1)).start()

    async def generate(http: Request) -> Response:
        return await say_reply(engine, renderer, script, http)

    app = build_app(engine, name="tiny", renderer=renderer)
    routes = [Route("/inference/v1/generate", generate, methods=["POST"]), *app.routes]  # the first match answers
    scripted_app = Starlette(routes=routes, exception_handlers=app.exception_handlers)
    async with build_http_server(scripted_app, ServerConfig(port=port)) as server:
        print(f"serving at {server.address}", flush=True)
        await server.wait()


if __name__ == "__main__":
    module, _, name = sys.argv[2].partition(":")
    asyncio.run(serve_script(int(sys.argv[1]), getattr(importlib.import_module(module), name)))
