"""Reports what a starting orchestrator waits for: in its log, in the run's events and in `status.json`.

The status server starts after all connections, so until then `ramify why` and the launcher read the file.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from ramify.async_calls import cancel_all
from ramify.orchestrate.config import RunConfig
from ramify.orchestrate.snapshot import write_snapshot
from ramify.store.run_log import RunLog

REPORT_INTERVAL = 5.0  # seconds until a wait is reported, and between snapshots of it


class StartupReport:
    """The waits of an orchestrator that starts. `committed` is the step at which it starts."""

    def __init__(self, config: RunConfig, run_log: RunLog, committed: int) -> None:
        self._config, self._run_log, self._committed = config, run_log, committed
        self._write_snapshot("engines and env servers", 0.0)

    @contextlib.asynccontextmanager
    async def waiting_for(self, what: str) -> AsyncGenerator[None]:
        """Report `what` as long as the block runs; a short wait is not reported."""
        task = asyncio.create_task(self._report(what), name=f"report of the wait for {what}")
        try:
            yield
        finally:
            await cancel_all([task])

    async def _report(self, what: str) -> None:
        started_at, timeout, is_logged = time.monotonic(), self._config.launch.startup_timeout, False
        while True:
            await asyncio.sleep(REPORT_INTERVAL)
            seconds = time.monotonic() - started_at
            self._write_snapshot(what, seconds)
            if not is_logged:
                is_logged = True
                print(f"waiting for {what}: {seconds:.0f} s of {timeout:g} s", flush=True)
                self._run_log.log_event("waiting", what=what, timeout=timeout)

    def _write_snapshot(self, what: str, seconds: float) -> None:
        config = self._config
        status = {
            "run": str(config.path),
            "step": self._committed,
            "max_steps": config.max_steps,
            "state": "starting",
        }
        timeout = config.launch.startup_timeout
        wait = {"who": "orchestrator", "waits_for": what, "since_s": round(seconds, 1), "deadline_s": timeout}
        write_snapshot(config.path, status, [wait])
