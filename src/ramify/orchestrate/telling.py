"""What a run says of itself: who waits for what, and how far it is. Everything here only reads."""

import math
import time
from fnmatch import fnmatchcase
from typing import Any

from ramify.orchestrate.run import Run

CURVE = 40  # points of the reward curve that the status shows


def why(run: Run) -> list[dict[str, Any]]:
    """Who waits for what, since when."""
    now, found = time.monotonic(), []

    def wait(who: str, what: str, since: float, deadline: float | None, detail: str) -> None:
        found.append(
            {"who": who, "waits_for": what, "since_s": round(since, 1), "deadline_s": deadline, "detail": detail}
        )

    idle, limit = now - run.progress.moved, run.config.orchestrator.stall_timeout
    admission = run.core.admission
    if not run.sampling.open.is_set():
        wait("sampling", "the trainer's first weights", idle, limit, "the engines serve other weights than the run's")
    elif run.sampling.out:
        wait("sampling", f"{run.sampling.out} attempts", idle, limit, _oldest(run))
    elif not admission.room and not admission.finished:
        wait("sampling", "a free slot", idle, limit, f"{admission.active} of {admission.shape.slots} groups active")
    if not run.service.met:
        wait("orchestrator", "a trainer", idle, limit, "none has come yet")
    elif run.service.asking is not None:
        step, since = run.service.asking
        scored = f"{run.core.dispatch.waiting} attempts wait, groups {admission.waiting_for()[:5]} are not scored"
        wait("trainer", f"the batch of step {step}", now - since, limit, scored)
    elif run.core.marks.acknowledged < admission.step:
        wait("orchestrator", f"the trainer to do step {run.core.marks.acknowledged}", idle, limit, "")
    elif admission.finished and not run.service.over:
        wait("orchestrator", f"the checkpoint of step {admission.step}", idle, limit, "the trainer has done every step")
    if run.weights.waiting_since is not None:
        detail = "an eval holds the weights" if run.weights.held else "the engines are being updated"
        wait("weights", "the engines to take a version", now - run.weights.waiting_since, None, detail)
    for name, since in run.evaluating.running.items():
        wait(f"eval {name}", "its rollouts", now - since, None, "")
    busy = sum(load.num_running for load in run.loads)
    if run.sampling.out and busy:
        urls = ", ".join(run.client.versions)
        wait("env servers", f"{busy} model calls", idle, limit, f"the engines at {urls} hold them")
    for url, reason in run.client.down_replicas.items():
        wait("client", f"the engine at {url}", idle, None, reason)
    return found


def _oldest(run: Run) -> str:
    """The attempt that keeps the run waiting."""
    if (found := run.sampling.oldest()) is None:
        return ""
    attempt, source, seconds = found
    served = run.sampling.sources[source]
    where = f"{source} at {served.client.address}, of at most {served.deadline:g} s"
    return f"the oldest is {attempt}, for {seconds:.0f} s at {where}"


def status(run: Run) -> dict[str, Any]:
    """How far the run is, and how it goes."""
    marks, progress, last = run.core.marks, run.progress, run.progress.last
    rollouts, tokens = progress.speed()
    done, steps = marks.acknowledged, run.config.max_steps
    spent = time.time() - run.started
    fresh = done - run.first
    eta = spent / fresh * (steps - done) if fresh > 0 else None
    return {
        "run": str(run.config.path),
        "step": done,
        "max_steps": steps,
        "committed": marks.committed,
        "incarnation": marks.incarnation,
        "state": "leaving" if run.leaving.is_set() else "finished" if run.service.over else "running",
        "eta_s": eta,
        "reward": progress.reward,
        "reward_history": progress.rewards[-CURVE:],
        "rollouts_per_s": rollouts,
        "tokens_per_s": tokens,
        "staleness": {"mean": last.get("staleness/mean"), "max": last.get("staleness/max")},
        "trainable": list(progress.trainable),
        "groups": run.ledger.count_by_state(),
        "processes": {each["who"]: f"waits for {each['waits_for']}" for each in why(run)},
        "errors": list(progress.failures)[-5:],
        "failures": dict(progress.failed),
        "evals": progress.evals,
        "version": None if run.weights.serving is None else str(run.weights.serving),
    }


def metrics(run: Run, glob: str) -> list[dict[str, Any]]:
    """The numbers whose names match; JSON has no word for some, which are told as text."""
    return [
        {**metric._asdict(), "value": metric.value if math.isfinite(metric.value) else str(metric.value)}
        for metric in run.journal.metrics()
        if fnmatchcase(metric.name, glob)
    ]
