"""`/v1/completions` and `/v1/chat/completions` for people and tools, in OpenAI's shape.

Both are the same work: prompts become jobs, each sample's tokens become text up to a stop string, and the answer is
built once, or in parts while it grows. The two endpoints differ only in how a sample is written down.
"""

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from ramify.errors import RamifyError, RequestInvalid
from ramify.infer.engine import Engine, Stream
from ramify.infer.exchange import Job, gather, merge, submit, watched
from ramify.infer.rendering import ChatRenderer
from ramify.infer.request import Completion
from ramify.infer.schema import ChatBody, CompletionBody, read
from ramify.infer.text import TextStream


@dataclass(slots=True)
class Sample:
    """One sample as it grows."""

    prompt: list[int]
    text: TextStream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    finish: str | None = None

    def take(self, part: Completion) -> str:
        """Add a part; the text it is certain to add. A stop string ends the sample."""
        self.tokens += part.tokens
        self.logprobs += part.logprobs
        self.top += part.top
        new = self.text.feed(part.tokens, last=part.finish is not None)
        self.finish = "stop" if self.text.stopped else part.finish
        return new


@dataclass(frozen=True, slots=True)
class Talk:
    """What one HTTP request asks for, and how its answer is written."""

    id: str
    object: str
    model: str
    jobs: list[Job]
    samples: list[Sample]
    stream: bool
    usage: bool
    whole: Callable[[int, Sample], dict[str, Any]]
    part: Callable[[int, Sample, str, Completion], dict[str, Any]]


async def completions(http: HttpRequest, engine: Engine, renderer: ChatRenderer | None, *, timeout: float) -> Response:
    """Continue text or token ids."""
    body = read(await http.body(), CompletionBody)
    prompts = _prompts(body.prompt, renderer)
    limit = 16 if body.max_tokens is None else body.max_tokens
    top = body.logprobs or 0
    jobs = [
        Job(
            prompt,
            body.sampling(eos=_ends(engine, renderer), max_tokens=limit, top_logprobs=top, copy=copy),
            body.cache_salt or "",
            body.priority,
        )
        for prompt in prompts
        for copy in range(body.copies)
    ]
    decode = _decoder(renderer, body.stops)
    samples = [Sample(job.prompt, TextStream(decode, body.stops)) for job in jobs]

    def logprobs(tokens: list[int], values: list[float], tops: list[list[tuple[int, float]]]) -> dict[str, Any] | None:
        if body.logprobs is None:
            return None
        spelled = [{decode([other]): value for other, value in row} for row in tops]
        return {"tokens": [decode([token]) for token in tokens], "token_logprobs": values, "top_logprobs": spelled}

    def whole(index: int, sample: Sample) -> dict[str, Any]:
        written = {"index": index, "text": sample.text.text, "finish_reason": sample.finish}
        written["logprobs"] = logprobs(sample.tokens, sample.logprobs, sample.top)
        if body.return_token_ids:
            written["token_ids"], written["prompt_token_ids"] = sample.tokens, sample.prompt
        return written

    def part(index: int, sample: Sample, new: str, piece: Completion) -> dict[str, Any]:
        written: dict[str, Any] = {"index": index, "text": new, "finish_reason": sample.finish}
        written["logprobs"] = logprobs(piece.tokens, piece.logprobs, piece.top)
        if body.return_token_ids:
            written["token_ids"] = piece.tokens
        return written

    name = f"cmpl-{uuid4().hex}"
    model = body.model or engine.core.version.policy
    talk = Talk(name, "text_completion", model, jobs, samples, body.stream, _usage(body), whole, part)
    return await _answer(http, engine, talk, timeout)


async def chat(http: HttpRequest, engine: Engine, renderer: ChatRenderer | None, *, timeout: float) -> Response:
    """The next assistant turn of a conversation."""
    body = read(await http.body(), ChatBody)
    if renderer is None:
        raise RequestInvalid("this server has no renderer for its model, so it cannot chat; send token ids instead")
    if not body.messages:
        raise RequestInvalid("messages: at least one is needed")
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestInvalid(f"tool_choice: only auto and none are supported, got {body.tool_choice!r}")
    tools = None if body.tool_choice == "none" else body.tools
    rendered = renderer.render(body.messages, tools)
    prompt = rendered.ids
    asked = body.max_completion_tokens or body.max_tokens
    limit = asked if asked is not None else max(1, engine.core.max_model_len - len(prompt))
    top = body.top_logprobs or 0
    jobs = [
        Job(
            prompt,
            body.sampling(eos=_ends(engine, renderer), max_tokens=limit, top_logprobs=top, copy=copy),
            body.cache_salt or "",
            body.priority,
        )
        for copy in range(body.copies)
    ]
    decode = _decoder(renderer, body.stops)
    samples = [Sample(prompt, TextStream(decode, body.stops)) for _ in jobs]

    def logprobs(tokens: list[int], values: list[float], tops: list[list[tuple[int, float]]]) -> dict[str, Any] | None:
        if not body.logprobs:
            return None
        rows = tops or [[]] * len(tokens)
        return {
            "content": [
                {**_spelled(decode, token, value), "top_logprobs": [_spelled(decode, *other) for other in row]}
                for token, value, row in zip(tokens, values, rows)
            ]
        }

    def whole(index: int, sample: Sample) -> dict[str, Any]:
        message = {"role": "assistant", **renderer.parse(sample.tokens, rendered)}
        if sample.text.stopped:
            message = {"role": "assistant", "content": sample.text.text}
        finish = "tool_calls" if message.get("tool_calls") and sample.finish == "stop" else sample.finish
        written = {"index": index, "message": message, "finish_reason": finish}
        written["logprobs"] = logprobs(sample.tokens, sample.logprobs, sample.top)
        if body.return_token_ids:
            written["token_ids"] = sample.tokens
        return written

    def part(index: int, sample: Sample, new: str, piece: Completion) -> dict[str, Any]:
        first = len(sample.tokens) == len(piece.tokens)
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        finish = sample.finish
        if not tools:
            delta["content"] = new
        elif finish is not None:  # a call can only be read when it is whole, so a turn with tools comes in one part
            message = whole(index, sample)
            finish = message["finish_reason"]
            delta.update({key: value for key, value in message["message"].items() if value})
            for number, call in enumerate(delta.get("tool_calls", [])):
                call.setdefault("index", number)
        written = {"index": index, "delta": delta, "finish_reason": finish}
        written["logprobs"] = logprobs(piece.tokens, piece.logprobs, piece.top)
        if body.return_token_ids:
            written["token_ids"] = piece.tokens
        return written

    name = f"chatcmpl-{uuid4().hex}"
    model = body.model or engine.core.version.policy
    talk = Talk(name, "chat.completion", model, jobs, samples, body.stream, _usage(body), whole, part)
    return await _answer(http, engine, talk, timeout)


