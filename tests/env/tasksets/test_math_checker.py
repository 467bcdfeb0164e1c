"""math-verify as a reward: right values in any form, and an end for answers that cannot be computed."""

import importlib.util

import pytest

import ramify as rf
from ramify.env.tasksets.answers import MathChecker
from ramify.env.tasksets.dataset import Dataset, DatasetConfig

pytestmark = pytest.mark.process

if importlib.util.find_spec("math_verify") is None:
    pytest.skip("the package math-verify is not installed", allow_module_level=True)

ENDLESS = "\\boxed{9^{9^{9^9}}}"


@pytest.fixture(scope="module")
def checker():
    checker = MathChecker(seconds=1.0)
    yield checker
    checker.close()


@pytest.mark.parametrize(
    ("expected", "reply", "is_equal"),
    [
        ("18", "so it is \\boxed{18}", True),
        ("18", "\\boxed{17}", False),
        ("18", "", False),
        ("\\frac{1}{2}", "The answer is $0.5$", True),
        ("x^2+2x+1", "\\boxed{(x+1)^2}", True),
        ("(1,2)", "$\\boxed{(1, 2)}$", True),
    ],
)
def test_values_are_compared_in_any_form(checker, expected, reply, is_equal):
    assert checker.compare(expected, reply) is is_equal


def test_reward_of_a_dataset_also_after_an_answer_that_cannot_be_computed(checker, tmp_path, monkeypatch):
    monkeypatch.setattr("ramify.env.tasksets.dataset.get_math_checker", lambda: checker)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2*9?", "answer": "2*9 = 18\\n#### 18"}\n')
    taskset = Dataset(DatasetConfig(path=str(tmp_path / "rows.jsonl"), reward="math-verify", eval_share=0.0))
    (task,) = taskset.load()
    scores = {}
    for reply in ("it is $19$", ENDLESS, "it is $18$"):
        trace = rf.Trace(id="t")
        prompt = trace.graph.add_node(-1, rf.Message("user", "2*9?"), [1])
        trace.graph.add_node(prompt, rf.Message("assistant", reply), [2])
        scores[reply] = (taskset.correct(task, trace), trace.info)
    assert scores == {
        "it is $19$": (0.0, {}),
        ENDLESS: (0.0, {"math_verify": "no result"}),
        "it is $18$": (1.0, {}),
    }
