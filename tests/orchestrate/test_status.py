"""The state of a run, as its status has it."""

import asyncio
from types import SimpleNamespace

from ramify.orchestrate.status import get_run_state


def build_run(*, is_trained: bool = True, due: tuple[str, ...] = (), running: tuple[str, ...] = ()) -> SimpleNamespace:
    evaluator = SimpleNamespace(
        started_at=dict.fromkeys(running, 0.0), get_due_sources=lambda step, *, is_last: list(due)
    )
    return SimpleNamespace(
        stop_requested=asyncio.Event(),
        trainer_service=SimpleNamespace(is_finished=is_trained),
        core=SimpleNamespace(ledger_progress=SimpleNamespace(committed=10)),
        evaluator=evaluator,
    )


def test_run_is_not_finished_before_its_last_eval_has_ended():
    assert get_run_state(build_run(is_trained=False)) == "running"
    assert get_run_state(build_run(due=("held-out",))) == "evaluating"
    assert get_run_state(build_run(running=("held-out",))) == "evaluating"
    assert get_run_state(build_run()) == "finished"
    stopped = build_run(due=("held-out",))
    stopped.stop_requested.set()
    assert get_run_state(stopped) == "leaving"
