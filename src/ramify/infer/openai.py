"""`/v1/completions` and `/v1/chat/completions` for people and tools, in OpenAI's shape.

Both are the same work: prompts become jobs, each sample's tokens become text up to a stop string, and the answer is
built once, or in parts while it grows. An endpoint only reads its own fields, and picks the form of the answer.
"""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from ramify.errors import RamifyError, RequestInvalid
from ramify.infer.engine import Engine, Stream
from ramify.infer.exchange import DONE, Job, event, gather, merge, refusal, submit, watched
from ramify.infer.forms import ChatForm, Decode, Form, Sample, ShownTokens, TextForm
from ramify.infer.generate import spell_prompt_logprobs
from ramify.infer.prompts import read_prompts, render_chat
from ramify.infer.rendering import ChatRenderer
from ramify.infer.request import Completion
from ramify.infer.schema import ChatBody, CompletionBody, TalkBody, read
from ramify.infer.text import TextStream
from ramify.render.offload import OFFLOAD_MIN_TOKENS, offload


@dataclass(frozen=True, slots=True)
class Talk:
    """What one HTTP request asks for, and how its answer is written."""

    id: str
    model: str
    body: TalkBody
    form: Form
    jobs: list[Job]
    samples: list[Sample]
    logprobs: bool

    @property
    def is_large(self) -> bool:
        """Whether the choices show so many tokens that building them would hold up the event loop."""
        shows_prompt = self.body.echo or self.body.prompt_logprobs is not None
        lengths = (len(sample.tokens) + (len(sample.prompt) if shows_prompt else 0) for sample in self.samples)
        return sum(lengths) >= OFFLOAD_MIN_TOKENS

    def choices(self) -> list[dict[str, Any]]:
        """Return all choices; every sample has finished."""
        return [self.whole(index) for index in range(len(self.samples))]

    def whole(self, index: int) -> dict[str, Any]:
        """A choice that has finished."""
        sample = self.samples[index]
        ids = sample.tokens[: self.form.count_sampled(sample)]
        written = {"index": index, **self.form.whole(sample), **self._tokens(self.form.shown_tokens(sample), ids)}
        if self.body.prompt_logprobs is not None and self.form.prompt_logprobs_in_choice:
            written["prompt_logprobs"] = spell_prompt_logprobs(sample.prompt, sample.prompt_logprobs)
        return {**written, "prompt_token_ids": sample.prompt} if self.body.return_token_ids else written

    def part(self, index: int, new: str, piece: Completion) -> dict[str, Any]:
        """What a choice has grown by."""
        sample = self.samples[index]
        first = len(sample.tokens) == len(piece.tokens)
        return {"index": index, **self.form.part(sample, new, first=first), **self._tokens(piece, piece.tokens)}

    def _tokens(self, shown: ShownTokens | Completion, ids: list[int]) -> dict[str, Any]:
        spelled = self.form.logprobs(shown.tokens, shown.logprobs, shown.top) if self.logprobs else None
        return {"logprobs": spelled, "token_ids": ids} if self.body.return_token_ids else {"logprobs": spelled}


async def completions(http: HttpRequest, engine: Engine, renderer: ChatRenderer | None, *, timeout: float) -> Response:
    """Continue text or token ids."""
    body = read(await http.body(), CompletionBody)
    prompts = await read_prompts(body.prompt, engine, renderer)
    limit = 16 if body.max_tokens is None else body.max_tokens
    only_prompt = body.echo and limit == 0  # the engine samples at least one token; it is left out of the answer
    form = TextForm(_decoder(renderer, body.stops), body.echo, only_prompt)
    eos = _ends(engine, renderer)
    talk = _talk(engine, body, form, prompts, eos, 1 if only_prompt else limit, body.logprobs)
    return await _answer(http, engine, talk, timeout)


async def chat(http: HttpRequest, engine: Engine, renderer: ChatRenderer | None, *, timeout: float) -> Response:
    """The next assistant turn of a conversation."""
    body = read(await http.body(), ChatBody)
    if renderer is None:
        raise RequestInvalid("this server has no renderer for its model, so it cannot chat; send token ids instead")
    if body.tool_choice not in (None, "auto", "none"):
        raise RequestInvalid(f"tool_choice: only auto and none are supported, got {body.tool_choice!r}")
    tools = None if body.tool_choice == "none" else body.tools
    prompt = await render_chat(body.messages, tools, engine, renderer)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    limit = asked if asked is not None else max(1, engine.core.max_model_len - len(prompt.ids))
    top = (body.top_logprobs or 0) if body.logprobs else None
    form, eos = ChatForm(renderer, prompt, bool(tools)), _ends(engine, renderer)
    return await _answer(http, engine, _talk(engine, body, form, [prompt.ids], eos, limit, top), timeout)


