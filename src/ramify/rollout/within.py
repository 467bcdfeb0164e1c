"""A deadline around a block, with the name of what was waited for."""

import asyncio
from types import TracebackType

from ramify.errors import DeadlineExceeded


class within:  # noqa: N801 - read as a word: `async with within(...)`
    """Raises DeadlineExceeded when the block takes longer; a TimeoutError of the block's own passes as it is.

    A class and no generator: every phase of every rollout goes through here.
    """

    __slots__ = ("_awaited", "_scope", "_seconds")

    def __init__(self, seconds: float, awaited: str) -> None:
        self._seconds, self._awaited = seconds, awaited
        self._scope = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            raise DeadlineExceeded(f"{self._awaited} took longer than {self._seconds:g} s") from late
