"""The orchestrator as a process: it holds the run's one store, and everybody it talks to may die.

Everything runs on one event loop, in one task group: whatever fails by a name nobody handles ends the run by that name.
"""

import asyncio
import gc
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

from ramify.errors import RamifyError, RunStalled
from ramify.orchestrate import background, status
from ramify.orchestrate.background import ShowSamples
from ramify.orchestrate.config import RunConfig
from ramify.orchestrate.run_context import LogMetrics, RunContext
from ramify.orchestrate.status_server import build_status_server
from ramify.wire import WireServer

POLL_INTERVAL = 1.0  # seconds between two looks at whether the run is over
EXIT_RESUMABLE = 75  # the exit code of a run that was asked to leave and can be continued


class Orchestrator:
    """One run. `run` it once; the result is the exit code.

    `log` is told the numbers of every step, `show` now and then a few rollouts of each source, with their advantages,
    `answers` where the run can be asked how it is.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        on_metrics: LogMetrics | None = None,
        on_samples: ShowSamples | None = None,
        on_status_address: Callable[[str], None] | None = None,
    ) -> None:
        self._run, self._on_samples, self._on_status_address = (
            RunContext(config, on_metrics),
            on_samples,
            on_status_address,
        )

    async def run(self) -> int:
        run = self._run
        async with AsyncExitStack() as stack:
            await run.open(stack)
            gc.freeze()  # what was loaded is no garbage
            await self._start_servers(stack)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGUSR1):
                loop.add_signal_handler(number, self.request_stop)
            try:
                async with asyncio.TaskGroup() as together:
                    tasks = [
                        together.create_task(work, name=name)
                        for name, work in {
                            "sampling": run.sampling.run(),
                            "weights": run.weight_updater.run(),
                            "watchdog": background.watch_for_stalls(run),
                            "patience": background.watch_patience(run),
                            "snapshots": background.write_snapshots(run),
                            "load": background.adapt_concurrency(run),
                            "cutting": background.report_batches(run, self._on_samples),
                            "evals": background.run_due_evals(run),
                        }.items()
                    ]
                    code = await self._wait_until_finished()
                    for task in tasks:
                        task.cancel()
            except BaseExceptionGroup as group:
                raise _unwrap_exception_group(group) from group
            return code

    def request_stop(self) -> None:
        """Make a checkpoint and end, to be continued."""
        self._run.stop_requested.set()

    async def _start_servers(self, stack: AsyncExitStack) -> None:
        """Open the doors: the trainer's, and the one for those who want to know."""
        run, config = self._run, self._run.config
        trainer_server = WireServer(
            run.trainer_service.handlers, config.orchestrator.address, secret=config.secret, name="orchestrator"
        )
        await stack.enter_async_context(trainer_server)
        handlers = {
            "/health": lambda _: {"ok": True},
            "/status": lambda _: status.build_status(run),
            "/why": lambda _: status.list_waits(run),
            "/dropped": lambda _: run.ledger.describe_drops(),
            "/metrics": lambda request: status.query_metrics(run, request.query_params.get("name", "*")),
        }
        place, hosts = config.orchestrator.status, config.orchestrator.allowed_hosts
        http_server = build_status_server(place, handlers, self.request_stop, allowed_hosts=hosts)
        await stack.enter_async_context(http_server)
        if self._on_status_address is not None:
            self._on_status_address(http_server.address)
        ledger_progress = run.core.ledger_progress
        run.journal.log_event("started", committed=ledger_progress.committed, incarnation=ledger_progress.incarnation)
        print(f"orchestrating {config.path} at {trainer_server.address}; status at {http_server.address}", flush=True)

    async def _wait_until_finished(self) -> int:
        """Until every step is in the history and the last eval is done, or the run was asked to leave."""
        run = self._run
        leaving = asyncio.create_task(run.stop_requested.wait())
        try:
            while not run.trainer_service.is_finished:
                run.trainer_service.checkpoint_committed.clear()
                done = asyncio.create_task(run.trainer_service.checkpoint_committed.wait())
                await asyncio.wait({leaving, done}, return_when=asyncio.FIRST_COMPLETED, timeout=POLL_INTERVAL)
                done.cancel()
                if leaving.done():
                    return await self._checkpoint_and_stop()
        finally:
            leaving.cancel()
        if not run.core.ledger_progress.committed:
            dropped = run.ledger.describe_drops() or "none"
            raise RunStalled(f"the tasks ended before there was a batch to learn from; dropped groups: {dropped}")
        if not await run_unless_stopped(run.stop_requested, self._run_final_evals()):
            return await self._checkpoint_and_stop()
        await run.core.drop_open_groups()
        run.journal.log_event("finished", step=run.core.ledger_progress.committed)
        await run.trainer_service.notify_waiters()
        print(
            f"finished: {run.core.ledger_progress.committed} steps in {time.time() - run.started_at:.0f} s", flush=True
        )
        return 0

    async def _run_final_evals(self) -> None:
        """What the run has come to: the last version, once the engines have it."""
        run = self._run
        last = run.core.ledger_progress.committed
        while run.weight_updater.served_version is None or run.weight_updater.served_version.step < last:
            if run.weight_updater.waiting_since is None and run.weight_updater.served_version is not None:
                break  # nothing newer is coming
            await asyncio.sleep(POLL_INTERVAL / 4)
        await run.eval_queue.join()
        if names := run.evaluator.get_due_sources(last, is_last=True):
            await run.evaluator.run(last, names)

    async def _checkpoint_and_stop(self) -> int:
        run = self._run
        run.trainer_service.is_stopping = True
        run.trainer_service.checkpoint_committed.clear()
        await run.trainer_service.notify_waiters()
        if (
            run.trainer_service.has_trainer
            and run.core.ledger_progress.acknowledged > run.core.ledger_progress.committed
        ):
            with suppress(TimeoutError):
                async with asyncio.timeout(run.config.launch.grace):
                    await run.trainer_service.checkpoint_committed.wait()
        run.journal.log_event("left", committed=run.core.ledger_progress.committed)
        return EXIT_RESUMABLE


async def run_unless_stopped(stop_requested: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do this to its end, unless it is time to leave before; whether it was done. `work` has deadlines of its own."""
    doing = asyncio.create_task(work)
    tasks = [doing, asyncio.create_task(stop_requested.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _unwrap_exception_group(error: BaseException) -> BaseException:
    """The failure with a name, where there is one among those that fell together."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [_unwrap_exception_group(each) for each in error.exceptions]
    return next((each for each in found if isinstance(each, RamifyError)), found[0])