async def _answer(http: HttpRequest, engine: Engine, talk: Talk, timeout: float) -> Response:
    stops = any(sample.text.can_stop for sample in talk.samples)
    streams = await submit(engine, talk.jobs, timeout=timeout, incremental=talk.stream or stops)
    if talk.stream:
        return StreamingResponse(_events(streams, talk), media_type="text/event-stream")
    if stops:  # watch the text as it grows, so that nothing is computed after a stop string
        await watched(http, _until_stopped(streams, talk.samples), streams)
        for index, sample in enumerate(talk.samples):
            sample.finish = sample.finish or streams[index].request.finish
    else:
        for sample, result in zip(talk.samples, await gather(http, streams)):
            sample.take(result)
    choices = [talk.whole(index, sample) for index, sample in enumerate(talk.samples)]
    answer = {**_envelope(talk), "choices": choices, "usage": _count(talk, streams)}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _until_stopped(streams: list[Stream], samples: list[Sample]) -> None:
    async for index, piece in merge(streams):
        if samples[index].finish is None:
            samples[index].take(piece)
            if samples[index].text.stopped:
                streams[index].cancel()


async def _events(streams: list[Stream], talk: Talk) -> AsyncIterator[bytes]:
    envelope = {
        **_envelope(talk),
        "object": "chat.completion.chunk" if talk.object != "text_completion" else talk.object,
    }
    try:
        async for index, piece in merge(streams):
            sample = talk.samples[index]
            if sample.finish is not None:
                continue  # the tail of a sample that a stop string has ended
            new = sample.take(piece)
            if sample.text.stopped:
                streams[index].cancel()
            yield _event({**envelope, "choices": [talk.part(index, sample, new, piece)]})
        if talk.usage:
            yield _event({**envelope, "choices": [], "usage": _count(talk, streams)})
    except RamifyError as error:  # the status is sent already; the stream has to say it
        yield _event({"error": {"message": error.message, "type": error.name, "code": 500}})
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _envelope(talk: Talk) -> dict[str, Any]:
    return {"id": talk.id, "object": talk.object, "created": int(time.time()), "model": talk.model}


def _count(talk: Talk, streams: list[Stream]) -> dict[str, Any]:
    prompt = sum(len(prompt) for prompt in {id(job.prompt): job.prompt for job in talk.jobs}.values())
    sampled = sum(len(sample.tokens) for sample in talk.samples)
    cached = {"cached_tokens": max((stream.request.cached for stream in streams), default=0)}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": cached,
    }


def _usage(body: CompletionBody | ChatBody) -> bool:
    return bool(body.stream_options and body.stream_options.get("include_usage"))


def _prompts(prompt: Any, renderer: ChatRenderer | None) -> list[list[int]]:
    if isinstance(prompt, str) or (prompt and all(isinstance(entry, int) for entry in prompt)):
        prompt = [prompt]
    found: list[list[int]] = []
    for entry in prompt:
        if isinstance(entry, str):
            if renderer is None:
                raise RequestInvalid("prompt: this server has no tokenizer for its model; send token ids instead")
            found.append(renderer.encode(entry))
        elif isinstance(entry, list):
            found.append(entry)
        else:
            raise RequestInvalid("prompt: expected text, token ids, or a list of either")
    if not found:
        raise RequestInvalid("prompt: at least one is needed")
    return found


def _ends(engine: Engine, renderer: ChatRenderer | None) -> frozenset[int]:
    return engine.core.model.eos_ids | (renderer.stop_ids if renderer is not None else frozenset())


def _decoder(renderer: ChatRenderer | None, stops: list[str]) -> Callable[..., str]:
    if renderer is not None:
        return renderer.decode
    if stops:
        raise RequestInvalid("stop: this server has no tokenizer for its model; give stop_token_ids")
    return lambda ids: ""


def _spelled(decode: Callable[..., str], token: int, logprob: float) -> dict[str, Any]:
    text = decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
