"""`/v1/completions` and `/v1/chat/completions`, in OpenAI's format.

Both do the same work: prompts become sample requests, each sample's tokens become text up to a stop string, and the
response is built once, or streamed while it grows. An endpoint only reads its own fields and chooses the formatter.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ramify.core.errors import RequestInvalid
from ramify.infer.control_api import check_model_name, encode_prompts, load_images, render_chat, require_renderer
from ramify.infer.dialects.chat_format import continues_final_message, format_envelope, format_usage, parse_messages
from ramify.infer.dialects.http_format import decode_body
from ramify.infer.dialects.structured_output import forbids_calls, parse_constraint
from ramify.infer.engine import Engine, RequestStream
from ramify.infer.generate_api import format_prompt_logprobs
from ramify.infer.grammar import GrammarCompiler, GrammarState
from ramify.infer.images import ImageReference
from ramify.infer.request import RequestOutput
from ramify.infer.request_bodies import ChatBody, CompletionBody, OpenAIBody
from ramify.infer.response_formatters import (
    ChatFormatter,
    CompletionFormatter,
    DecodeFn,
    IncrementalDetokenizer,
    ResponseFormatter,
    ShownTokens,
    StreamedSample,
    make_decoder,
)
from ramify.infer.streaming import (
    SampleRequest,
    cancel_on_disconnect,
    compile_grammar,
    gather_results,
    json_response,
    merge_streams,
    stream_response,
    submit_all,
)
from ramify.model.render import RenderedPrompt, Renderer
from ramify.model.render.tokenizer import OFFLOAD_MIN_TOKENS, offload
from ramify.trace import Usage


@dataclass(frozen=True, slots=True)
class OpenAICall:
    """One HTTP request: its body, its samples, and the formatter of the response."""

    id: str
    model: str
    body: OpenAIBody
    formatter: ResponseFormatter
    sample_requests: list[SampleRequest]
    samples: list[StreamedSample]
    with_logprobs: bool

    @property
    def is_large(self) -> bool:
        """Whether the choices show so many tokens that building them would block the event loop for long."""
        shows_prompt = self.body.echo or self.body.prompt_logprobs is not None
        lengths = (
            len(sample.token_ids) + (len(sample.prompt_token_ids) if shows_prompt else 0) for sample in self.samples
        )
        return sum(lengths) >= OFFLOAD_MIN_TOKENS

    def format_choices(self) -> list[dict[str, Any]]:
        """Return all choices; every sample has finished."""
        return [self.format_choice(index) for index in range(len(self.samples))]

    def format_choice(self, index: int) -> dict[str, Any]:
        """Return the choice of a finished sample."""
        sample, formatter = self.samples[index], self.formatter
        shown_ids = sample.token_ids[: formatter.count_shown_samples(sample)]
        token_fields = self._token_fields(formatter.select_shown_tokens(sample), shown_ids)
        choice = {"index": index, **formatter.format_choice(sample), **token_fields}
        if self.body.prompt_logprobs is not None and formatter.prompt_logprobs_in_choice:
            choice["prompt_logprobs"] = format_prompt_logprobs(sample.prompt_token_ids, sample.prompt_logprobs)
        return {**choice, "prompt_token_ids": sample.prompt_token_ids} if self.body.return_token_ids else choice

    def format_delta(self, index: int, new_text: str, output: RequestOutput) -> dict[str, Any]:
        """Return the choice for an event of a stream."""
        sample = self.samples[index]
        is_first = len(sample.token_ids) == len(output.token_ids)
        delta = self.formatter.format_delta(sample, new_text, is_first=is_first)
        token_fields = self._token_fields(output, output.token_ids, sample.num_shown_chars)
        sample.num_shown_chars += sum(map(len, (token_fields["logprobs"] or {}).get("tokens", ())))
        return {"index": index, **delta, **token_fields}

    def _token_fields(
        self, shown: ShownTokens | RequestOutput, token_ids: list[int], start_char: int = 0
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {"logprobs": None}
        if self.with_logprobs:
            fields["logprobs"] = self.formatter.format_logprobs(
                shown.token_ids, shown.logprobs, shown.top_logprobs, start_char
            )
        return {**fields, "token_ids": token_ids} if self.body.return_token_ids else fields


async def create_completion(
    http: HttpRequest,
    engine: Engine,
    renderer: Renderer | None,
    *,
    name: str,
    compiler: GrammarCompiler | None,
    timeout: float,
) -> Response:
    """Continue text or token ids."""
    body = decode_body(await http.body(), CompletionBody)
    check_model_name(body.model, name)
    grammar = await compile_grammar(body, body.build_grammar(), compiler)
    prompts = await encode_prompts(body.prompt, engine, renderer)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    only_prompt = body.echo and max_tokens == 0  # the engine samples at least one token; it is left out of the answer
    formatter = CompletionFormatter(_get_decoder(renderer, body.stop_strings), echo=body.echo, only_prompt=only_prompt)
    call = _build_call(
        engine,
        renderer,
        body,
        formatter,
        prompts,
        max_tokens=1 if only_prompt else max_tokens,
        num_top_logprobs=body.logprobs,
        grammar=grammar,
    )
    return await _respond(http, engine, call, timeout)


async def create_chat_completion(
    http: HttpRequest,
    engine: Engine,
    renderer: Renderer | None,
    *,
    name: str,
    compiler: GrammarCompiler | None,
    timeout: float,
) -> Response:
    """Generate the next assistant turn of a conversation."""
    body = decode_body(await http.body(), ChatBody)
    check_model_name(body.model, name)
    renderer = require_renderer(renderer)
    allows_calls = not forbids_calls(body.tool_choice)
    tools = body.tools if allows_calls else None
    parser = parse_messages(body.messages)
    if continues_final_message(msgspec.structs.asdict(body)):
        parser.split_off_prefill()
    prompt = await render_chat(parser, tools, engine, renderer)
    grammar = await compile_grammar(body, _build_chat_grammar(body, prompt, renderer), compiler)
    if grammar is not None and parser.prefill:
        raise RequestInvalid("continue_final_message: not possible with response_format, or a required tool_choice")
    prompt_ids = prompt.token_ids.tolist()
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens is None:
        max_tokens = max(1, engine.core.max_model_len - len(prompt_ids))
    num_top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
    reply_prompt = msgspec.structs.replace(prompt, allows_calls=allows_calls)
    formatter = ChatFormatter(renderer, reply_prompt, has_tools=bool(tools), prefill=parser.prefill)
    images = await load_images(prompt, renderer)
    call = _build_call(
        engine,
        renderer,
        body,
        formatter,
        [prompt_ids],
        max_tokens=max_tokens,
        num_top_logprobs=num_top_logprobs,
        images=images,
        grammar=grammar,
    )
    return await _respond(http, engine, call, timeout)


def _build_chat_grammar(body: ChatBody, prompt: RenderedPrompt, renderer: Renderer) -> str | None:
    """Return the grammar of `response_format` and `tool_choice`, or of `structured_outputs`. Raises RequestInvalid."""
    choices = {"tool_choice": body.tool_choice, "parallel_tool_calls": body.parallel_tool_calls}
    constraint = parse_constraint(
        choices, prompt.tools, response_format=body.response_format, format_field="response_format"
    )
    return body.build_grammar() if constraint is None else renderer.build_grammar(prompt, constraint)


def _build_call(
    engine: Engine,
    renderer: Renderer | None,
    body: OpenAIBody,
    formatter: ResponseFormatter,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    num_top_logprobs: int | None,
    images: tuple[ImageReference, ...] = (),
    grammar: GrammarState | None = None,
) -> OpenAICall:
    """Build the sample requests of a body. If `num_top_logprobs` is None, no logprobs are returned."""
    eos_ids = engine.core.model.eos_ids.union(() if renderer is None else renderer.stop_ids)
    params = [
        body.to_sampling_params(
            eos_ids=eos_ids, max_tokens=max_tokens, top_logprobs=num_top_logprobs or 0, sample_index=index
        )
        for index in range(body.num_samples)
    ]
    if body.echo and num_top_logprobs is not None:
        params = [replace(sampling, prompt_logprobs=True, prompt_top_logprobs=num_top_logprobs) for sampling in params]
    cache_salt = body.cache_salt or ""
    sample_requests = [
        SampleRequest(prompt, sampling, cache_salt, body.priority, images, grammar and grammar.fork())
        for prompt in prompts
        for sampling in params
    ]
    samples = [
        StreamedSample(request.prompt_token_ids, IncrementalDetokenizer(formatter.decode, body.stop_strings))
        for request in sample_requests
    ]
    return OpenAICall(
        id=f"{formatter.id_prefix}-{uuid4().hex}",
        model=body.model or engine.core.version.policy,
        body=body,
        formatter=formatter,
        sample_requests=sample_requests,
        samples=samples,
        with_logprobs=num_top_logprobs is not None,
    )


async def _respond(http: HttpRequest, engine: Engine, call: OpenAICall, timeout: float) -> Response:
    has_stop_strings = bool(call.body.stop_strings)
    incremental = call.body.stream or has_stop_strings
    streams = submit_all(engine, call.sample_requests, timeout=timeout, incremental=incremental)
    if call.body.stream:
        return stream_response(_stream_events(streams, call))
    if has_stop_strings:  # decode the text as it grows, so that nothing is computed after a stop string
        await cancel_on_disconnect(http, _collect_until_stop(streams, call.samples), streams)
        for sample, stream in zip(call.samples, streams):
            sample.finish_reason = sample.finish_reason or stream.request.finish_reason
    else:
        for sample, result in zip(call.samples, await gather_results(http, streams)):
            sample.append(result)
    choices = await offload(call.is_large, call.format_choices)
    response = {
        **format_envelope(call.id, call.formatter.object_type, call.model),
        "choices": choices,
        "usage": _count_usage(call, streams),
    }
    if call.body.prompt_logprobs is not None and not call.formatter.prompt_logprobs_in_choice:
        first = call.samples[0]
        response["prompt_logprobs"] = format_prompt_logprobs(first.prompt_token_ids, first.prompt_logprobs)
    return json_response(response)


async def _collect_until_stop(streams: list[RequestStream], samples: list[StreamedSample]) -> None:
    async for index, output in merge_streams(streams):
        if samples[index].finish_reason is None:
            samples[index].append(output)
            if samples[index].detokenizer.stopped:
                streams[index].cancel()


async def _stream_events(streams: list[RequestStream], call: OpenAICall) -> AsyncIterator[dict[str, Any]]:
    envelope = format_envelope(call.id, call.formatter.chunk_object_type, call.model)
    async for index, output in merge_streams(streams):
        sample = call.samples[index]
        if sample.finish_reason is not None:
            continue  # tokens after a stop string
        new_text = sample.append(output)
        if sample.detokenizer.stopped:
            streams[index].cancel()
        is_large = sample.finish_reason is not None and len(sample.token_ids) >= OFFLOAD_MIN_TOKENS
        choice = await offload(is_large, call.format_delta, index, new_text, output)
        yield {**envelope, "choices": [choice]}
    if call.body.wants_usage:
        yield {**envelope, "choices": [], "usage": _count_usage(call, streams)}


def _count_usage(call: OpenAICall, streams: list[RequestStream]) -> dict[str, Any]:
    prompts = {id(request.prompt_token_ids): request.prompt_token_ids for request in call.sample_requests}
    usage = Usage(
        sum(map(len, prompts.values())),
        sum(call.formatter.count_shown_samples(sample) for sample in call.samples),
        max((stream.request.num_cached_tokens for stream in streams), default=0),
    )
    return format_usage(usage)


def _get_decoder(renderer: Renderer | None, stop_strings: Sequence[str]) -> DecodeFn:
    if renderer is not None:
        return make_decoder(renderer)
    if stop_strings:
        raise RequestInvalid("stop: this server has no tokenizer for its model; give stop_token_ids")
    return lambda ids: ""
