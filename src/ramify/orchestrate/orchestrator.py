"""The orchestrator process. It alone opens the run's store, and every process it talks to may die and restart.

Everything runs on one event loop, in one task group: an unhandled failure of any task ends the run with that failure.
"""

import asyncio
import gc
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any

from ramify.core.async_calls import cancel_all, unwrap_exception_group, wait_for_event
from ramify.core.errors import RunStalled
from ramify.core.names import format_count
from ramify.orchestrate import background, status
from ramify.orchestrate.background import ShowSamples
from ramify.orchestrate.components import LogMetrics, RunComponents
from ramify.orchestrate.run_config import EXIT_RESUMABLE, RunConfig
from ramify.orchestrate.untrainable_groups import DEFAULT_NO_SIGNAL_SETTINGS, NoSignalSettings
from ramify.processes.wire import WireServer

# The traces of groups in flight are many objects that live for seconds. With Python's thresholds, a sixth of the time
# goes into looking for cycles among them.
GC_THRESHOLDS = (100_000, 20, 100)
POLL_INTERVAL = 1.0  # seconds between checks of whether the run is finished


class Orchestrator:
    """The orchestrator of one run. Call `run` once.

    `on_metrics` gets step and metrics of every step, `on_samples` a few rollouts of each source with their advantages
    every few steps, `on_status_address` the address of the status server.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        on_metrics: LogMetrics | None = None,
        on_samples: ShowSamples | None = None,
        on_status_address: Callable[[str], None] | None = None,
        no_signal_settings: NoSignalSettings = DEFAULT_NO_SIGNAL_SETTINGS,
    ) -> None:
        self._run = RunComponents(config, on_metrics, no_signal_settings)
        self._on_samples, self._on_status_address = on_samples, on_status_address

    async def run(self) -> int:
        """Run until the run is finished or stopped, and return the exit code. Raises the failure that ends the run."""
        run = self._run
        async with AsyncExitStack() as stack:
            await run.open(stack)
            gc.freeze()  # loaded modules are not garbage
            gc.set_threshold(*GC_THRESHOLDS)
            await self._start_servers(stack)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGUSR1):
                loop.add_signal_handler(number, self.request_stop)
            try:
                async with asyncio.TaskGroup() as task_group:
                    tasks = {
                        name: task_group.create_task(work, name=name)
                        for name, work in {
                            **({"head": run.replicator.watch_for_newer_head()} if run.replicator else {}),
                            "sampling": run.dispatcher.run(),
                            "weights": run.weight_updater.run(),
                            "watchdog": background.watch_for_stalls(run),
                            "untrainable groups": background.watch_untrainable_groups(
                                run.core, run.progress, ends_run=run.config.orchestrator.on_no_signal == "end"
                            ),
                            "warning": background.warn_without_signal(run.core, run.progress),
                            "state": background.write_states(run),
                            "load": background.adapt_concurrency(run.client, run.limiter, run.dispatcher),
                            "engine times": background.record_engine_times(
                                run.trainer_service, run.client, run.progress
                            ),
                            "batches": background.report_batches(run, self._on_samples),
                            "evals": run.evaluator.run_queued(),
                            **{
                                name: service.wait_failed()
                                for name, service in run.connections.get_watched_services().items()
                            },
                        }.items()
                    }
                    exit_code = await self._wait_until_finished()
                    if exit_code is None:
                        for name in ("sampling", "evals"):  # env servers may stop now, which is not a failure
                            tasks[name].cancel()
                        exit_code = await self._checkpoint_and_stop()
                    for task in tasks.values():
                        task.cancel()
            except BaseExceptionGroup as group:
                raise unwrap_exception_group(group) from group
            return exit_code

    def request_stop(self) -> None:
        """Request a checkpoint and the end of the run, which can be resumed later."""
        self._run.stop_requested.set()

    async def _start_servers(self, stack: AsyncExitStack) -> None:
        """Start the trainer service and the status server."""
        run, config = self._run, self._run.config
        address, handlers = config.orchestrator.address, run.trainer_service.handlers
        trainer_server = WireServer(handlers, address, secret=config.secret, name="orchestrator")
        await stack.enter_async_context(trainer_server)
        status_handlers: dict[str, status.StatusHandler] = {
            "/health": lambda _: {"ok": True},
            "/status": lambda _: status.build_state(run),
            "/metrics": lambda request: status.query_metrics(run, request.query_params.get("name", "*")),
        }
        address, hosts = config.orchestrator.status_address, config.orchestrator.allowed_hosts
        status_server = status.build_status_server(address, status_handlers, self.request_stop, allowed_hosts=hosts)
        await stack.enter_async_context(status_server)
        if self._on_status_address is not None:
            self._on_status_address(status_server.address)
        ledger_progress = run.core.ledger_progress
        run.run_log.log_event("started", committed=ledger_progress.committed, incarnation=ledger_progress.incarnation)
        addresses = f"trainer address {trainer_server.address}, status {status_server.address}"
        print(f"orchestrator of {config.path}: {addresses}", flush=True)

    async def _wait_until_finished(self) -> int | None:
        """Wait until all steps are committed and the last eval is done; return the exit code, None after a stop."""
        run, trainer_service = self._run, self._run.trainer_service
        while not trainer_service.is_finished:
            trainer_service.checkpoint_committed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL):
                    await run_unless_stopped(run.stop_requested, trainer_service.checkpoint_committed.wait())
            if run.stop_requested.is_set():
                return None
        num_steps = run.core.ledger_progress.committed
        if not num_steps:
            drops = run.ledger.describe_drops() or "none"
            raise RunStalled(f"no batch was formed before the tasks ran out; dropped groups: {drops}")
        if not await run_unless_stopped(run.stop_requested, self._run_final_evals()):
            return None
        await run.core.drop_open_groups()
        run.run_log.log_event("finished", step=num_steps)
        await trainer_service.notify_waiters()
        print(f"finished: {format_count(num_steps, 'step')} in {time.time() - run.started_at:.0f} s", flush=True)
        return 0

    async def _run_final_evals(self) -> None:
        """Evaluate the last version, once the engines serve it; `watch_for_stalls` limits the wait."""
        run, weight_updater = self._run, self._run.weight_updater
        last_step = run.core.ledger_progress.committed
        while weight_updater.served_version is None or weight_updater.served_version.step < last_step:
            if weight_updater.waiting_since is None and run.dispatcher.weights_ready.is_set():
                break  # no newer version will follow
            await asyncio.sleep(POLL_INTERVAL / 4)
        await run.evaluator.wait_for_queued()
        if names := run.evaluator.get_due_sources(last_step, is_last=True):
            await run.evaluator.run(last_step, names)

    async def _checkpoint_and_stop(self) -> int:
        """Wait for a checkpoint of the trained steps, for at most `launch.grace_period`; return the exit code."""
        run, trainer_service, core = self._run, self._run.trainer_service, self._run.core
        trainer_service.is_stopping = True
        trainer_service.checkpoint_committed.clear()
        await trainer_service.notify_waiters()
        if trainer_service.has_trainer and core.ledger_progress.acknowledged > core.ledger_progress.committed:
            await wait_for_event(trainer_service.checkpoint_committed, run.config.launch.grace_period)
        run.run_log.log_event("stopped", committed=core.ledger_progress.committed)
        return EXIT_RESUMABLE


async def run_unless_stopped(stop_requested: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Await `work` unless a stop is requested first. Return whether it completed."""
    work_task = asyncio.create_task(work)
    tasks = [work_task, asyncio.create_task(stop_requested.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            work_task.result()
        return work_task.done()
    finally:
        await cancel_all(tasks)
