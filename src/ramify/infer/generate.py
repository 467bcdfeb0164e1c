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
from ramify.infer.engine import Engine, Stream
from ramify.infer.exchange import DONE, Job, event, gather, merge, refusal, submit
from ramify.infer.request import Completion
from ramify.infer.schema import GenerateBody, read


async def generate(http: HttpRequest, engine: Engine, *, timeout: float) -> Response:
    """Answer one request."""
    body = read(await http.body(), GenerateBody)
    knobs = body.sampling_params
    if knobs.stops:
        raise RequestInvalid("stop: this endpoint knows no text; give stop_token_ids")
    limit = 16 if knobs.max_tokens is None else knobs.max_tokens
    eos, top = engine.core.model.eos_ids, knobs.logprobs or 0
    jobs = [
        Job(
            body.token_ids,
            knobs.sampling(eos=eos, max_tokens=limit, top_logprobs=0 if top == 1 else top, copy=copy),
            body.cache_salt or "",
            body.priority,
        )
        for copy in range(knobs.copies)
    ]
    name = body.request_id or f"generate-{random.getrandbits(64):016x}"  # asking the kernel would give up the GIL
    streams = submit(engine, jobs, timeout=timeout, incremental=body.stream)
    if body.stream:
        return StreamingResponse(_events(name, streams, body), media_type="text/event-stream")
    results = await gather(http, streams)
    wanted = knobs.logprobs is not None
    answer: dict[str, Any] = {
        "request_id": name,
        "choices": [choice(index, result, logprobs=wanted) for index, result in enumerate(results)],
    }
    if knobs.prompt_logprobs is not None:
        answer["prompt_logprobs"] = spell_prompt_logprobs(body.token_ids, results[0].prompt_logprobs)
    usage = sum(len(result.tokens) for result in results)
    answer["usage"] = {
        "prompt_tokens": len(body.token_ids),
        "completion_tokens": usage,
        "total_tokens": len(body.token_ids) + usage,
        "prompt_tokens_details": {"cached_tokens": results[0].cached},
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")


def choice(index: int, part: Completion, *, logprobs: bool) -> dict[str, Any]:
    """One sample, or a part of it."""
    return {
        "index": index,
        "token_ids": part.tokens,
        "finish_reason": part.finish,
        "logprobs": {"content": entries(part)} if logprobs else None,
        "policy_versions": [[*version, count] for version, count in part.versions],
    }


def entries(part: Completion) -> list[dict[str, Any]]:
    """Logprobs in the chat form; a token is spelled by its id, since this endpoint knows no text."""
    written: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(part.tokens, part.logprobs)
    ]
    for entry, top in zip(written, part.top):
        entry["top_logprobs"] = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in top]
    return written


def spell_prompt_logprobs(prompt: list[int], logprobs: list[float | None]) -> list[dict[str, Any] | None]:
    """As vLLM spells them: a table from token id to logprob for each position, none for the first."""
    return [None if logprob is None else {str(token): {"logprob": logprob}} for token, logprob in zip(prompt, logprobs)]


async def _events(name: str, streams: list[Stream], body: GenerateBody) -> AsyncIterator[bytes]:
    wanted = body.sampling_params.logprobs is not None
    try:
        async for index, part in merge(streams):
            yield event({"request_id": name, "choices": [choice(index, part, logprobs=wanted)]})
    except RamifyError as error:  # the status is sent already; the stream has to say it
        yield event(refusal(error))
    yield DONE
