"""`/tokenize`, `/detokenize` and `/tokenizer_info` in vLLM's format. They tokenize as the other endpoints do.

No special tokens are added to a text, because `/v1/completions` adds none.
"""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ramify.core.errors import RequestInvalid
from ramify.infer.dialects.chat_format import parse_messages
from ramify.infer.dialects.http_format import decode_body
from ramify.infer.engine import Engine
from ramify.infer.prompts import encode_text, render_chat, require_renderer
from ramify.infer.request_bodies import DetokenizeBody, TokenizeBody
from ramify.infer.response_formatters import make_decoder
from ramify.infer.streaming import json_response
from ramify.model.render import Renderer
from ramify.model.render.offload import OFFLOAD_MIN_TOKENS, offload


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
