"""What goes on beside the sampling for as long as a run lives: evals, cut batches, the engines' load, the watchdog.

Each is one task without an end; what fails by a name nobody handles ends the run by that name.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

from ramify.errors import EnvironmentFault, Failure, NoTrainableGroups, RunStalled
from ramify.orchestrate.concurrency import CombinedLoad
from ramify.orchestrate.run_context import RunContext
from ramify.orchestrate.snapshot import write_snapshot
from ramify.orchestrate.status import build_status, list_waits
from ramify.store.group_state import GroupState
from ramify.store.ledger import BatchRecord, Ledger
from ramify.trace import Trace

POLL_INTERVAL = 1.0  # seconds between two looks at the engines' load and at the run's progress
SNAPSHOT_INTERVAL = 2.0  # seconds between two snapshots of the run's state
MAX_DESCRIBED_DROPS = 1000  # dropped groups that a snapshot describes: to read all of a long run takes a second
MAX_ENVIRONMENT_FAULTS = 64  # attempts that the code of an environment may fail before one has come through

ShowSamples = Callable[[int, Mapping[str, list[tuple[Trace, float | None]]]], None]


async def run_due_evals(run: RunContext) -> None:
    """Evals as they fall due, the first with the weights the run begins with."""
    if run.sampling.weights_ready.is_set() and (names := run.evaluator.get_due_sources(0)):
        run.eval_queue.put_nowait((0, names))
    while True:
        step, names = await run.eval_queue.get()
        while not run.eval_queue.empty():  # one took longer than its interval: what fell due meanwhile is one eval
            run.eval_queue.task_done()
            step, more = run.eval_queue.get_nowait()
            names = [*names, *more]
        due = run.evaluator.get_due_sources(step)
        if names := [name for name in dict.fromkeys(names) if name in due]:
            await run.evaluator.run(step, names)
        run.eval_queue.task_done()


async def adapt_concurrency(run: RunContext) -> None:
    """As many attempts at once as the engines bear."""
    while True:
        await asyncio.sleep(POLL_INTERVAL)
        run.engine_loads = await run.client.get_loads()
        if run.engine_loads:
            worst = CombinedLoad(
                max(load.kv_usage for load in run.engine_loads), sum(load.num_waiting for load in run.engine_loads)
            )
            run.limiter.update(worst, run.sampling.num_in_flight)
            run.sampling.wake()


async def watch_for_stalls(run: RunContext) -> None:
    """Raises RunStalled, with who waits for what, when nothing has moved for too long; EnvironmentFault, much earlier,
    for an environment whose code lets no attempt through."""
    limit = run.config.orchestrator.stall_timeout
    while True:
        await asyncio.sleep(min(POLL_INTERVAL, limit / 4))
        _check_environment_faults(run)
        if run.evaluator.started_at:
            run.progress.last_progress_time = max(run.progress.last_progress_time, *run.evaluator.started_at.values())
        if (idle := time.monotonic() - run.progress.last_progress_time) > limit:
            lines = [f"  {each['who']} waits for {each['waits_for']} ({each['detail']})" for each in list_waits(run)]
            said = f"no step in {idle:.0f} s (orchestrator.stall_timeout is {limit:g})"
            report = "\n".join([said, *lines, f"  dropped groups: {run.ledger.describe_drops() or 'none'}"])
            with contextlib.suppress(OSError):  # a disk without room must not hide what stalled
                (run.config.path / "stalled.txt").write_text(report + "\n")
            raise RunStalled(report)


async def write_snapshots(run: RunContext) -> None:
    """Write the state of the run to disk every SNAPSHOT_INTERVAL seconds, for when this process does not answer."""
    while True:
        state = build_status(run)
        dropped = describe_recent_drops(run.ledger, state["groups"].get(GroupState.DROPPED.value, 0))
        write_snapshot(run.config.path, state, list_waits(run), dropped)
        await asyncio.sleep(SNAPSHOT_INTERVAL)


def describe_recent_drops(ledger: Ledger, total: int) -> str:
    """Return why groups were dropped; of more than RECENT_DROPS groups, only the last are read."""
    reasons = ledger.describe_drops(limit=MAX_DESCRIBED_DROPS)
    return f"{reasons} (the last {MAX_DESCRIBED_DROPS} of {total})" if total > MAX_DESCRIBED_DROPS else reasons


async def watch_patience(run: RunContext) -> None:
    """Raise NoTrainableGroups, or record it as a failure, after `patience` groups without a trainable one."""
    patience = run.core.patience
    while not run.core.admission.is_finished:
        await patience.exceeded.wait()
        error = NoTrainableGroups(await patience.report(run.ledger))
        if run.core.admission.is_finished:  # groups beyond the last batch do not matter
            return
        if run.config.orchestrator.on_no_signal == "end":
            raise error
        print(f"{error.name}: {error.message}", flush=True)
        run.progress.record_failure("rewards", Failure.from_exception(error))


def _check_environment_faults(run: RunContext) -> None:
    for source, (count, said) in list(run.progress.environment_faults.items()):
        if count < MAX_ENVIRONMENT_FAULTS or source not in run.sampling.sources:
            continue
        if not run.store.select("SELECT 1 FROM rollouts WHERE source = ? LIMIT 1", (source,)):
            raise EnvironmentFault(f"{source}: {count} attempts failed and none came through; the last: {said}")
        del run.progress.environment_faults[source]


async def report_batches(run: RunContext, on_samples: ShowSamples | None) -> None:
    """Every batch that is decided, told to the trainer and to people."""
    while True:
        await run.sampling.batch_formed.wait()
        run.sampling.batch_formed.clear()
        batches = run.ledger.batches(run.next_step_to_report)
        if batches:
            run.progress.record_batches({batch.step: _compute_staleness(run, batch) for batch in batches})
        for batch in batches:
            run.next_step_to_report = batch.step + 1
            _print_step(run, batch)
            if on_samples is not None:
                _show_samples(run, batch, on_samples)
        await run.trainer_service.notify_waiters()


def _compute_staleness(run: RunContext, batch: BatchRecord) -> list[int]:
    return [batch.step - run.ledger.get_group(number).version for number in batch.group_numbers]


def _print_step(run: RunContext, batch: BatchRecord) -> None:
    last, rate = run.progress.latest_metrics, run.progress.get_throughput()
    k, n = run.progress.trainable_counts
    print(
        f"step {batch.step}: reward {last.get('reward/all/mean', 0.0):.3f}, trainable {k}/{n}, "
        f"{rate[0]:.1f} rollouts/s, {rate[1]:.0f} tokens/s, staleness {last.get('staleness/mean', 0.0):.1f}",
        flush=True,
    )


def _show_samples(run: RunContext, batch: BatchRecord, on_samples: ShowSamples) -> None:
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
    on_samples(batch.step, shown)
