"""The base of what is started and closed, also by `async with`. Importable without ZMQ."""

from typing import Self


class AsyncService:
    """Something that works between `start` and `close`, or in `async with`."""

    async def start(self) -> Self:
        """Start it, and return it."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close it."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()
