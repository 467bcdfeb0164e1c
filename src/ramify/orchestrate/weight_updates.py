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

RETRY_DELAY = 1.0  # seconds before engines that could not take a version are asked again
UPDATE_TIMEOUT = 600.0  # seconds after which engines that take no version end the run


class WeightUpdater:
    """The engines of a run and the version they serve."""

    def __init__(self, client: InferenceClient, on_applied: Callable[[PolicyVersion, float], None]) -> None:
        self._client, self._on_applied = client, on_applied
        self.served_version: PolicyVersion | None = None
        self._pending_update: tuple[PolicyVersion, Path] | None = None
        self._applying_version: PolicyVersion | None = None
        self._update_lock = asyncio.Lock()
        self._update_requested = asyncio.Event()
        self._num_holders = 0
        self._not_held = asyncio.Event()
        self._not_held.set()
        self.waiting_since: float | None = None
        self._failing_since: float | None = None

    def request_update(self, version: PolicyVersion, path: Path) -> None:
        """The trainer has published a version. The engines may have begun with it."""
        served = self._client.versions.values()
        if self.served_version is None and version.step == 0 and served and all(each == version for each in served):
            self.served_version = version
            self._on_applied(version, 0.0)
            return
        self._pending_update = (version, path)
        self.waiting_since = self.waiting_since or time.monotonic()
        self._update_requested.set()

    def discard_pending(self) -> None:
        """The trainer that offered the last version is gone, and what it made is no part of the history."""
        self._pending_update = self.waiting_since = self._failing_since = None
        self._update_requested.clear()

    @property
    def versions_in_use(self) -> list[PolicyVersion]:
        """The versions that must stay on disk: what is served, what is being applied, what is next."""
        wanted = self._pending_update[0] if self._pending_update else None
        return [version for version in (self.served_version, self._applying_version, wanted) if version is not None]

    @property
    def is_held(self) -> bool:
        return self._num_holders > 0

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """No new weights meanwhile; a version that is being applied already is waited for."""
        self._num_holders += 1
        self._not_held.clear()
        try:
            async with self._update_lock:
                pass
            yield
        finally:
            self._num_holders -= 1
            if not self._num_holders:
                self._not_held.set()

    async def run(self) -> None:
        """Apply what is offered, for ever. Raises when engines take no version for too long."""
        while True:
            await self._update_requested.wait()
            await self._not_held.wait()
            async with self._update_lock:
                if self.is_held:
                    continue
                self._update_requested.clear()
                applied = self._pending_update is None or await self._apply(*self._pending_update)
            if not applied:
                await asyncio.sleep(RETRY_DELAY)
                self._update_requested.set()

    async def _apply(self, version: PolicyVersion, path: Path) -> bool:
        """Let the engines take a version; False if they have to be asked again."""
        self._applying_version = version
        try:
            done = await self._client.update_weights(path, version)
        except RamifyError as error:
            if self._pending_update is None:
                return False  # nobody wants it any more
            overtaken = self._pending_update[0] != version
            self._failing_since = self._failing_since or time.monotonic()
            if not overtaken and (not error.retryable or time.monotonic() - self._failing_since > UPDATE_TIMEOUT):
                raise
            return False
        finally:
            self._applying_version = None
        self.served_version, self._failing_since = version, None
        if self._pending_update is not None and self._pending_update[0] == version:
            self._pending_update = self.waiting_since = None
        self._on_applied(version, max(one.seconds for one in done))
        return True
