"""Which weights the engines sample from: published by the trainer, applied here, one version at a time.

Only the newest version matters, so one that is overtaken while it waits is never applied. An eval may hold the weights:
versions then wait until its calls are done, while training goes on inside its bound.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from ramify.client import Client
from ramify.errors import RamifyError
from ramify.model.version import Version

AGAIN = 1.0  # seconds before engines that could not take a version are asked again
PATIENCE = 600.0  # seconds after which engines that take no version end the run


class Weights:
    """The engines of a run and the version they serve."""

    def __init__(self, client: Client, applied: Callable[[Version, float], None]) -> None:
        self._client, self._tell = client, applied
        self.serving: Version | None = None
        self._wanted: tuple[Version, Path] | None = None
        self._news = asyncio.Event()
        self._holders = 0
        self._free = asyncio.Event()
        self._free.set()
        self.waiting_since: float | None = None

    def offer(self, version: Version, path: Path) -> None:
        """The trainer has published a version."""
        self._wanted = (version, path)
        self.waiting_since = self.waiting_since or time.monotonic()
        self._news.set()

    @property
    def needed(self) -> list[Version]:
        """The versions that must stay on disk: what is served, and what is about to be."""
        wanted = [self._wanted[0]] if self._wanted else []
        return ([self.serving] if self.serving else []) + wanted

    @property
    def held(self) -> bool:
        return self._holders > 0

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """No new weights meanwhile."""
        self._holders += 1
        self._free.clear()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._free.set()

    async def run(self) -> None:
        """Apply what is offered, for ever. Raises when engines take no version for too long."""
        while True:
            await self._news.wait()
            await self._free.wait()
            self._news.clear()
            assert self._wanted is not None
            version, path = self._wanted
            try:
                done = await self._client.update_weights(path, version)
            except RamifyError as error:
                since = self.waiting_since or time.monotonic()
                if not error.retryable or time.monotonic() - since > PATIENCE:
                    raise
                self._news.set()
                await asyncio.sleep(AGAIN)
                continue
            self.serving = version
            if self._wanted[0] == version:
                self._wanted = None
                self.waiting_since = None
            self._tell(version, max(one.seconds for one in done))
