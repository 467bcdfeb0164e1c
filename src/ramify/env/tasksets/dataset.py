"""dataset: questions with answers from your own data files.

`path` is a jsonl, parquet, arrow, csv or json file, a directory of them, or the id of a Hugging Face dataset.
Columns and reward are named in the config, so a file like GSM8K or MATH needs no code.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from pydantic import Field, field_validator

import ramify as rf
from ramify.core.errors import ConfigInvalid
from ramify.env.tasksets.answers import extract_boxed, get_math_checker, is_same_value
from ramify.env.tasksets.code_tests import CodeTests, count_passed, extract_code, parse_tests
from ramify.env.tasksets.splits import EVAL_SHARE, assign_split

BOXED_INSTRUCTIONS = "Put the final answer in \\boxed{}."
CODE_INSTRUCTIONS = "Write a Python program. Put all of it in one code block."
TESTS_REWARD, MATH_VERIFY_REWARD = "tests", "math-verify"
DEFAULT_INSTRUCTIONS = {
    "boxed": BOXED_INSTRUCTIONS,
    MATH_VERIFY_REWARD: BOXED_INSTRUCTIONS,
    TESTS_REWARD: CODE_INSTRUCTIONS,
}
MAX_PARSED_CHARS = 2000  # of the end of a reply, by math-verify
FINAL_ANSWER_MARKER = "####"  # precedes the result in answers of GSM8K

Row = dict[str, Any]
Scorer = Callable[[rf.Task, rf.Trace], float]


class DatasetConfig(rf.DataColumnsConfig, rf.TasksetConfig):
    """The data files, their columns, and the reward."""

    misplaced_keys: ClassVar = {"completion_column": "answer_column"}

    answer_column: str = "answer"
    """The column with the answer."""
    instructions: str | None = None
    """The system prompt of all rows, if there is no such column. Default: a request for \\boxed{}, or for `tests` one
    for a code block."""
    reward: str = "exact"
    """`exact`: the reply equals the answer. `boxed`: the last \\boxed{} has its value. `math-verify`: the package
    math-verify finds its value anywhere in the reply. `tests`: the last code block passes the tests of the row.
    `path.py:function`: your own.

    The function takes (task, trace) and returns a number; `task.row` is the row. The path is relative to the current
    directory.
    """
    tests_column: str = "tests"
    """The column with the tests, for the reward `tests`."""
    test_python: str = "python3"
    """The Python of the runtime, for the reward `tests`."""
    test_timeout: float = Field(default=10.0, gt=0)
    """Seconds for each test, for the reward `tests`."""
    eval_share: float = Field(default=EVAL_SHARE, ge=0, le=1)
    """The share of rows, chosen by their prompts, in the `eval` split. Use 0 or 1 for a file of one split."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Number of rows, from the start of the split. Default: all of them."""

    @field_validator("reward")
    @classmethod
    def _reward_must_be_known(cls, reward: str) -> str:
        if reward not in (*SCORERS, TESTS_REWARD) and not reward.partition(":")[0].endswith(".py"):
            raise ValueError(
                f"expected {', '.join(map(repr, (*SCORERS, TESTS_REWARD)))} or 'path.py:function', found {reward!r}"
            )
        return reward


class Dataset(rf.Taskset):
    """Questions from data files."""

    config: DatasetConfig

    def __new__(cls, config: DatasetConfig) -> Self:
        """Return a taskset whose reward uses the runtime if the config asks for tests."""
        is_code = cls is Dataset and config.reward == TESTS_REWARD
        return cast(Self, object.__new__(CodeDataset)) if is_code else object.__new__(cls)

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        if config.reward == MATH_VERIFY_REWARD and importlib.util.find_spec("math_verify") is None:
            raise ConfigInvalid(
                f"taskset.reward: {sys.prefix} lacks the package math-verify; pip install 'ramify[math]', or use boxed"
            )
        self._scorer = self._find_scorer()

    def load(self) -> Iterator[rf.Task]:
        """Return the first `num_tasks` rows of the split as tasks."""
        return islice(self._iter_tasks(), self.config.num_tasks)

    @rf.reward
    def correct(self, task: rf.Task, trace: rf.Trace) -> float:
        """The score by the configured reward."""
        return self._scorer(task, trace)

    def gold(self, task: rf.Task) -> str | None:
        """Return the answer in the form that the reward expects; None for a custom reward."""
        if self.config.reward in ("boxed", MATH_VERIFY_REWARD):
            return f"\\boxed{{{extract_final_answer(str(task.answer))}}}"
        return str(task.answer) if self.config.reward == "exact" else None

    def _iter_tasks(self) -> Iterator[rf.Task]:
        config = self.config
        seen: set[str] = set()
        num_repeated = row_number = 0
        for row_number, row in enumerate(rf.read_rows(config), 1):
            prompt = rf.read_prompt(row, config, row_number)
            prompt_text = prompt if isinstance(prompt, str) else json.dumps(prompt)
            if assign_split(prompt_text, config.eval_share) != config.split:
                continue
            task = rf.Task.model_validate(
                {"prompt": prompt, "system": self._get_system_prompt(row, row_number)}
                | self._build_task_fields(row, row_number)
            )
            if task.identity in seen:
                num_repeated += 1
                continue
            seen.add(task.identity)
            yield task
        if num_repeated:
            repeated = f"{num_repeated} of {row_number} rows repeat an earlier one"
            print(f"dataset: {config.path}: {repeated}, and are left out", file=sys.stderr)

    def _find_scorer(self) -> Scorer:
        name = self.config.reward
        return SCORERS[name] if name in SCORERS else _load_scorer(name)

    def _build_task_fields(self, row: Row, row_number: int) -> dict[str, Any]:
        """Return what the reward needs of a row."""
        fields = {"answer": _get_column(row, self.config.answer_column, row_number)}
        return fields if self.config.reward in SCORERS else {**fields, "row": row}

    def _get_system_prompt(self, row: Row, row_number: int) -> str | None:
        config = self.config
        if config.system_column is not None:
            return _get_column(row, config.system_column, row_number)
        return DEFAULT_INSTRUCTIONS.get(config.reward) if config.instructions is None else config.instructions


