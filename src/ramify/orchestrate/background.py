"""Background tasks of an orchestrator: reports, adaptive concurrency, the written state, watchdogs.

Each is one asyncio task that runs until it is cancelled. An unhandled failure ends the run with that failure.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import urlsplit

from ramify.core.async_calls import call_storage
from ramify.core.errors import EnvironmentFault, Failure, RunStalled
from ramify.infer.client import InferenceClient
from ramify.orchestrate.attempt_dispatcher import AttemptDispatcher
from ramify.orchestrate.components import ConcurrencyLimiter, RunComponents
from ramify.orchestrate.connected_source import ConnectedSource
from ramify.orchestrate.core import OrchestratorCore
from ramify.orchestrate.progress import EngineTimeMeter, RunProgress
from ramify.orchestrate.status import build_state, list_waits
from ramify.orchestrate.trainer_service import TrainerService
from ramify.orchestrate.untrainable_groups import has_trainable_group
from ramify.rollout.evals.stats import format_score
from ramify.run.state import OrchestratorState
from ramify.run.store.ledger import BatchRecord
from ramify.run.store.summary import get_agent_failure, get_error_before_reply
from ramify.trace import Trace

POLL_INTERVAL = 1.0  # seconds between checks of engine load and of progress
STATE_INTERVAL = 2.0  # seconds between two writes of the state

ShowSamples = Callable[[int, Mapping[str, list[tuple[Trace, float | None]]]], None]


async def adapt_concurrency(
    client: InferenceClient, limiter: ConcurrencyLimiter, dispatcher: AttemptDispatcher
) -> None:
    """Adapt the number of attempts in flight to the load of the engines."""
    while True:
        await asyncio.sleep(POLL_INTERVAL)
        if loads := list((await client.get_loads()).values()):
            limiter.update(loads, dispatcher.num_in_flight)
            dispatcher.wake()


async def record_engine_times(trainer_service: TrainerService, client: InferenceClient, progress: RunProgress) -> None:
    """Record what the engines did during every trained step, and the utilization if all devices' peaks are known."""
    meter = EngineTimeMeter()
    while True:
        trained = await trainer_service.trained_steps.get()
        if metrics := meter.measure(trained, await client.get_loads()):
            progress.record_metrics(trained.step, metrics)


async def watch_for_stalls(run: RunComponents) -> None:
    """Raise RunStalled, with a list of all waits, after `stall_timeout` seconds without progress.

    Raise the last failure, much earlier, if every attempt fails in environment code, or its agent seems to be broken.
    """
    timeout = run.config.orchestrator.stall_timeout
    while True:
        await asyncio.sleep(min(POLL_INTERVAL, timeout / 4))
        _check_fruitless_attempts(run)
        if run.evaluator.started_at:
            run.progress.last_progress_time = max(run.progress.last_progress_time, *run.evaluator.started_at.values())
        if (idle := time.monotonic() - run.progress.last_progress_time) > timeout:
            waits = [f"  {wait.who} waits for {wait.waits_for} ({wait.detail})" for wait in list_waits(run)]
            message = f"no progress for {idle:.0f} s (orchestrator.stall_timeout = {timeout:g})"
            report = "\n".join([message, *waits, f"  dropped groups: {run.ledger.describe_drops() or 'none'}"])
            with contextlib.suppress(OSError):  # a full disk must not hide the stall
                (run.config.path / "stalled.txt").write_text(report + "\n")
            raise RunStalled(report)


async def write_states(run: RunComponents) -> None:
    """Write the state of the run every STATE_INTERVAL seconds, for when this process does not answer."""
    while True:
        with contextlib.suppress(OSError):  # a full disk is reported by the store, not here
            await call_storage(partial(build_state(run).write, run.config.path), OrchestratorState.FILE)
        await asyncio.sleep(STATE_INTERVAL)


async def watch_untrainable_groups(core: OrchestratorCore, progress: RunProgress, *, ends_run: bool) -> None:
    """Raise RunStalled, or record it as a failure, after `max_untrainable_groups` groups without a trainable one."""
    while not core.admission.is_finished:
        await core.untrainable_groups.exceeded.wait()
        error = RunStalled(await core.untrainable_groups.report(core.ledger))
        if core.admission.is_finished:  # groups after the last batch do not matter
            return
        if ends_run:
            raise error
        _warn_about_rewards(progress, error)


async def warn_without_signal(core: OrchestratorCore, progress: RunProgress) -> None:
    """Record RunStalled as a failure each time that `warning_groups` groups in a row cannot be trained on."""
    while not core.admission.is_finished:
        await core.untrainable_groups.warning_due.wait()
        core.untrainable_groups.warning_due.clear()
        _warn_about_rewards(progress, RunStalled(f"warning: {core.untrainable_groups.describe(core.ledger)}"))