def _talk(
    engine: Engine,
    body: TalkBody,
    form: Form,
    prompts: list[list[int]],
    eos: frozenset[int],
    max_tokens: int,
    top: int | None,
) -> Talk:
    """All samples that are asked for; with logprobs, and those of `top` rivals, unless that is None."""
    copies = range(body.copies)
    samplings = [body.sampling(eos=eos, max_tokens=max_tokens, top_logprobs=top or 0, copy=copy) for copy in copies]
    if body.echo and top is not None:
        samplings = [replace(sampling, prompt_logprobs=True, prompt_top_logprobs=top) for sampling in samplings]
    salt = body.cache_salt or ""
    jobs = [Job(prompt, sampling, salt, body.priority) for prompt in prompts for sampling in samplings]
    samples = [Sample(job.prompt, TextStream(form.decode, body.stops)) for job in jobs]
    model = body.model or engine.core.version.policy
    return Talk(f"{form.prefix}-{uuid4().hex}", model, body, form, jobs, samples, top is not None)


async def _answer(http: HttpRequest, engine: Engine, talk: Talk, timeout: float) -> Response:
    stops = any(sample.text.can_stop for sample in talk.samples)
    streams = submit(engine, talk.jobs, timeout=timeout, incremental=talk.body.stream or stops)
    if talk.body.stream:
        return StreamingResponse(_events(streams, talk), media_type="text/event-stream")
    if stops:  # watch the text as it grows, so that nothing is computed after a stop string
        await watched(http, _until_stopped(streams, talk.samples), streams)
        for index, sample in enumerate(talk.samples):
            sample.finish = sample.finish or streams[index].request.finish
    else:
        for sample, result in zip(talk.samples, await gather(http, streams)):
            sample.take(result)
    choices = await offload(talk.is_large, talk.choices)
    answer = {**_envelope(talk, talk.form.object), "choices": choices, "usage": _count(talk, streams)}
    if talk.body.prompt_logprobs is not None and not talk.form.prompt_logprobs_in_choice:
        first = talk.samples[0]
        answer["prompt_logprobs"] = spell_prompt_logprobs(first.prompt, first.prompt_logprobs)
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _until_stopped(streams: list[Stream], samples: list[Sample]) -> None:
    async for index, piece in merge(streams):
        if samples[index].finish is None:
            samples[index].take(piece)
            if samples[index].text.stopped:
                streams[index].cancel()


async def _events(streams: list[Stream], talk: Talk) -> AsyncIterator[bytes]:
    envelope = _envelope(talk, talk.form.chunk)
    try:
        async for index, piece in merge(streams):
            sample = talk.samples[index]
            if sample.finish is not None:
                continue  # the tail of a sample that a stop string has ended
            new = sample.take(piece)
            if sample.text.stopped:
                streams[index].cancel()
            large = sample.finish is not None and len(sample.tokens) >= OFFLOAD_MIN_TOKENS
            part = await offload(large, talk.part, index, new, piece)
            yield event({**envelope, "choices": [part]})
        if talk.body.wants_usage:
            yield event({**envelope, "choices": [], "usage": _count(talk, streams)})
    except RamifyError as error:  # the status is sent already; the stream has to say it
        yield event(refusal(error))
    yield DONE


def _envelope(talk: Talk, kind: str) -> dict[str, Any]:
    return {"id": talk.id, "object": kind, "created": int(time.time()), "model": talk.model}


def _count(talk: Talk, streams: list[Stream]) -> dict[str, Any]:
    prompt = sum(len(prompt) for prompt in {id(job.prompt): job.prompt for job in talk.jobs}.values())
    sampled = sum(talk.form.count_sampled(sample) for sample in talk.samples)
    cached = {"cached_tokens": max((stream.request.cached for stream in streams), default=0)}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": cached,
    }


def _ends(engine: Engine, renderer: ChatRenderer | None) -> frozenset[int]:
    return engine.core.model.eos_ids | (renderer.stop_ids if renderer is not None else frozenset())


def _decoder(renderer: ChatRenderer | None, stops: Sequence[str]) -> Decode:
    if renderer is not None:
        return renderer.decode
    if stops:
        raise RequestInvalid("stop: this server has no tokenizer for its model; give stop_token_ids")
    return lambda ids: ""
