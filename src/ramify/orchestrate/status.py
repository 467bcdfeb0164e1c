"""What a run says of itself: who waits for what, and how far it is. Everything here only reads."""

import math
import time
from fnmatch import fnmatchcase
from typing import Any

from ramify.orchestrate.run_context import RunContext

REWARD_CURVE_POINTS = 40  # points of the reward curve that the status shows


def list_waits(run: RunContext) -> list[dict[str, Any]]:
    """Who waits for what, since when."""
    now, found = time.monotonic(), []

    def add_wait(who: str, what: str, since: float, deadline: float | None, detail: str) -> None:
        found.append(
            {"who": who, "waits_for": what, "since_s": round(since, 1), "deadline_s": deadline, "detail": detail}
        )

    idle, limit = now - run.progress.last_progress_time, run.config.orchestrator.stall_timeout
    admission = run.core.admission
    if not run.sampling.weights_ready.is_set():
        add_wait(
            "sampling", "the trainer's first weights", idle, limit, "the engines serve other weights than the run's"
        )
    elif run.sampling.num_in_flight:
        add_wait("sampling", f"{run.sampling.num_in_flight} attempts", idle, limit, _describe_oldest_attempt(run))
    elif not admission.num_free_slots and not admission.is_finished:
        add_wait(
            "sampling", "a free slot", idle, limit, f"{admission.num_active} of {admission.limits.slots} groups active"
        )
    if not run.trainer_service.has_trainer:
        add_wait("orchestrator", "a trainer", idle, limit, "none has come yet")
    elif run.trainer_service.pending_request is not None:
        step, since = run.trainer_service.pending_request
        blocking = admission.get_blocking_groups()[:5]
        scored = f"{run.core.attempt_queue.num_waiting} attempts wait, groups {blocking} are not scored"
        add_wait("trainer", f"the batch of step {step}", now - since, limit, scored)
    elif run.core.ledger_progress.acknowledged < admission.next_step:
        add_wait("orchestrator", f"the trainer to do step {run.core.ledger_progress.acknowledged}", idle, limit, "")
    elif admission.is_finished and not run.trainer_service.is_finished:
        add_wait(
            "orchestrator",
            f"the checkpoint of step {admission.next_step}",
            idle,
            limit,
            "the trainer has done every step",
        )
    if run.weight_updater.waiting_since is not None:
        detail = "an eval holds the weights" if run.weight_updater.is_held else "the engines are being updated"
        add_wait("weights", "the engines to take a version", now - run.weight_updater.waiting_since, None, detail)
    for name, since in run.evaluator.started_at.items():
        add_wait(f"eval {name}", "its rollouts", now - since, None, "")
    busy = sum(load.num_running for load in run.engine_loads)
    if run.sampling.num_in_flight and busy:
        urls = ", ".join(run.client.versions)
        add_wait("env servers", f"{busy} model calls", idle, limit, f"the engines at {urls} hold them")
    for url, reason in run.client.down_replicas.items():
        add_wait("client", f"the engine at {url}", idle, None, reason)
    return found


def _describe_oldest_attempt(run: RunContext) -> str:
    """The attempt that keeps the run waiting."""
    if (found := run.sampling.get_oldest_attempt()) is None:
        return ""
    attempt, source, seconds = found
    served = run.sampling.sources[source]
    where = f"{source} at {served.client.address}, of at most {served.attempt_timeout:g} s"
    return f"the oldest is {attempt}, for {seconds:.0f} s at {where}"


def build_status(run: RunContext) -> dict[str, Any]:
    """How far the run is, and how it goes."""
    ledger_progress, progress, last = run.core.ledger_progress, run.progress, run.progress.latest_metrics
    rollouts, tokens = progress.get_throughput()
    done, steps = ledger_progress.acknowledged, run.config.max_steps
    elapsed = time.time() - run.started_at
    steps_this_process = done - run.first_step
    eta = elapsed / steps_this_process * (steps - done) if steps_this_process > 0 else None
    return {
        "run": str(run.config.path),
        "step": done,
        "max_steps": steps,
        "committed": ledger_progress.committed,
        "incarnation": ledger_progress.incarnation,
        "state": "leaving"
        if run.stop_requested.is_set()
        else "finished"
        if run.trainer_service.is_finished
        else "running",
        "eta_s": eta,
        "reward": progress.mean_reward,
        "reward_history": progress.reward_history[-REWARD_CURVE_POINTS:],
        "rollouts_per_s": rollouts,
        "tokens_per_s": tokens,
        "staleness": {"mean": last.get("staleness/mean"), "max": last.get("staleness/max")},
        "trainable": list(progress.trainable_counts),
        "groups": run.ledger.count_by_state(),
        "processes": {each["who"]: f"waits for {each['waits_for']}" for each in list_waits(run)},
        "errors": list(progress.recent_failures)[-5:],
        "failures": dict(progress.failure_counts),
        "evals": progress.evals,
        "version": None if run.weight_updater.served_version is None else str(run.weight_updater.served_version),
    }


def query_metrics(run: RunContext, pattern: str) -> list[dict[str, Any]]:
    """The numbers whose names match; JSON has no word for some, which are told as text."""
    return [
        {**metric._asdict(), "value": metric.value if math.isfinite(metric.value) else str(metric.value)}
        for metric in run.journal.metrics()
        if fnmatchcase(metric.name, pattern)
    ]
