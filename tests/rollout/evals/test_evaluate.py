"""`rf.evaluate` in a script and in a running event loop, with a class, an instance or an id."""

import contextlib
import io

import pytest

import ramify as rf
from ramify.core.errors import ConfigInvalid
from ramify.rollout.evals.config import EvalConfig
from tests.rollout.evals.environments import Config, Echo
from tests.support.engine import ScriptedEngine, reverse_some, run_engine

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def engine():
    with run_engine(ScriptedEngine(reverse_some)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def settings(engine, tmp_path):
    return {
        "model": "tiny",
        "num_tasks": 2,
        "repetitions": 2,
        "output": tmp_path,
        "inference": {"engine": "external", "base_url": [engine.url]},
    }


async def test_evaluate_in_a_running_loop_can_be_called_or_awaited(settings):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        first = rf.evaluate(Echo, **settings)
        second = await rf.evaluate(Echo, **settings)
    assert first.num_run == 4 and second.num_run == 0 and first.table() == second.table()
    assert "done=4/4" in printed.getvalue()


def test_class_instance_and_table_give_the_same_tasks(settings):
    inputs = [Echo, Echo(Config(size=2)), {"taskset": Echo}, {"taskset": {"id": Echo, "size": 2}}]
    results = [rf.evaluate(config, **settings, name=f"run-{number}") for number, config in enumerate(inputs)]
    assert len({tuple(row["id"] for row in result.table()) for result in results}) == 1


def test_table_has_a_column_per_reward_and_metric(settings):
    rows = rf.evaluate(Echo, **settings).table()
    assert len(rows) == 4
    for row in rows:
        assert {
            "id",
            "task",
            "repetition",
            "reward",
            "failure",
            "reward/right",
            "metric/length",
            "seconds",
        } <= row.keys()
        assert all(value is None or isinstance(value, str | int | float | bool) for value in row.values())


def test_nothing_is_printed_outside_a_terminal_or_notebook(settings, capsys):
    rf.evaluate("reverse-text", **settings)
    assert capsys.readouterr().out == ""


def test_keyword_settings_are_validated(settings):
    config = EvalConfig(taskset={"id": "reverse-text"}, inference=settings["inference"], output=settings["output"])
    assert rf.evaluate(config, model="tiny", num_tasks=1, repetitions=2).num_run == 2
    with pytest.raises(ConfigInvalid, match=r"eval\.num_task: unknown key; did you mean eval\.num_tasks\?"):
        rf.evaluate(config, num_task=1)
