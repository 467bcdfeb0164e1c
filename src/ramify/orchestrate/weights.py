"""Which weights the engines sample from: published by the trainer, applied here, one version at a time.

Only the newest version matters, so one that is overtaken while it waits is never applied. An eval may hold the weights:
versions then wait until its calls are done, while training goes on inside its bound.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from ramify.client import InferenceClient
from ramify.errors import RamifyError
from ramify.model.version import PolicyVersion

AGAIN = 1.0  # seconds before engines that could not take a version are asked again
PATIENCE = 600.0  # seconds after which engines that take no version end the run


class Weights:
    """The engines of a run and the version they serve."""

    def __init__(self, client: InferenceClient, applied: Callable[[PolicyVersion, float], None]) -> None:
        self._client, self._tell = client, applied
        self.serving: PolicyVersion | None = None
        self._wanted: tuple[PolicyVersion, Path] | None = None
        self._applying: PolicyVersion | None = None
        self._swapping = asyncio.Lock()
        self._news = asyncio.Event()
        self._holders = 0
        self._free = asyncio.Event()
        self._free.set()
        self.waiting_since: float | None = None
        self._failing_since: float | None = None

    def offer(self, version: PolicyVersion, path: Path) -> None:
        """The trainer has published a version. The engines may have begun with it."""
        served = self._client.versions.values()
        if self.serving is None and version.step == 0 and served and all(each == version for each in served):
            self.serving = version
            self._tell(version, 0.0)
            return
        self._wanted = (version, path)
        self.waiting_since = self.waiting_since or time.monotonic()
        self._news.set()

    def forget(self) -> None:
        """The trainer that offered the last version is gone, and what it made is no part of the history."""
        self._wanted = self.waiting_since = self._failing_since = None
        self._news.clear()

    @property
    def needed(self) -> list[PolicyVersion]:
        """The versions that must stay on disk: what is served, what is being applied, what is next."""
        wanted = self._wanted[0] if self._wanted else None
        return [version for version in (self.serving, self._applying, wanted) if version is not None]

    @property
    def held(self) -> bool:
        return self._holders > 0

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """No new weights meanwhile; a version that is being applied already is waited for."""
        self._holders += 1
        self._free.clear()
        try:
            async with self._swapping:
                pass
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
            async with self._swapping:
                if self.held:
                    continue
                self._news.clear()
                applied = self._wanted is None or await self._apply(*self._wanted)
            if not applied:
                await asyncio.sleep(AGAIN)
                self._news.set()

    async def _apply(self, version: PolicyVersion, path: Path) -> bool:
        """Let the engines take a version; False if they have to be asked again."""
        self._applying = version
        try:
            done = await self._client.update_weights(path, version)
        except RamifyError as error:
            if self._wanted is None:
                return False  # nobody wants it any more
            overtaken = self._wanted[0] != version
            self._failing_since = self._failing_since or time.monotonic()
            if not overtaken and (not error.retryable or time.monotonic() - self._failing_since > PATIENCE):
                raise
            return False
        finally:
            self._applying = None
        self.serving, self._failing_since = version, None
        if self._wanted is not None and self._wanted[0] == version:
            self._wanted = self.waiting_since = None
        self._tell(version, max(one.seconds for one in done))
        return True
