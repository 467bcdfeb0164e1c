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
from ramify.infer.engine import Engine, Stream
from ramify.infer.request import Completion, Sampling

T = TypeVar("T")
STATUS: dict[type[RamifyError], int] = {
    RequestInvalid: 400,
    ContextOverflow: 400,
    WeightsRefused: 409,
    QueueFull: 503,
    DeadlineExceeded: 504,
}
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Job:
    """One sample to take."""

    prompt: list[int]
    sampling: Sampling
    salt: str = ""
    priority: int = 0


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


def submit(engine: Engine, jobs: Sequence[Job], *, timeout: float, incremental: bool) -> list[Stream]:
    """All jobs in the queue, or none."""
    streams: list[Stream] = []
    try:
        for job in jobs:
            stream = engine.submit(
                job.prompt,
                job.sampling,
                salt=job.salt,
                priority=job.priority,
                timeout=timeout,
                incremental=incremental,
            )
            streams.append(stream)
    except BaseException:
        cancel(streams)
        raise
    return streams


async def gather(http: HttpRequest, streams: Sequence[Stream]) -> list[Completion]:
    """The results of all streams."""
    return await watched(http, _results(streams), streams)


async def watched(http: HttpRequest, work: Coroutine[Any, Any, T], streams: Sequence[Stream]) -> T:
    """The outcome of `work`, which ends with the streams; they are cancelled if the client hangs up: ClientGone."""
    gone = asyncio.ensure_future(_hang_up(http, streams))
    try:
        outcome = await work
    finally:
        gone.cancel()
        cancel(streams)
    if gone.done():
        raise ClientGone
    return outcome


async def _hang_up(http: HttpRequest, streams: Sequence[Stream]) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    cancel(streams)


async def _results(streams: Sequence[Stream]) -> list[Completion]:
    return [await stream.result() for stream in streams]


async def merge(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Completion]]:
    """The parts of all streams as they come, with the stream's number; all are cancelled when the reader stops."""
    queue: asyncio.Queue[tuple[int, Completion | BaseException]] = asyncio.Queue()

    async def pump(number: int, stream: Stream) -> None:
        try:
            async for part in stream.parts():
                queue.put_nowait((number, part))
        except Exception as error:  # noqa: BLE001 - raised again where the parts are read
            queue.put_nowait((number, error))

    pumps = [asyncio.ensure_future(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            number, part = await queue.get()
            if isinstance(part, BaseException):
                raise part
            yield number, part
            left -= part.finish is not None
    finally:
        for task in pumps:
            task.cancel()
        cancel(streams)


def cancel(streams: Sequence[Stream]) -> None:
    """Stop what has not finished."""
    for stream in streams:
        stream.cancel()


def event(data: dict[str, Any]) -> bytes:
    """A part of a streamed answer."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def status_of(error: RamifyError) -> int:
    """Return the HTTP status of a failure."""
    return STATUS.get(type(error), 500)


def refusal(error: RamifyError) -> dict[str, Any]:
    """Return the body for a failure. Its code is the status, or OpenAI's word for a prompt that is too long."""
    code = "context_length_exceeded" if isinstance(error, ContextOverflow) else status_of(error)
    return {"error": {"message": error.message, "type": error.name, "code": code}}
