"""One HTTP request and its streams of the engine: submit, wait, and cancel when the client disconnects.

A client may disconnect at any moment, and tokens that nobody reads are wasted. So while a request is computed its
connection is watched, and the request is cancelled in the engine if the client is gone. An error has one format,
whether it is the body of a response or the last event of a stream that has already begun.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from ramify.core.errors import ContextOverflow, ModelNotFound, RamifyError, RequestInvalid
from ramify.infer.dialects.http_format import SSE_DONE, format_openai_error, format_sse, get_error_code, get_http_status
from ramify.infer.engine import Engine, RequestStream
from ramify.infer.grammar import GrammarCompiler, GrammarState
from ramify.infer.images import ImageReference
from ramify.infer.request import RequestOutput, SamplingParams
from ramify.infer.request_bodies import SamplingFields

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample to generate."""

    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    images: tuple[ImageReference, ...] = ()
    grammar: GrammarState | None = None


async def compile_grammar(
    body: SamplingFields, grammar: str | None, compiler: GrammarCompiler | None
) -> GrammarState | None:
    """Return the initial state of a body's grammar; None without one. Raises RequestInvalid."""
    if grammar is None:
        return None
    if compiler is None:
        raise RequestInvalid("structured output: this server has no tokenizer for its model")
    if body.ignore_eos:
        raise RequestInvalid("ignore_eos: a reply with a grammar must be able to end; leave it out")
    return await compiler.compile(grammar)


def submit_all(
    engine: Engine, sample_requests: Sequence[SampleRequest], *, timeout: float, incremental: bool
) -> list[RequestStream]:
    """Submit all requests to the engine, or none: if one is rejected, the others are cancelled."""
    streams: list[RequestStream] = []
    try:
        for sample in sample_requests:
            stream = engine.submit(
                sample.prompt_token_ids,
                sample.sampling_params,
                cache_salt=sample.cache_salt,
                priority=sample.priority,
                timeout=timeout,
                incremental=incremental,
                images=sample.images,
                grammar=sample.grammar,
            )
            streams.append(stream)
    except BaseException:
        cancel_all(streams)
        raise
    return streams


async def gather_results(http: HttpRequest, streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """Wait for the results of all streams. Raises ClientDisconnect."""
    return await cancel_on_disconnect(http, _collect_results(streams), streams)


async def cancel_on_disconnect(http: HttpRequest, work: Coroutine[Any, Any, T], streams: Sequence[RequestStream]) -> T:
    """Return the result of `work`, which reads the streams.

    If the client disconnects, the streams are cancelled, which ends `work`, and ClientDisconnect is raised.
    """
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(http, streams))
    try:
        result = await work
    finally:
        disconnect_task.cancel()
        cancel_all(streams)
    if disconnect_task.done():
        raise ClientDisconnect
    return result


async def _wait_for_disconnect(http: HttpRequest, streams: Sequence[RequestStream]) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    cancel_all(streams)


async def _collect_results(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    return [await stream.result() for stream in streams]


async def merge_streams(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield the outputs of all streams as they come, with the stream's index.

    All streams are cancelled when the reader stops.
    """
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException]] = asyncio.Queue()

    async def forward_outputs(index: int, stream: RequestStream) -> None:
        try:
            async for output in stream.iter_outputs():
                queue.put_nowait((index, output))
        except Exception as error:  # noqa: BLE001 - raised again where the outputs are read
            queue.put_nowait((index, error))

    tasks = [asyncio.ensure_future(forward_outputs(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, output = await queue.get()
            if isinstance(output, BaseException):
                raise output
            yield index, output
            num_open -= output.finish_reason is not None
    finally:
        for task in tasks:
            task.cancel()
        cancel_all(streams)


def cancel_all(streams: Sequence[RequestStream]) -> None:
    """Cancel the streams that have not finished."""
    for stream in streams:
        stream.cancel()


def json_response(body: dict[str, Any]) -> Response:
    """Return a response with a JSON body."""
    return Response(msgspec.json.encode(body), media_type="application/json")


def stream_response(events: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """Return a response that sends events as they come. The status is sent before them, so an error is an event too."""

    async def format_events() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield format_sse(event)
        except RamifyError as error:
            yield format_sse(build_error_body(error))
        yield SSE_DONE

    return StreamingResponse(format_events(), media_type="text/event-stream")


def build_error_body(error: RamifyError) -> dict[str, Any]:
    """Return the body for an error. Its code is the status, or OpenAI's word if it has one for the error."""
    has_word = isinstance(error, ContextOverflow | ModelNotFound)
    body = format_openai_error(error.message, error.name, get_error_code(error) if has_word else get_status(error))
    body["error"] |= error.details
    return body


def get_status(error: RamifyError) -> int:
    """Return the HTTP status of an error. A failure of the engine is 500: there is no server behind this one."""
    return get_http_status(error, retryable_status=500)
