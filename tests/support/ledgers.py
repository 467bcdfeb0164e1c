"""Ledgers of training runs, moved from state to state as an orchestrator and a trainer would do."""

import asyncio
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

from ramify.launch.run_directory import FINISHED_KEY
from ramify.orchestrate.batches import BatchGroup, encode_batch
from ramify.run.store import RunStore
from ramify.run.store.ledger import BatchRecord, CommitRecord, GroupRecord, Ledger
from ramify.run.store.run_log import RunLog
from ramify.trace import Annotation
from tests.support.traces import make_rollout


def run_all(*changes: Coroutine[Any, Any, Any]) -> Any:
    """Run coroutines one after another; return the result of the last."""

    async def run_each() -> Any:
        return [await change for change in changes][-1]

    return asyncio.run(run_each())


def issue(ledger: Ledger, number: int, *, size: int = 2, **options: Any) -> None:
    """Issue a group of the source `reverse`."""
    run_all(ledger.issue_groups([GroupRecord(number, "reverse", number, size, **options)]))


def sample(ledger: Ledger, number: int, attempt: int) -> None:
    """Record a rollout of an attempt."""
    run_all(ledger.record_sampled(number, attempt, *make_rollout(number * 10 + attempt)))


def issue_and_score(ledger: Ledger, number: int, *, size: int = 2, **options: Any) -> None:
    """Bring a new group to the state `scored`."""
    issue(ledger, number, size=size, **options)
    for attempt in range(size):
        sample(ledger, number, attempt)
    run_all(ledger.record_scored(number))


def record_batch(ledger: Ledger, step: int, *groups: int) -> None:
    """Record the batch of a step."""
    run_all(ledger.record_batch(BatchRecord(step, groups, b"notes", {"rl": 4})))


def train(ledger: Ledger, step: int) -> None:
    """Serve a batch to the newest trainer, which acknowledges the step."""
    incarnation = ledger.progress().incarnation
    run_all(ledger.record_served(step, incarnation=incarnation), ledger.acknowledge_step(step, incarnation=incarnation))


def train_groups(ledger: Ledger, numbers: Iterable[int]) -> None:
    """Train one new group in each step; the step has the group's number."""
    for number in numbers:
        issue_and_score(ledger, number)
        record_batch(ledger, number, number)
        train(ledger, number)


def make_commit(ledger: Ledger, version: int) -> CommitRecord:
    """Return the commit of the newest trainer."""
    incarnation = ledger.progress().incarnation
    return CommitRecord(version, incarnation, f"step_{version:06}-{incarnation}", "digest")


def commit(ledger: Ledger, version: int) -> None:
    """Commit a version as the newest trainer."""
    run_all(ledger.commit_version(make_commit(ledger, version)))


def commit_step(ledger: Ledger, step: int, *groups: int) -> None:
    """Train a step on new groups, and commit it."""
    for group in groups:
        issue_and_score(ledger, group)
    record_batch(ledger, step, *groups)
    train(ledger, step)
    commit(ledger, step + 1)


def states(ledger: Ledger) -> list[str]:
    """Return the state of every group."""
    return [group.state.value for group in ledger.groups()]


def write_finished_run(path: Path, *, steps: int = 4) -> None:
    """Write a finished run of one group a step, without checkpoints and weights."""
    with RunStore.open(path) as store:
        ledger, log = Ledger.open(store), RunLog(store)
        for step in range(steps):
            issue_and_score(ledger, step)
            run_all(ledger.record_batch(_make_batch(ledger, step)))
            train(ledger, step)
            log.log_metrics(step, {"forest/token_ratio": 0.5, "reward/all/mean": step / steps})
        commit(ledger, steps)
        store.set_fact(FINISHED_KEY, steps)
        log.log_event("finished")


def _make_batch(ledger: Ledger, step: int) -> BatchRecord:
    """Return the batch of the group with the step's number, as an orchestrator records it."""
    rollout_ids = tuple(attempt.rollout_id or "" for attempt in ledger.attempts(step))
    traces = [ledger.store.read_traces(rollout_id)[0] for rollout_id in rollout_ids]
    annotations = tuple(Annotation(trace.id, 1, advantage=1.0) for trace in traces)
    group = BatchGroup(step, "reverse", 1.0, rollout_ids, annotations)
    return encode_batch(step, [(group, group.build_forest(traces, None))], None)
