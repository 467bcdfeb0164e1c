"""Reports what a starting orchestrator waits for: in its log, in the run's events and in `status.json`.

The status server starts after all connections, so until then `ramify why` and the launcher read the file.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from ramify.core.async_calls import cancel_all
from ramify.orchestrate.config import RunConfig
from ramify.orchestrate.snapshot import OrchestratorState, write_snapshot
from ramify.run.store.run_log import RunLog

REPORT_INTERVAL = 5.0  # seconds


class StartupReport:
    """The waits of an orchestrator that starts.

    `committed` is the step at which it starts. A wait is reported after `interval` seconds, and its snapshot is written
    again after each further interval.
    """

    def __init__(
        self, config: RunConfig, run_log: RunLog, committed: int, *, interval: float = REPORT_INTERVAL
    ) -> None:
        self._config, self._run_log, self._committed, self._interval = config, run_log, committed, interval

    @contextlib.asynccontextmanager
    async def waiting_for(self, what: str, timeout: float | None = None) -> AsyncGenerator[None]:
        """Report `what` as long as the block runs, and after it if it raises; a short wait is not logged.

        `timeout` is the seconds that the wait may take; None if only its parts have timeouts.
        """
        self._write_snapshot(_describe_wait(what, 0.0, timeout))
        task = asyncio.create_task(self._report(what, timeout), name=f"report of the wait for {what}")
        try:
            yield
        finally:
            await cancel_all([task])
        self._write_snapshot()  # if the block has raised, `ramify why` still finds what it waited for

    async def _report(self, what: str, timeout: float | None) -> None:
        started_at, is_logged = time.monotonic(), False
        while True:
            await asyncio.sleep(self._interval)
            seconds = time.monotonic() - started_at
            self._write_snapshot(_describe_wait(what, seconds, timeout))
            if not is_logged:
                is_logged = True
                limit = "" if timeout is None else f" of {timeout:g} s"
                print(f"waiting for {what}: {seconds:.0f} s{limit}", flush=True)
                self._run_log.log_event("waiting", what=what, timeout=timeout)

    def _write_snapshot(self, *waits: dict[str, Any]) -> None:
        config = self._config
        status = {
            "run": str(config.path),
            "step": self._committed,
            "max_steps": config.max_steps,
            "state": OrchestratorState.STARTING,
        }
        write_snapshot(config.path, status, waits)


def _describe_wait(what: str, seconds: float, timeout: float | None) -> dict[str, Any]:
    return {"who": "orchestrator", "waits_for": what, "since_s": round(seconds, 1), "deadline_s": timeout}
