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
from ramify.orchestrate import telling, watching
from ramify.orchestrate.config import RunConfig
from ramify.orchestrate.run import Log, Run
from ramify.orchestrate.status import status_server
from ramify.orchestrate.watching import Show
from ramify.wire import WireServer

LOOK = 1.0  # seconds between two looks at whether the run is over
LEFT = 75  # the exit code of a run that was asked to leave and can be continued


class Orchestrator:
    """One run. `run` it once; the result is the exit code.

    `log` is told the numbers of every step, `show` now and then a few rollouts of each source, with their advantages,
    `answers` where the run can be asked how it is.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        log: Log | None = None,
        show: Show | None = None,
        answers: Callable[[str], None] | None = None,
    ) -> None:
        self._run, self._show, self._answers = Run(config, log), show, answers

    async def run(self) -> int:
        run = self._run
        async with AsyncExitStack() as stack:
            await run.open(stack)
            gc.freeze()  # what was loaded is no garbage
            await self._listen(stack)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGUSR1):
                loop.add_signal_handler(number, self.leave)
            try:
                async with asyncio.TaskGroup() as together:
                    tasks = [
                        together.create_task(work, name=name)
                        for name, work in {
                            "sampling": run.sampling.run(),
                            "weights": run.weights.run(),
                            "watchdog": watching.watch(run),
                            "patience": watching.watch_patience(run),
                            "snapshots": watching.write_snapshots(run),
                            "load": watching.follow_load(run),
                            "cutting": watching.follow_cuts(run, self._show),
                            "evals": watching.evaluate(run),
                        }.items()
                    ]
                    code = await self._until_over()
                    for task in tasks:
                        task.cancel()
            except BaseExceptionGroup as group:
                raise _first(group) from group
            return code

    def leave(self) -> None:
        """Make a checkpoint and end, to be continued."""
        self._run.leaving.set()

    async def _listen(self, stack: AsyncExitStack) -> None:
        """Open the doors: the trainer's, and the one for those who want to know."""
        run, config = self._run, self._run.config
        server = WireServer(
            run.service.handlers, config.orchestrator.address, secret=config.secret, name="orchestrator"
        )
        await stack.enter_async_context(server)
        answers = {
            "/health": lambda _: {"ok": True},
            "/status": lambda _: telling.status(run),
            "/why": lambda _: telling.why(run),
            "/dropped": lambda _: run.ledger.describe_drops(),
            "/metrics": lambda request: telling.metrics(run, request.query_params.get("name", "*")),
        }
        place, hosts = config.orchestrator.status, config.orchestrator.allowed_hosts
        status = status_server(place, answers, self.leave, allowed_hosts=hosts)
        await stack.enter_async_context(status)
        if self._answers is not None:
            self._answers(status.address)
        marks = run.core.marks
        run.journal.log_event("started", committed=marks.committed, incarnation=marks.incarnation)
        print(f"orchestrating {config.path} at {server.address}; status at {status.address}", flush=True)

    async def _until_over(self) -> int:
        """Until every step is in the history and the last eval is done, or the run was asked to leave."""
        run = self._run
        leaving = asyncio.create_task(run.leaving.wait())
        try:
            while not run.service.over:
                run.service.committed.clear()
                done = asyncio.create_task(run.service.committed.wait())
                await asyncio.wait({leaving, done}, return_when=asyncio.FIRST_COMPLETED, timeout=LOOK)
                done.cancel()
                if leaving.done():
                    return await self._checkpoint_and_leave()
        finally:
            leaving.cancel()
        if not run.core.marks.committed:
            dropped = run.ledger.describe_drops() or "none"
            raise RunStalled(f"the tasks ended before there was a batch to learn from; dropped groups: {dropped}")
        if not await unless(run.leaving, self._last_evals()):
            return await self._checkpoint_and_leave()
        await run.core.finish()
        run.journal.log_event("finished", step=run.core.marks.committed)
        await run.service.announce()
        print(f"finished: {run.core.marks.committed} steps in {time.time() - run.started:.0f} s", flush=True)
        return 0

    async def _last_evals(self) -> None:
        """What the run has come to: the last version, once the engines have it."""
        run = self._run
        last = run.core.marks.committed
        while run.weights.serving is None or run.weights.serving.step < last:
            if run.weights.waiting_since is None and run.weights.serving is not None:
                break  # nothing newer is coming
            await asyncio.sleep(LOOK / 4)
        await run.due.join()
        if names := run.evaluating.due(last, last=True):
            await run.evaluating.run(last, names)

    async def _checkpoint_and_leave(self) -> int:
        run = self._run
        run.service.leaving = True
        run.service.committed.clear()
        await run.service.announce()
        if run.service.met and run.core.marks.acknowledged > run.core.marks.committed:
            with suppress(TimeoutError):
                async with asyncio.timeout(run.config.launch.grace):
                    await run.service.committed.wait()
        run.journal.log_event("left", committed=run.core.marks.committed)
        return LEFT


async def unless(leaving: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do this to its end, unless it is time to leave before; whether it was done. `work` has deadlines of its own."""
    doing = asyncio.create_task(work)
    tasks = [doing, asyncio.create_task(leaving.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _first(error: BaseException) -> BaseException:
    """The failure with a name, where there is one among those that fell together."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    found = [_first(each) for each in error.exceptions]
    return next((each for each in found if isinstance(each, RamifyError)), found[0])
