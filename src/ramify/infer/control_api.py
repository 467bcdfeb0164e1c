"""Endpoints about the engine itself: its health, model and metrics, pause, resume and weight updates; and tokenization.

Texts and conversations that cannot fit are rejected; large ones are encoded in a thread.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ramify import __version__
from ramify.core.errors import ModelNotFound, RequestInvalid, TemplateRefused, WeightsMissing
from ramify.infer.dialects.chat_format import parse_messages, parse_tool
from ramify.infer.dialects.http_format import decode_body
from ramify.infer.dialects.message_parser import MessageParser
from ramify.infer.engine import Engine
from ramify.infer.engine_core import context_overflow_error
from ramify.infer.images import ImageReference
from ramify.infer.request_bodies import ChatTool, DetokenizeBody, PauseBody, TokenizeBody, UpdateWeightsBody
from ramify.infer.response_formatters import make_decoder
from ramify.infer.streaming import json_response
from ramify.model.render import RenderedPrompt, Renderer
from ramify.model.render.prompt_images import check_image_count, find_image_parts
from ramify.model.render.tokenizer import OFFLOAD_MIN_CHARS, OFFLOAD_MIN_TOKENS, offload


def require_renderer(renderer: Renderer | None) -> Renderer:
    """Return the renderer. Raises RequestInvalid if the server has none for its model."""
    if renderer is None:
        raise RequestInvalid("this server has no tokenizer for its model, so it takes no text; send token ids")
    return renderer


async def render_chat(
    parser: MessageParser, tools: Sequence[ChatTool] | None, engine: Engine, renderer: Renderer
) -> RenderedPrompt:
    """Return the prompt for the next assistant turn, or for the rest of it after the prefill of `parser`.

    Raises RequestInvalid, ContextOverflow or ImageInvalid.
    """
    parsed, media = parser.messages, parser.media
    if not parsed:
        raise RequestInvalid("messages: at least one is needed")
    schemas = [schema for tool in tools or () if (schema := parse_tool(tool)) is not None]
    characters = sum(len(message.text.strip()) for message in parsed)  # many templates trim the space around a text
    characters += len(parser.prefill)
    _check_length(characters, engine, renderer)
    check_image_count(len(find_image_parts(parsed)))
    if renderer.image_cache is not None:  # otherwise the renderer refuses images
        for image in media.values():
            await renderer.image_cache.process_async(image)  # in a thread; rendering needs the size of the result
    try:
        prompt = await offload(characters >= OFFLOAD_MIN_CHARS, renderer.render, parsed, schemas, media=media)
    except TemplateRefused as error:
        raise RequestInvalid(f"messages: {error.message}") from error
    except RecursionError as error:
        raise RequestInvalid("messages or tools: nested too deeply for the chat template") from error
    if not parser.prefill:
        return prompt
    return await offload(characters >= OFFLOAD_MIN_CHARS, renderer.prefill, prompt, parser.prefill)


async def load_images(prompt: RenderedPrompt, renderer: Renderer) -> tuple[ImageReference, ...]:
    """Return the processed images of a prompt that `render_chat` returned."""
    if renderer.image_cache is None:
        return ()
    cache, images = renderer.image_cache, prompt.images
    processed = [await cache.process_async(image.media) for image in images]
    return tuple(
        ImageReference(image.media.hash, image.start, image.stop, item) for image, item in zip(images, processed)
    )


async def encode_text(text: str, engine: Engine, renderer: Renderer) -> list[int]:
    """Return the token ids of a text; special tokens in it are recognized. Raises ContextOverflow."""
    _check_length(len(text), engine, renderer)
    encoded = await offload(len(text) >= OFFLOAD_MIN_CHARS, renderer.tokenizer.encode, text)
    return encoded.ids.tolist()


async def encode_prompts(prompt: Any, engine: Engine, renderer: Renderer | None) -> list[list[int]]:
    """Return the prompts of `/v1/completions` as token ids: one text or list of token ids, or a list of either."""
    if isinstance(prompt, str) or (prompt and all(isinstance(item, int) for item in prompt)):
        prompt = [prompt]
    prompts: list[list[int]] = []
    for item in prompt:
        if isinstance(item, str):
            prompts.append(await encode_text(item, engine, require_renderer(renderer)))
        elif isinstance(item, list):
            prompts.append(item)
        else:
            raise RequestInvalid("prompt: expected text, token ids, or a list of either")
    if not prompts:
        raise RequestInvalid("prompt: at least one is needed")
    return prompts


def _check_length(characters: int, engine: Engine, renderer: Renderer) -> None:
    """Raise ContextOverflow if the text is too long even if every token is the longest one.

    This is checked before rendering, because rendering such a text may take very long.
    """
    min_tokens, limit = characters // renderer.tokenizer.max_token_chars, engine.core.max_model_len
    if min_tokens >= limit:
        raise context_overflow_error(f"at least {min_tokens}", limit)


# `/tokenize`, `/detokenize` and `/tokenizer_info` in vLLM's format. They tokenize as the other endpoints do.
#
# No special tokens are added to a text, because `/v1/completions` adds none.


async def tokenize(http: HttpRequest, engine: Engine, renderer: Renderer | None) -> Response:
    """Return the tokens of a text, or of the prompt for a conversation."""
    body = decode_body(await http.body(), TokenizeBody)
    renderer = require_renderer(renderer)
    if body.add_special_tokens:
        raise RequestInvalid("add_special_tokens: this server adds none to a text, so only false is supported")
    if body.messages is not None:
        ids = (await render_chat(parse_messages(body.messages), body.tools, engine, renderer)).token_ids.tolist()
    elif body.prompt is not None:
        ids = await encode_text(body.prompt, engine, renderer)
    else:
        raise RequestInvalid("prompt or messages: one of them is needed")
    strings = (
        await offload(len(ids) >= OFFLOAD_MIN_TOKENS, _decode_each, ids, renderer) if body.return_token_strs else None
    )
    length = engine.core.max_model_len
    return json_response({"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings})


async def detokenize(http: HttpRequest, renderer: Renderer | None) -> Response:
    """Return the text of token ids."""
    body = decode_body(await http.body(), DetokenizeBody)
    decode = make_decoder(require_renderer(renderer))
    if any(not 0 <= token < 2**31 for token in body.tokens):
        raise RequestInvalid("tokens: expected token ids")
    text = await offload(len(body.tokens) >= OFFLOAD_MIN_TOKENS, decode, body.tokens)
    return json_response({"prompt": text})


async def tokenizer_info(_: HttpRequest, engine: Engine, renderer: Renderer | None) -> Response:
    """Return the token that ends a text; evaluation tools ask for it."""
    renderer = require_renderer(renderer)
    eos_ids = sorted(engine.core.model.eos_ids) or sorted(renderer.stop_ids)
    return json_response({"eos_token": renderer.tokenizer.decode(eos_ids[:1]) if eos_ids else None})


def _decode_each(token_ids: list[int], renderer: Renderer) -> list[str]:
    return [renderer.tokenizer.decode([id]) for id in token_ids]


async def health(_: HttpRequest, engine: Engine) -> Response:
    """Return 200 if the engine can answer requests, also while it is paused. Raises WeightsMissing."""
    if engine.failure is not None:
        return JSONResponse({"status": "failed", "reason": engine.failure.message}, 503)
    if not engine.core.has_weights:
        raise WeightsMissing("a weight update was interrupted; update the weights")
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
        "copies_from_trainer": engine.core.config.copy_from_trainer,
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
