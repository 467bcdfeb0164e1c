"""What goes on beside the sampling for as long as a run lives: evals, cut batches, the engines' load, the watchdog.

Each is one task without an end; what fails by a name nobody handles ends the run by that name.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from ramify.errors import EnvironmentFault, Failure, NoTrainableGroups, RunStalled
from ramify.orchestrate.concurrency import Load
from ramify.orchestrate.run import Run
from ramify.orchestrate.snapshot import write_snapshot
from ramify.orchestrate.telling import status, why
from ramify.store.group_state import GroupState
from ramify.store.ledger import BatchRecord, Ledger
from ramify.trace import Trace

LOOK = 1.0  # seconds between two looks at the engines' load and at the run's progress
SNAPSHOT_INTERVAL = 2.0  # seconds between two snapshots of the run's state
RECENT_DROPS = 1000  # dropped groups that a snapshot describes: to read all of a long run takes a second
FAULTS = 64  # attempts that the code of an environment may fail before one has come through

Show = Callable[[int, Mapping[str, list[tuple[Trace, float | None]]]], None]


async def evaluate(run: Run) -> None:
    """Evals as they fall due, the first with the weights the run begins with."""
    if run.sampling.open.is_set() and (names := run.evaluating.due(0)):
        run.due.put_nowait((0, names))
    while True:
        step, names = await run.due.get()
        while not run.due.empty():  # one took longer than its interval: what fell due meanwhile is one eval
            run.due.task_done()
            step, more = run.due.get_nowait()
            names = [*names, *more]
        due = run.evaluating.due(step)
        if names := [name for name in dict.fromkeys(names) if name in due]:
            await run.evaluating.run(step, names)
        run.due.task_done()


async def follow_load(run: Run) -> None:
    """As many attempts at once as the engines bear."""
    while True:
        await asyncio.sleep(LOOK)
        run.loads = await run.client.get_loads()
        if run.loads:
            worst = Load(max(load.kv_usage for load in run.loads), sum(load.num_waiting for load in run.loads))
            run.concurrency.observe(worst, run.sampling.out)
            run.sampling.wake()


async def watch(run: Run) -> None:
    """Raises RunStalled, with who waits for what, when nothing has moved for too long; EnvironmentFault, much earlier,
    for an environment whose code lets no attempt through."""
    limit = run.config.orchestrator.stall_timeout
    while True:
        await asyncio.sleep(min(LOOK, limit / 4))
        _check_faults(run)
        if run.evaluating.running:
            run.progress.moved = max(run.progress.moved, *run.evaluating.running.values())
        if (idle := time.monotonic() - run.progress.moved) > limit:
            lines = [f"  {each['who']} waits for {each['waits_for']} ({each['detail']})" for each in why(run)]
            said = f"no step in {idle:.0f} s (orchestrator.stall_timeout is {limit:g})"
            report = "\n".join([said, *lines, f"  dropped groups: {run.ledger.describe_drops() or 'none'}"])
            with contextlib.suppress(OSError):  # a disk without room must not hide what stalled
                (run.config.path / "stalled.txt").write_text(report + "\n")
            raise RunStalled(report)


async def write_snapshots(run: Run) -> None:
    """Write the state of the run to disk every SNAPSHOT_INTERVAL seconds, for when this process does not answer."""
    while True:
        state = status(run)
        dropped = describe_recent_drops(run.ledger, state["groups"].get(GroupState.DROPPED.value, 0))
        write_snapshot(run.config.path, state, why(run), dropped)
        await asyncio.sleep(SNAPSHOT_INTERVAL)


def describe_recent_drops(ledger: Ledger, total: int) -> str:
    """Return why groups were dropped; of more than RECENT_DROPS groups, only the last are read."""
    reasons = ledger.describe_drops(limit=RECENT_DROPS)
    return f"{reasons} (the last {RECENT_DROPS} of {total})" if total > RECENT_DROPS else reasons


async def watch_patience(run: Run) -> None:
    """Raise NoTrainableGroups, or record it as a failure, after `patience` groups without a trainable one."""
    patience = run.core.patience
    while not run.core.admission.finished:
        await patience.exceeded.wait()
        error = NoTrainableGroups(await patience.report(run.ledger))
        if run.core.admission.finished:  # groups beyond the last batch do not matter
            return
        if run.config.orchestrator.on_no_signal == "end":
            raise error
        print(f"{error.name}: {error.message}", flush=True)
        run.progress.trouble("rewards", Failure.from_exception(error))


def _check_faults(run: Run) -> None:
    for source, (count, said) in list(run.progress.faults.items()):
        if count < FAULTS or source not in run.sampling.sources:
            continue
        if not run.store.select("SELECT 1 FROM rollouts WHERE source = ? LIMIT 1", (source,)):
            raise EnvironmentFault(f"{source}: {count} attempts failed and none came through; the last: {said}")
        del run.progress.faults[source]


async def follow_cuts(run: Run, show: Show | None) -> None:
    """Every batch that is decided, told to the trainer and to people."""
    while True:
        await run.sampling.cut.wait()
        run.sampling.cut.clear()
        batches = run.ledger.batches(run.next)
        if batches:
            run.progress.cut({batch.step: _ages(run, batch) for batch in batches})
        for batch in batches:
            run.next = batch.step + 1
            _say(run, batch)
            if show is not None:
                _show_some(run, batch, show)
        await run.service.announce()


def _ages(run: Run, batch: BatchRecord) -> list[int]:
    return [batch.step - run.ledger.get_group(number).version for number in batch.group_numbers]


def _say(run: Run, batch: BatchRecord) -> None:
    last, rate = run.progress.last, run.progress.speed()
    k, n = run.progress.trainable
    print(
        f"step {batch.step}: reward {last.get('reward/all/mean', 0.0):.3f}, trainable {k}/{n}, "
        f"{rate[0]:.1f} rollouts/s, {rate[1]:.0f} tokens/s, staleness {last.get('staleness/mean', 0.0):.1f}",
        flush=True,
    )


def _show_some(run: Run, batch: BatchRecord, show: Show) -> None:
    """A few rollouts of each source, out of the batch that was just decided."""
    samples = run.config.monitor.samples
    if not samples.count or batch.step % samples.interval:
        return
    shown: dict[str, list[tuple[Trace, float | None]]] = {}
    for number in batch.group_numbers:
        rollouts = shown.setdefault(run.ledger.get_group(number).source, [])
        for attempt in run.ledger.attempts(number)[: samples.count - len(rollouts)]:
            if attempt.rollout_id is not None:
                rollouts.append((run.store.read_traces(attempt.rollout_id)[0], attempt.notes.get("advantage")))
    show(batch.step, shown)