def _warn_about_rewards(progress: RunProgress, error: RunStalled) -> None:
    print(f"{error.name}: {error.message}", flush=True)
    progress.record_failure("rewards", Failure.from_exception(error))


def _check_fruitless_attempts(run: RunComponents) -> None:
    """Raise the last failure of a source of which `max_fruitless_attempts` attempts failed and none succeeded.

    A source of which a group can be trained on is not broken: its agents may exit with an error if they fail.
    """
    for source, (count, failure) in list(run.progress.fruitless_attempts.items()):
        if count < run.no_signal_settings.max_fruitless_attempts or source not in run.dispatcher.sources:
            continue
        rollouts = run.store.iter_rollouts(source=source)
        if not has_trainable_group(run.ledger, source) and all(get_agent_failure(row.summary) for row in rollouts):
            is_fault, first_line = failure.name == EnvironmentFault.name, failure.message.partition("\n")[0]
            rollouts = run.store.iter_rollouts(source=source)
            has_replies = not all(get_error_before_reply(row.summary) for row in rollouts)
            agent_end = "were refused, or exited with an error" if has_replies else "ended before the first reply"
            end = "failed in environment code" if is_fault else agent_end
            text = failure.message if is_fault else first_line
            message = f"{source}: all {count} attempts {end}; last error: {text}"
            raise Failure(failure.name, message, failure.blame, failure.retryable).to_exception()
        del run.progress.fruitless_attempts[source]


async def report_batches(run: RunComponents, on_samples: ShowSamples | None) -> None:
    """Record and print every new batch, show samples of it, and wake up the trainer's pending request."""
    while True:
        await run.dispatcher.batch_formed.wait()
        run.dispatcher.batch_formed.clear()
        batches = run.ledger.batches(run.next_step_to_report)
        if batches:
            run.progress.record_batches(
                {
                    batch.step: [batch.step - run.ledger.get_group(number).version for number in batch.group_numbers]
                    for batch in batches
                }
            )
        for batch in batches:
            if metrics := measure_env_servers(run.sources):
                run.progress.record_metrics(batch.step, metrics)
            run.next_step_to_report = batch.step + 1
            _print_step(run.progress, batch.step)
            if on_samples is not None:
                _show_samples(run, batch, on_samples)
        await run.trainer_service.notify_waiters()


def measure_env_servers(sources: Mapping[str, ConnectedSource]) -> dict[str, float]:
    """Return the counters of env servers by source and host, of sources with several servers.

    The ports are left out: a restarted server often has another one, and every name of a metric is kept.
    """
    metrics: Counter[str] = Counter()
    for name, source in sources.items():
        for server in source.servers.servers if len(source.servers.servers) > 1 else ():
            prefix = f"env_servers/{name}/{urlsplit(server.address).hostname}"
            counts = {"in_flight": server.num_in_flight, "done": server.num_done, "lost": server.num_lost}
            metrics.update({f"{prefix}/{key}": value for key, value in counts.items()})
    return {name: float(value) for name, value in metrics.items()}


def _print_step(progress: RunProgress, step: int) -> None:
    metrics = progress.latest_metrics
    rollouts, tokens = metrics.get("rollouts_per_s", 0.0), metrics.get("tokens_per_s", 0.0)
    num_trainable, num_scored = progress.trainable_counts
    reward, staleness = metrics.get("reward/all/mean", 0.0), metrics.get("staleness/mean", 0.0)
    print(
        f"step {step}: reward {format_score(reward)}, trainable {num_trainable}/{num_scored}, "
        f"{rollouts:.1f} rollouts/s, {tokens:.0f} tokens/s, staleness {staleness:.1f}",
        flush=True,
    )


def _show_samples(run: RunComponents, batch: BatchRecord, on_samples: ShowSamples) -> None:
    """Pass a few rollouts of each source in the batch, with their advantages, to `on_samples`."""
    config = run.config.monitor.samples
    if not config.per_source or batch.step % config.interval:
        return
    samples_by_source: dict[str, list[tuple[Trace, float | None]]] = {}
    for number in batch.group_numbers:
        samples = samples_by_source.setdefault(run.ledger.get_group(number).source, [])
        for attempt in run.ledger.attempts(number)[: config.per_source - len(samples)]:
            if attempt.rollout_id is not None:
                samples.append((run.store.read_traces(attempt.rollout_id)[0], attempt.notes.get("advantage")))
    on_samples(batch.step, samples_by_source)
