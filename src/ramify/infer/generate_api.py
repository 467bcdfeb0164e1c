"""`POST /inference/v1/generate`: token ids in, token ids with logprobs and versions out, in vLLM's format.

Ramify itself uses this endpoint. Nothing is tokenized here, so what is sampled is what will be trained. Beyond vLLM's
fields a choice has `policy_versions`: runs of (policy, incarnation, step, count) over its tokens. With `flat_logprobs`
it has its logprobs as a list of numbers: a table for each token would take longer to format than the token to sample.
Images of the prompt are given by hash; each is uploaded once, and again if the server answers `ImageMissing`.
"""

import random
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ramify.core.errors import RequestInvalid
from ramify.infer.dialects.chat_format import format_usage
from ramify.infer.dialects.http_format import decode_body
from ramify.infer.engine import Engine, RequestStream
from ramify.infer.grammar import GrammarCompiler
from ramify.infer.images import ImageReference
from ramify.infer.request import RequestOutput, TopLogprobs
from ramify.infer.request_bodies import GenerateBody
from ramify.infer.streaming import (
    SampleRequest,
    compile_grammar,
    gather_results,
    json_response,
    merge_streams,
    stream_response,
    submit_all,
)
from ramify.model.images import ProcessedImage
from ramify.trace import Usage


async def generate(http: HttpRequest, engine: Engine, *, compiler: GrammarCompiler | None, timeout: float) -> Response:
    """Respond to one request."""
    body = decode_body(await http.body(), GenerateBody)
    params = body.sampling_params
    images = tuple(ImageReference(image.hash, image.start, image.stop) for image in body.images)
    sample_requests = await build_sample_requests(body, engine, images, compiler)
    # uuid4 makes a system call, which would release the GIL
    request_id = body.request_id or f"generate-{random.getrandbits(64):016x}"
    streams = submit_all(engine, sample_requests, timeout=timeout, incremental=body.stream)
    if body.stream:
        return stream_response(_stream_events(request_id, streams, body))
    results = await gather_results(http, streams)
    response: dict[str, Any] = {
        "request_id": request_id,
        "choices": [format_choice(index, result, body) for index, result in enumerate(results)],
    }
    if params.prompt_logprobs is not None:
        scores = results[0]
        response["prompt_logprobs"] = format_prompt_logprobs(
            body.token_ids, scores.prompt_logprobs, scores.prompt_top_logprobs
        )
    num_sampled = sum(len(result.token_ids) for result in results)
    response["usage"] = format_usage(Usage(len(body.token_ids), num_sampled, results[0].num_cached_tokens))
    return json_response(response)


async def build_sample_requests(
    body: GenerateBody, engine: Engine, images: tuple[ImageReference, ...], compiler: GrammarCompiler | None
) -> list[SampleRequest]:
    """Return the samples that a body asks for, of a prompt with these images. Raises RequestInvalid."""
    params = body.sampling_params
    if params.stop_strings:
        raise RequestInvalid("stop: this endpoint has no tokenizer; give stop_token_ids")
    grammar = await compile_grammar(params, params.build_grammar(), compiler)
    max_tokens = 16 if params.max_tokens is None else params.max_tokens
    num_top_logprobs = 0 if params.logprobs in (None, 1) else params.logprobs
    return [
        SampleRequest(
            body.token_ids,
            params.to_sampling_params(
                eos_ids=engine.core.model.eos_ids,
                max_tokens=max_tokens,
                top_logprobs=num_top_logprobs,
                sample_index=sample_index,
            ),
            body.cache_salt or "",
            body.priority,
            images,
            grammar and grammar.fork(),
        )
        for sample_index in range(params.num_samples)
    ]


async def upload_image(http: HttpRequest, engine: Engine) -> Response:
    """`PUT /inference/v1/images/{hash}`: keep a processed image for the prompts that refer to it by hash.

    The response says how many bytes of images the server keeps.
    """
    max_bytes = engine.core.config.image_cache_mib << 20
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > max_bytes:
            raise RequestInvalid(f"image: the body exceeds the {max_bytes} bytes of inference.image_cache_mib")
    image = ProcessedImage.decode(bytes(body))
    if image.hash != http.path_params["hash"]:
        raise RequestInvalid(f"image: the body has the hash {image.hash[:8]}, the path {http.path_params['hash'][:8]}")
    engine.upload_image(image)
    return json_response({"cache_bytes": max_bytes})


def format_choice(index: int, output: RequestOutput, body: GenerateBody) -> dict[str, Any]:
    """Return one sample, or a part of it, as a choice with the logprobs that the request asks for."""
    logprobs: dict[str, Any] = {"logprobs": None}
    if body.sampling_params.logprobs is not None:
        use_list = body.flat_logprobs and not output.top_logprobs
        logprobs = (
            {"flat_logprobs": output.logprobs} if use_list else {"logprobs": {"content": format_logprobs(output)}}
        )
    return {
        "index": index,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        **logprobs,
        "policy_versions": [[*version, count] for version, count in output.version_spans],
    }


def format_logprobs(output: RequestOutput) -> list[dict[str, Any]]:
    """Return logprobs in the chat format; a token is given by its id, since this endpoint has no tokenizer."""
    formatted: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(output.token_ids, output.logprobs)
    ]
    for token_fields, alternatives in zip(formatted, output.top_logprobs):
        token_fields["top_logprobs"] = [
            {"token": f"token_id:{token}", "logprob": logprob} for token, logprob in alternatives
        ]
    return formatted


def format_prompt_logprobs(
    token_ids: list[int], logprobs: list[float | None], top_logprobs: TopLogprobs | None = None
) -> list[dict[str, Any] | None]:
    """Return prompt logprobs as vLLM does: for each position a table from token id to logprob, or None.

    The first token has none, nor has a token before `logprobs_start`. A table holds the token itself and, if they are
    given, the likeliest tokens.
    """
    tables: list[dict[str, Any] | None] = []
    for token, logprob, likeliest in zip(token_ids, logprobs, top_logprobs or [[]] * len(logprobs), strict=True):
        pairs = [] if logprob is None else [(token, logprob), *likeliest]
        tables.append({str(id): {"logprob": value} for id, value in pairs} if pairs else None)
    return tables


async def _stream_events(
    request_id: str, streams: list[RequestStream], body: GenerateBody
) -> AsyncIterator[dict[str, Any]]:
    async for index, output in merge_streams(streams):
        yield {"request_id": request_id, "choices": [format_choice(index, output, body)]}
