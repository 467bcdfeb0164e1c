"""One HTTP request, one or several streams of the engine: submit, wait, and let go if the client does.

Whoever asks through HTTP may hang up at any moment; tokens nobody reads are the most expensive ones. So a request is
always watched from both sides, and cancelled in the engine when its client is gone. A failure is written down in one
way, be it the body of an answer or, when parts were sent already, the last event of a stream.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from ramify.errors import ContextOverflow, DeadlineExceeded, QueueFull, RamifyError, RequestInvalid, WeightsRefused
from ramify.infer.engine import Engine, RequestStream
from ramify.infer.request import RequestOutput, SamplingParams

T = TypeVar("T")
HTTP_STATUS: dict[type[RamifyError], int] = {
    RequestInvalid: 400,
    ContextOverflow: 400,
    WeightsRefused: 409,
    QueueFull: 503,
    DeadlineExceeded: 504,
}
SSE_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample to take."""

    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    cache_salt: str = ""
    priority: int = 0


class ClientDisconnected(Exception):
    """The client hung up; there is nobody to answer."""


def submit_all(
    engine: Engine, sample_requests: Sequence[SampleRequest], *, timeout: float, incremental: bool
) -> list[RequestStream]:
    """All jobs in the queue, or none."""
    streams: list[RequestStream] = []
    try:
        for job in sample_requests:
            stream = engine.submit(
                job.prompt_token_ids,
                job.sampling_params,
                cache_salt=job.cache_salt,
                priority=job.priority,
                timeout=timeout,
                incremental=incremental,
            )
            streams.append(stream)
    except BaseException:
        cancel_all(streams)
        raise
    return streams


async def gather_results(http: HttpRequest, streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """The results of all streams."""
    return await cancel_on_disconnect(http, _collect_results(streams), streams)


async def cancel_on_disconnect(http: HttpRequest, work: Coroutine[Any, Any, T], streams: Sequence[RequestStream]) -> T:
    """The outcome of `work`, which ends with the streams; they are cancelled if the client hangs up: ClientGone."""
    gone = asyncio.ensure_future(_wait_for_disconnect(http, streams))
    try:
        outcome = await work
    finally:
        gone.cancel()
        cancel_all(streams)
    if gone.done():
        raise ClientDisconnected
    return outcome


async def _wait_for_disconnect(http: HttpRequest, streams: Sequence[RequestStream]) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    cancel_all(streams)


async def _collect_results(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    return [await stream.result() for stream in streams]


async def merge_streams(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The parts of all streams as they come, with the stream's number; all are cancelled when the reader stops."""
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException]] = asyncio.Queue()

    async def forward_outputs(number: int, stream: RequestStream) -> None:
        try:
            async for part in stream.iter_outputs():
                queue.put_nowait((number, part))
        except Exception as error:  # noqa: BLE001 - raised again where the parts are read
            queue.put_nowait((number, error))

    pumps = [asyncio.ensure_future(forward_outputs(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            number, part = await queue.get()
            if isinstance(part, BaseException):
                raise part
            yield number, part
            left -= part.finish_reason is not None
    finally:
        for task in pumps:
            task.cancel()
        cancel_all(streams)


def cancel_all(streams: Sequence[RequestStream]) -> None:
    """Stop what has not finished."""
    for stream in streams:
        stream.cancel()


def format_sse_event(data: dict[str, Any]) -> bytes:
    """A part of a streamed answer."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def get_http_status(error: RamifyError) -> int:
    """Return the HTTP status of a failure."""
    return HTTP_STATUS.get(type(error), 500)


def build_error_body(error: RamifyError) -> dict[str, Any]:
    """Return the body for a failure. Its code is the status, or OpenAI's word for a prompt that is too long."""
    code = "context_length_exceeded" if isinstance(error, ContextOverflow) else get_http_status(error)
    return {"error": {"message": error.message, "type": error.name, "code": code}}
