"""Helpers for asyncio: a timeout that names its operation, retries with backoff, and the cancellation of tasks."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

from ramify.errors import DeadlineExceeded, RamifyError

T = TypeVar("T")


class fail_after:  # noqa: N801 - used like a function, as `asyncio.timeout` is
    """Raises DeadlineExceeded if the block takes longer than `timeout` seconds; `what` names the operation.

    A TimeoutError that the block raises itself passes unchanged. This is a class rather than a generator for speed:
    every phase of every rollout uses it.
    """

    __slots__ = ("_scope", "_timeout", "_what")

    def __init__(self, timeout: float, what: str | Callable[[], str]) -> None:
        self._timeout, self._what = timeout, what
        self._scope = asyncio.timeout(timeout)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as timeout_error:
            what = self._what if isinstance(self._what, str) else self._what()
            raise DeadlineExceeded(f"{what} took longer than {self._timeout:g} s") from timeout_error


async def retry(call: Callable[[], Awaitable[T]], *, max_retries: int, backoff: float) -> T:
    """Return the result of `call`, which is repeated after a retryable RamifyError, at most `max_retries` times.

    The first repetition waits `backoff` seconds, and each further one twice as long.
    """
    for num_retries in range(max_retries):
        try:
            return await call()
        except RamifyError as error:
            if not error.retryable:
                raise
        await asyncio.sleep(backoff * 2**num_retries)
    return await call()


async def cancel_all(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel tasks and wait until they have ended; what they raise is dropped."""
    ending_tasks = list(tasks)
    for task in ending_tasks:
        task.cancel()
    await asyncio.gather(*ending_tasks, return_exceptions=True)
