"""Which scores the table at the end shows."""

from ramify.evals.report import figures
from ramify.store import Row


def names(*repetitions: int) -> list[str]:
    """The scores of tasks with so many rollouts each."""
    rows = [
        Row(id=f"{task}.{number}", task=str(task), repetition=number, reward=1.0, failure=None, summary={})
        for task, count in enumerate(repetitions)
        for number in range(count)
    ]
    return [name for name, *_ in figures(rows, threshold=1.0)]


def test_an_eval_shows_powers_of_two_and_the_repetitions_it_was_asked_for():
    assert names(6, 6, 5) == ["avg@6", "pass@1", "pass@2", "pass^2", "pass@4", "pass^4", "pass@6", "pass^6"]
    assert names(1) == ["avg@1", "pass@1"]
    assert names() == []


def test_a_run_that_met_its_tasks_unequally_often_shows_what_half_of_them_can_tell():
    assert names(3, 5, 4, 7) == ["avg", "pass@1", "pass@2", "pass^2", "pass@4", "pass^4"]


def test_tasks_of_two_sources_are_apart_where_their_names_are_the_same():
    rows = [
        Row(id=f"{source}{number}", task="0", repetition=number, source=source, reward=1.0, failure=None, summary={})
        for source in "ab"
        for number in range(2)
    ]
    assert next(name for name, *_ in figures(rows, threshold=1.0)) == "avg@2"
