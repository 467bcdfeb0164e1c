"""`POST /inference/v1/generate`: token ids in, token ids with logprobs and versions out, in vLLM's shape.

This is the door Ramify itself uses. Nothing is tokenized here, so what is sampled is what will be trained. Beyond
vLLM's fields a choice has `policy_versions`: runs of (policy, incarnation, step, count) over its tokens.
"""

import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from ramify.errors import RamifyError, RequestInvalid
from ramify.infer.engine import Engine, RequestStream
from ramify.infer.request import RequestOutput
from ramify.infer.request_bodies import GenerateBody, parse_body
from ramify.infer.streaming import (
    SSE_DONE,
    SampleRequest,
    build_error_body,
    format_sse_event,
    gather_results,
    merge_streams,
    submit_all,
)


async def generate(http: HttpRequest, engine: Engine, *, timeout: float) -> Response:
    """Answer one request."""
    body = parse_body(await http.body(), GenerateBody)
    knobs = body.sampling_params
    if knobs.stop_strings:
        raise RequestInvalid("stop: this endpoint knows no text; give stop_token_ids")
    limit = 16 if knobs.max_tokens is None else knobs.max_tokens
    eos, top = engine.core.model.eos_ids, knobs.logprobs or 0
    jobs = [
        SampleRequest(
            body.token_ids,
            knobs.to_sampling_params(
                eos_ids=eos, max_tokens=limit, top_logprobs=0 if top == 1 else top, sample_index=copy
            ),
            body.cache_salt or "",
            body.priority,
        )
        for copy in range(knobs.num_samples)
    ]
    name = body.request_id or f"generate-{random.getrandbits(64):016x}"  # asking the kernel would give up the GIL
    streams = submit_all(engine, jobs, timeout=timeout, incremental=body.stream)
    if body.stream:
        return StreamingResponse(_stream_events(name, streams, body), media_type="text/event-stream")
    results = await gather_results(http, streams)
    wanted = knobs.logprobs is not None
    answer: dict[str, Any] = {
        "request_id": name,
        "choices": [format_choice(index, result, with_logprobs=wanted) for index, result in enumerate(results)],
    }
    if knobs.prompt_logprobs is not None:
        answer["prompt_logprobs"] = format_prompt_logprobs(body.token_ids, results[0].prompt_logprobs)
    usage = sum(len(result.token_ids) for result in results)
    answer["usage"] = {
        "prompt_tokens": len(body.token_ids),
        "completion_tokens": usage,
        "total_tokens": len(body.token_ids) + usage,
        "prompt_tokens_details": {"cached_tokens": results[0].num_cached_tokens},
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


def format_choice(index: int, output: RequestOutput, *, with_logprobs: bool) -> dict[str, Any]:
    """One sample, or a part of it."""
    return {
        "index": index,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "logprobs": {"content": format_logprobs(output)} if with_logprobs else None,
        "policy_versions": [[*version, count] for version, count in output.version_runs],
    }


def format_logprobs(output: RequestOutput) -> list[dict[str, Any]]:
    """Logprobs in the chat form; a token is spelled by its id, since this endpoint knows no text."""
    written: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(output.token_ids, output.logprobs)
    ]
    for entry, top in zip(written, output.top_logprobs):
        entry["top_logprobs"] = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in top]
    return written


def format_prompt_logprobs(token_ids: list[int], logprobs: list[float | None]) -> list[dict[str, Any] | None]:
    """As vLLM spells them: a table from token id to logprob for each position, none for the first."""
    return [
        None if logprob is None else {str(token): {"logprob": logprob}} for token, logprob in zip(token_ids, logprobs)
    ]


async def _stream_events(request_id: str, streams: list[RequestStream], body: GenerateBody) -> AsyncIterator[bytes]:
    wanted = body.sampling_params.logprobs is not None
    try:
        async for index, part in merge_streams(streams):
            yield format_sse_event(
                {"request_id": request_id, "choices": [format_choice(index, part, with_logprobs=wanted)]}
            )
    except RamifyError as error:  # the status is sent already; the stream has to say it
        yield format_sse_event(build_error_body(error))
    yield SSE_DONE
