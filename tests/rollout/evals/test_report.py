"""The scores of the report, and the bounds of rewards."""

import math
import re

from rich.console import Console

from ramify.core.errors import AgentFailed, Failure
from ramify.rollout.evals.progress import group_rewards_by_task
from ramify.rollout.evals.report import build_report, compute_scores
from ramify.rollout.evals.stats import clustered_mean, reward_bounds
from ramify.run.store import RolloutRecord
from ramify.run.store.summary import summarize_rollout
from ramify.trace import Trace


def names(*repetitions: int) -> list[str]:
    """Return the names of the scores of tasks with these numbers of rollouts."""
    rows = [
        RolloutRecord(id=f"{task}.{number}", task=str(task), repetition=number, reward=1.0, failure=None, summary={})
        for task, count in enumerate(repetitions)
        for number in range(count)
    ]
    return [name for name, *_ in compute_scores(rows, pass_threshold=1.0)]


def test_scores_use_powers_of_two_and_the_number_of_repetitions():
    assert names(6, 6, 5) == ["avg@6", "pass@1", "pass@2", "pass^2", "pass@4", "pass^4", "pass@6", "pass^6"]
    assert names(1) == ["avg@1", "pass@1"]
    assert names() == []


def test_unequal_counts_show_k_up_to_the_median_count():
    assert names(3, 5, 4, 7) == ["avg", "pass@1", "pass@2", "pass^2", "pass@4", "pass^4"]


def test_tasks_of_two_sources_with_the_same_name_are_separate():
    rows = [
        RolloutRecord(
            id=f"{source}{number}", task="0", repetition=number, source=source, reward=1.0, failure=None, summary={}
        )
        for source in "ab"
        for number in range(2)
    ]
    assert next(name for name, *_ in compute_scores(rows, pass_threshold=1.0)) == "avg@2"


def scored(task: int, number: int, reward: float, *, source: str = "", **parts: tuple[float, float]) -> RolloutRecord:
    """Return a rollout whose reward is the weighted sum of `parts`: (score, weight) by name."""
    tables = {
        "rewards": {name: score for name, (score, _) in parts.items()},
        "weights": {name: weight for name, (_, weight) in parts.items()},
    }
    id = f"{source}{task}.{number}"
    return RolloutRecord(
        id=id, task=str(task), repetition=number, source=source, reward=reward, summary=tables if parts else {}
    )


def test_intervals_stay_in_the_range_of_the_rewards():
    """The table once showed 0.939 with an interval up to 1.05, and 0.02 with one from -0.06."""
    rows = [scored(task, number, 1.0 - (task == number == 0)) for task in range(3) for number in range(2)]
    for name, estimate in compute_scores(rows, pass_threshold=1.0):
        low, high = estimate.interval()
        assert 0.0 <= low <= estimate.mean <= high <= 1.0, name
    assert clustered_mean(group_rewards_by_task(rows).values()).interval()[1] > 1.0


def test_reward_bounds_of_a_weighted_sum():
    rows = [scored(0, 0, 0.9, right=(0.7, 1.0), form=(1.0, 0.2)), scored(1, 0, 0.0, right=(0.0, 1.0), form=(0.0, 0.2))]
    assert reward_bounds(rows) == (0.0, 1.2)
    assert reward_bounds([*rows, scored(2, 0, -1.0, source="b", ends=(-1.0, 1.0))]) == (-1.0, 1.2)
    assert reward_bounds([scored(0, 0, 0.5, right=(1.0, 1.0), length=(0.5, -1.0))]) == (-1.0, 1.0)
    assert reward_bounds([scored(0, 0, 0.5), scored(1, 0, -0.25)]) == (-1.0, 1.0)
    assert reward_bounds([scored(0, 0, 7.0, points=(7.0, 1.0))]) == (-math.inf, math.inf)
    assert reward_bounds([scored(0, 0, 0.5, points=(7.0, 0.0), right=(0.5, 1.0))]) == (0.0, 1.0)
    assert reward_bounds([scored(0, 0, 7.0, right=(0.5, 1.0))]) == (-math.inf, math.inf)
    assert reward_bounds([]) == (-math.inf, math.inf)


def test_each_source_has_its_own_scores_and_an_eval_those_of_its_last_step():
    evals = [RolloutRecord(f"e{step}", "0", 0, "eval/it", step / 10, summary={"step": step}) for step in (0, 5)]
    rows = [scored(0, 0, 1.0, source="it"), *evals]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(build_report(rows, pass_threshold=1.0))
    assert re.search(r"^it +avg@1 +1\.000 ", capture.get(), re.MULTILINE)
    assert re.search(r"^eval/it at step 5 +avg@1 +0\.500 ", capture.get(), re.MULTILINE)


def test_the_text_of_errors_before_the_first_reply_is_shown():
    traces = [Trace(id="0", errors=[Failure.from_exception(AgentFailed("can't open file 'nope.py'\nmore"))])]
    rows = [RolloutRecord(f"0.{number}", "0", number, summary=summarize_rollout(traces)) for number in range(3)]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(build_report(rows, pass_threshold=1.0))
    assert re.search(r"3 × AgentFailed +can't open file 'nope.py' *\n", capture.get())
