"""A deadline around a block, with the name of what was waited for."""

import asyncio
from types import TracebackType

from ramify.errors import DeadlineExceeded


class fail_after:  # noqa: N801 - read as a word: `async with within(...)`
    """Raises DeadlineExceeded when the block takes longer; a TimeoutError of the block's own passes as it is.

    A class and no generator: every phase of every rollout goes through here.
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