class CodeDataset(Dataset):
    """Programming problems from data files, whose tests run in the rollout's runtime."""

    async def correct(  # pyrefly: ignore[bad-override] - a hook takes what it names
        self, task: rf.Task, trace: rf.Trace, runtime: rf.Runtime
    ) -> float:
        """1 if the last code block passes all tests of the row, else 0."""
        config, tests = self.config, CodeTests.from_plain(task.tests)  # pyrefly: ignore[missing-attribute]
        code = extract_code(trace.last_reply)
        passed = await count_passed(runtime, code, tests, python=config.test_python, timeout=config.test_timeout)
        trace.info["passed_tests"] = passed
        return float(passed == max(1, len(tests.pairs)))

    def gold(self, task: rf.Task) -> str | None:
        """Return the answer, which is a program, in a code block; None if the row has none."""
        return None if task.answer is None else f"```python\n{task.answer}\n```"

    def _find_scorer(self) -> Scorer:
        return score_exact  # not used: `correct` runs the tests

    def _build_task_fields(self, row: Row, row_number: int) -> dict[str, Any]:
        tests = parse_tests(row, self.config.tests_column, row_number)
        return {"answer": row.get(self.config.answer_column), "tests": tests.to_plain(), "requires": ("isolation",)}


def score_exact(task: rf.Task, trace: rf.Trace) -> float:
    """Return 1 if the reply equals the answer, without surrounding spaces, else 0."""
    return float(trace.last_reply.strip() == str(task.answer).strip())


def score_boxed(task: rf.Task, trace: rf.Trace) -> float:
    """Return 1 if the last \\boxed{} of the reply has the value of the final answer, else 0."""
    answer = extract_boxed(trace.last_reply)
    return float(answer is not None and is_same_value(answer, extract_final_answer(str(task.answer))))


def extract_final_answer(answer: str) -> str:
    """Return the result of a worked answer: the text after `####`, else the last \\boxed{}, else all of it."""
    if FINAL_ANSWER_MARKER in answer:
        return answer.rpartition(FINAL_ANSWER_MARKER)[2].strip()
    boxed_answer = extract_boxed(answer)
    return answer.strip() if boxed_answer is None else boxed_answer


def score_math_verify(task: rf.Task, trace: rf.Trace) -> float:
    """Return 1 if math-verify finds the final answer in the reply, else 0, also if it cannot say within seconds."""
    expected, reply = extract_final_answer(str(task.answer)), trace.last_reply[-MAX_PARSED_CHARS:]
    is_equal = get_math_checker().compare(expected, reply)
    if is_equal is None:
        trace.info["math_verify"] = "no result"
    return float(is_equal or False)


SCORERS: dict[str, Scorer] = {"exact": score_exact, "boxed": score_boxed, MATH_VERIFY_REWARD: score_math_verify}


def _get_column(row: Row, name: str, row_number: int) -> Any:
    if name not in row:
        raise ConfigInvalid(f"dataset: row {row_number} has no column {name!r}; it has {', '.join(row)}")
    return row[name]


def _load_scorer(name: str) -> Scorer:
    """Import the function named by `path.py:function`."""
    file, _, function = name.partition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ConfigInvalid(f"dataset: reward {name!r}: file {file} does not exist")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scorer = getattr(module, function, None)
    if not callable(scorer):
        raise ConfigInvalid(f"dataset: reward {name!r}: {file} has no function {function!r}")
    return cast(Scorer, scorer)
