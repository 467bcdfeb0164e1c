"""A timeout for a block of code, with an error that names the operation."""

import asyncio
from types import TracebackType

from ramify.errors import DeadlineExceeded


class fail_after:  # noqa: N801 - used like a function, as `asyncio.timeout` is
    """Raises DeadlineExceeded if the block takes longer than `timeout` seconds; `what` names the operation.

    A TimeoutError that the block raises itself passes unchanged. This is a class rather than a generator for speed:
    every phase of every rollout uses it.
    """

    __slots__ = ("_scope", "_timeout", "_what")

    def __init__(self, timeout: float, what: str) -> None:
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
            raise DeadlineExceeded(f"{self._what} took longer than {self._timeout:g} s") from timeout_error
