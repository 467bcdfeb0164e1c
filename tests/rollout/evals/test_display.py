"""The displays of a running eval."""

import io

from rich.console import Console

from ramify.core.display import LogDisplay
from ramify.rollout.evals.progress import EvalContent, EvalProgress, format_line
from ramify.run.store import RolloutRecord


def row(number: int, reward: float | None, failure: str | None = None) -> RolloutRecord:
    summary = {
        "input": 100,
        "output": 10,
        "metrics": {"exact": 1.0 if reward == 1.0 else 0.0},
        "errors": {failure: 1} if failure else {},
        "message": "out of cheese" if failure else "",
        "timing": {"harness": float(number), "model": float(number)},
        "stop": "done",
    }
    return RolloutRecord(f"task-{number}.0", f"task-{number}", reward=reward, failure=failure, summary=summary)


def make_progress() -> EvalProgress:
    progress = EvalProgress("reverse-text", 10)
    for number, reward in enumerate([1.0, 0.0, 1.0, 0.5]):
        progress.start_rollout(f"task-{number}.0")
        progress.finish_rollout(row(number, reward))
    progress.finish_rollout(row(4, None, "ProviderError"))
    progress.start_rollout("task-5.0")
    progress.update_rollout("task-5.0", "setup", 2)
    return progress


def test_format_line_lists_all_fields():
    line = format_line(make_progress())
    assert line.startswith("reverse-text done=4/10 failed=1 running=1 reward=0.625±0.239 tokens_in=500 tokens_out=50 ")
    assert "left=" in line


def test_page_shows_progress_rewards_metrics_errors_slowest_and_phases():
    console = Console(width=120, file=io.StringIO(), no_color=True)
    console.print(EvalContent().render_page(make_progress()))
    text = console.file.getvalue()
    for shown in ("5/10", "0.625±0.239", "exact", "500 in, 50 out", "ProviderError", "task-5.0", "setup", "slowest"):
        assert shown in text
    assert text.index("task-4.0") < text.index("task-3.0")  # the slowest first


def test_log_display_prints_failed_rollouts_and_the_final_state(capsys):
    display, progress = LogDisplay(EvalContent()), EvalProgress("x", 2)
    for record in (row(0, 1.0), row(1, None, "ProviderError")):
        progress.finish_rollout(record)
        display.refresh(progress)
    display.refresh(progress)
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(0).startswith("x done=1/2 failed=0 ")
    assert lines[0] == "rollout task-1.0 failed: ProviderError: out of cheese"
    assert lines[1].startswith("x done=1/2 failed=1 ")
    assert len(lines) == 2
