"""The state of the orchestrator, as the status of a run has it."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

from ramify.orchestrate.status import get_phase
from ramify.run.state import RunPhase

SCALING_PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


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
    assert get_phase(build_run(is_trained=False)) == "running"
    assert get_phase(build_run(due=("held-out",))) == "evaluating"
    assert get_phase(build_run(running=("held-out",))) == "evaluating"
    assert get_phase(build_run()) == "finished"
    stopped = build_run(due=("held-out",))
    stopped.stop_requested.set()
    assert get_phase(stopped) == "leaving"


def test_phases_are_documented():
    table = SCALING_PAGE.read_text("utf-8").partition("| state | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(RunPhase)
