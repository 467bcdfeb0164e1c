"""dataset with the reward `tests`: shapes of rows, and programs that pass, fail or cheat."""

import json

import pytest

from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets.code_tests import CodeTests, count_passed, extract_code, parse_tests
from ramify.rollout import Environment, SourceConfig, validate_task
from tests.env.tasksets.test_dataset import make_dataset, write_jsonl
from tests.rollout.runtime.conftest import open_runtime, skip_unless_available

ASSERTIONS = CodeTests("assert double(2) == 4")
PAIRS = CodeTests(pairs=(("2\n", "4\n"), ("5\n", "10\n")))
READS_INPUT = "print(2 * int(input()))"


async def passed(code: str, tests: CodeTests) -> int:
    async with open_runtime("local") as runtime:
        return await count_passed(runtime, code, tests, python="python3", timeout=10)


@pytest.mark.parametrize(
    ("tests", "parsed"),
    [
        ("assert f(1)", CodeTests("assert f(1)")),
        (["assert f(1)", "assert f(2)"], CodeTests("assert f(1)\nassert f(2)")),
        ("def check(f):\n    assert f(1)", CodeTests("def check(f):\n    assert f(1)\ncheck(go)")),
        ([{"input": "1", "output": "2"}], CodeTests(pairs=(("1", "2"),))),
        (json.dumps({"inputs": ["1"], "outputs": ["2"]}), CodeTests(pairs=(("1", "2"),))),
    ],
)
def test_shapes_of_tests(tests, parsed):
    found = parse_tests({"tests": tests, "entry_point": "go"}, "tests", 1)
    assert found == parsed
    assert CodeTests.from_plain(found.to_plain()) == parsed


@pytest.mark.parametrize("tests", [None, "", [], {"inputs": ["1"]}, 7])
def test_row_without_tests_is_named(tests):
    with pytest.raises(ConfigInvalid, match="the tests of row 3"):
        parse_tests({"tests": tests}, "tests", 3)


def test_last_code_block_counts():
    assert extract_code("first\n```python\na\n```\nthen\n```\nb\n```\n") == "b\n"
    assert extract_code("x = 1") == "x = 1"


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("def double(n): return 2 * n", 1),
        ("def double(n): return n", 0),
        ("import os; os._exit(0)", 0),
        ("print('passed')\nraise SystemExit(0)", 0),
        ("no program", 0),
    ],
)
async def test_assertions_pass_only_if_all_of_them_ran(code, count):
    assert await passed(code, ASSERTIONS) == count


@pytest.mark.process
@pytest.mark.parametrize(("code", "count"), [(READS_INPUT, 2), ("print(4)", 1), ("raise SystemExit(0)", 0)])
async def test_pairs_compare_what_the_program_prints(code, count):
    assert await passed(code, PAIRS) == count


@pytest.mark.process
async def test_gold_program_passes_in_a_sandbox_and_other_runtimes_are_refused(tmp_path):
    skip_unless_available("sandbox")
    row = {"prompt": "Double the number.", "code": READS_INPUT, "tests": [{"input": "3", "output": "6"}]}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    table = {"id": "dataset", "path": path, "answer_column": "code", "reward": "tests", "eval_share": 0}
    env = Environment.load(SourceConfig(taskset=table, runtime={"id": "sandbox"}))
    (task,) = env.iter_tasks()
    result = await validate_task(env, task)
    assert (result.problem, result.reward, result.trace.info["passed_tests"]) == (None, 1.0, 1)
    with pytest.raises(ConfigInvalid, match="isolation"):
        Environment.load(SourceConfig(taskset=table)).check_task(task)


def test_math_verify_must_be_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigInvalid, match="lacks the package math-verify"):
        make_dataset(write_jsonl(tmp_path / "rows.jsonl"), prompt_column="question", reward="math-verify")
