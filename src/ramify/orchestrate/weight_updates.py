"""Updates the weights of the engines to the versions that the trainer publishes, one version at a time.

Only the newest version matters, so a version that is superseded while it waits is never applied. An eval may hold the
weights: updates then wait until its rollouts are done, while training continues within its staleness limit. While no
engine is up, a newer version cancels the update that waits, and so does a replaced trainer: its weights may exist only
in its memory. While an engine is up, an update is not cancelled, because the weights of that engine would be unknown: a
newer one waits for it, and each engine has the client's `control_timeout` to apply it. A version that an eval holds may
be lost: it was copied from the trainer's memory and never written, and its last engine died. Then the update does not
wait.

Engines may copy a version from the trainer's memory, which the trainer must not change meanwhile: it may when
`wait_until_copied` returns. While an eval holds the weights, no engine copies, so the trainer continues; the engines
then skip that version.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

from ramify.core.async_calls import wait_for_event
from ramify.core.errors import RamifyError
from ramify.infer.client import InferenceClient
from ramify.model.weights_manifest import MANIFEST_FILE
from ramify.trace.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """How failed updates are retried."""

    retry_delay: float = 1.0  # seconds before a failed update is retried
    timeout: float = 600.0  # seconds of failed updates after which the run ends
    copy_timeout: float = 20.0  # seconds that the trainer waits for engines that copy from its memory


COPY_POLL_INTERVAL = 0.005


class WeightUpdater:
    """Updates the engines of a run. `on_applied` gets every applied version and the seconds that it took.

    Attributes:
        served_version: version that the engines serve; None until it is known.
        waiting_since: monotonic time since which an update is pending; None without one.
    """

    def __init__(
        self,
        client: InferenceClient,
        on_applied: Callable[[PolicyVersion, float], None],
        *,
        run: str = "",
        settings: UpdateSettings = UpdateSettings(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the updates of a run; `run` identifies it to the engines, which refuse its replaced trainers."""
        self._client, self._on_applied, self._run = client, on_applied, run
        self._settings, self._clock = settings, clock
        self.served_version: PolicyVersion | None = None
        self._served_path: Path | None = None  # None for the version that the engines were started with
        self._pending_update: tuple[PolicyVersion, Path] | None = None
        self._applying_version: PolicyVersion | None = None
        self._apply_timeout: asyncio.Timeout | None = None
        self._update_lock = asyncio.Lock()
        self._update_requested = asyncio.Event()
        self._num_holders = 0
        self._not_held = asyncio.Event()
        self._not_held.set()
        self.waiting_since: float | None = None
        self._failing_since: float | None = None
        self._failed_version: PolicyVersion | None = None

    def request_update(self, version: PolicyVersion, path: Path) -> None:
        """Request an update to a published version, unless the engines were started with it."""
        served = set(self._client.versions.values())
        if self.served_version is None and version.step == 0 and served == {version}:
            self.served_version = version
            self._on_applied(version, 0.0)
            return
        self._pending_update = (version, path)
        self.waiting_since = self.waiting_since or self._clock()
        self._update_requested.set()
        if version != self._applying_version:
            self._cancel_update_without_engines()

    def discard_pending(self) -> None:
        """Discard the pending update: it came from a trainer that was replaced."""
        self._pending_update = self.waiting_since = self._failing_since = None
        self._update_requested.clear()
        self._cancel_update_without_engines()

    def _cancel_update_without_engines(self) -> None:
        """Cancel the update that waits for an engine, unless one is up."""
        if self._apply_timeout is not None and not self._client.versions and not self._apply_timeout.expired():
            self._apply_timeout.reschedule(asyncio.get_running_loop().time())

    @property
    def versions_in_use(self) -> list[PolicyVersion]:
        """Versions that must stay on disk: served, being applied, and pending."""
        pending = self._pending_update[0] if self._pending_update else None
        return [version for version in (self.served_version, self._applying_version, pending) if version is not None]

    async def wait_until_copied(self, version: PolicyVersion) -> str:
        """Wait until no engine copies a version from the trainer's memory, nor is about to.

        Return "", or which engines have not copied it within the settings' `copy_timeout`.
        """
        deadline = self._clock() + self._settings.copy_timeout
        while urls := self._list_engines_still_copying(version):
            if self._clock() >= deadline:
                timeout = f"{self._settings.copy_timeout:g} s"
                return f"{', '.join(urls)} did not copy {version} within {timeout}; its weights change now"
            await asyncio.sleep(COPY_POLL_INTERVAL)
        return ""

    def _list_engines_still_copying(self, version: PolicyVersion) -> list[str]:
        """Return the engines that are up and will copy a version, by URL."""
        is_pending = self._pending_update is not None and self._pending_update[0] == version
        will_be_applied = is_pending and not self.is_held and self._failed_version != version
        if self._applying_version != version and not will_be_applied:
            return []
        return [url for url, served in self._client.versions_of_copying_engines.items() if served != version]

    @property
    def is_held(self) -> bool:
        """Whether updates wait for an eval."""
        return self._num_holders > 0

    @contextlib.asynccontextmanager
    async def hold(self) -> AsyncGenerator[None]:
        """Hold the weights, unless their version is lost; an update that is being applied is finished first."""
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

    async def _may_update(self) -> bool:
        """Return whether no eval holds the weights, or the version that it holds is lost."""
        if not self.is_held:
            return True
        path = self._served_path
        if self._client.versions or self._pending_update is None or path is None:
            return False
        return not await asyncio.to_thread((path / MANIFEST_FILE).is_file)

    async def run(self) -> None:
        """Apply requested updates until cancelled. Raises the failure if updates fail for the settings' `timeout`."""
        while True:
            await self._update_requested.wait()
            while not await self._may_update():
                await wait_for_event(self._not_held, self._settings.retry_delay)
            async with self._update_lock:
                if not await self._may_update():
                    continue
                self._update_requested.clear()
                applied = self._pending_update is None or await self._apply(*self._pending_update)
            if not applied:
                await wait_for_event(self._update_requested, self._settings.retry_delay)  # a newer one is not delayed
                self._update_requested.set()

    async def _apply(self, version: PolicyVersion, path: Path) -> bool:
        """Update the engines; return whether they serve the version now."""
        self._applying_version = version
        try:
            # no deadline of its own; rescheduled to cancel the update
            async with asyncio.timeout(None) as self._apply_timeout:
                seconds_by_url = await self._client.update_weights(path, version, run=self._run)
        except TimeoutError:
            if self._apply_timeout is None or not self._apply_timeout.expired():
                raise
            return False  # cancelled while no engine was up
        except RamifyError as error:
            if self._pending_update is None:
                return False  # the update was discarded
            is_superseded = self._pending_update[0] != version
            self._failing_since, self._failed_version = self._failing_since or self._clock(), version
            is_fatal = not error.retryable or self._clock() - self._failing_since > self._settings.timeout
            if is_fatal and not is_superseded:
                raise
            return False
        finally:
            self._applying_version = self._apply_timeout = None
        self.served_version, self._served_path, self._failing_since = version, path, None
        if self._pending_update is not None and self._pending_update[0] == version:
            self._pending_update = self.waiting_since = None
        self._on_applied(version, max(seconds_by_url.values()))
        return True
