"""Reports what a starting orchestrator waits for: in its log, in the run's events and in its state.

The status server starts after all connections, so until then `ramify why` and the launcher read the file.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

from ramify.core.async_calls import cancel_all
from ramify.orchestrate.config import RunConfig
from ramify.run.state import OrchestratorState, RunPhase, Wait
from ramify.run.store.run_log import RunLog

REPORT_INTERVAL = 5.0  # seconds


class StartupReport:
    """The waits of an orchestrator that starts.

    `committed` is the step at which it starts. A wait is reported after `interval` seconds, and is written
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
        self._write_state(Wait("orchestrator", what, 0.0, timeout))
        task = asyncio.create_task(self._report(what, timeout), name=f"report of the wait for {what}")
        try:
            yield
        finally:
            await cancel_all([task])
        self._write_state()  # if the block has raised, `ramify why` still finds what it waited for

    async def _report(self, what: str, timeout: float | None) -> None:
        started_at, is_logged = time.monotonic(), False
        while True:
            await asyncio.sleep(self._interval)
            seconds = time.monotonic() - started_at
            self._write_state(Wait("orchestrator", what, round(seconds, 1), timeout))
            if not is_logged:
                is_logged = True
                limit = "" if timeout is None else f" of {timeout:g} s"
                print(f"waiting for {what}: {seconds:.0f} s{limit}", flush=True)
                self._run_log.log_event("waiting", what=what, timeout=timeout)

    def _write_state(self, *waits: Wait) -> None:
        config = self._config
        with contextlib.suppress(OSError):  # a full disk is reported by the store, not here
            OrchestratorState(
                run=str(config.path),
                step=self._committed,
                max_steps=config.max_steps,
                state=RunPhase.STARTING,
                waits=list(waits),
            ).write(config.path)
