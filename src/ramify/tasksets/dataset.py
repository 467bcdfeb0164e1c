"""dataset: rows of your own, each a question with its answer.

`path` is a jsonl, parquet, arrow, csv or json file, a directory of them, or the id of a dataset in the local cache.
Columns and reward are named in the config, so a file in the shape of GSM8K or MATH needs no code.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, cast

from pydantic import Field, field_validator

import ramify as rf
from ramify.errors import ConfigInvalid
from ramify.tasksets.answers import extract_boxed, is_same_value
from ramify.tasksets.data_files import DataRow, read_rows
from ramify.tasksets.splits import EVAL_SHARE, assign_split

BOXED_INSTRUCTIONS = "Put the final answer in \\boxed{}."
FINAL_ANSWER_MARKER = "####"  # after it comes the result, in answers written as GSM8K writes them

Scorer = Callable[[rf.Task, rf.Trace], float]


class DatasetConfig(rf.TasksetConfig):
    """Where the rows are, which columns count, and how a reply is judged."""

    path: str
    """A file, a directory, or the id of a Hugging Face dataset in the local cache."""
    part: str | None = None
    """Which part of a directory to read, such as `train` or `test`; all of it by default."""
    prompt: str = "prompt"
    """The column of the question: text, or a list of messages."""
    answer: str = "answer"
    system: str | None = None
    """The column of the system prompt, if there is one."""
    instructions: str | None = None
    """The system prompt of every row where no column brings one; `boxed` asks for a box by default."""
    reward: str = "exact"
    """`exact`: the reply is the answer. `boxed`: the last \\boxed{} has its value. `path.py:function`: your own.

    A function takes (task, trace) and returns a number; the row is `task.row`. Its path is seen from where you start.
    """
    eval_share: float = Field(default=EVAL_SHARE, ge=0, le=1)
    """The share of rows, picked by their prompts, that are `eval`; 0 or 1 where a file is all one split."""
    num_tasks: int | None = Field(default=None, ge=1)
    """The first so many rows of the split; all of them by default."""

    @field_validator("reward")
    @classmethod
    def _reward_must_be_known(cls, reward: str) -> str:
        if reward not in SCORERS and not reward.partition(":")[0].endswith(".py"):
            raise ValueError(f"expected {', '.join(map(repr, SCORERS))} or 'path.py:function', found {reward!r}")
        return reward


class Dataset(rf.Taskset):
    """Questions from a file."""

    config: DatasetConfig

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        self._scorer = SCORERS[config.reward] if config.reward in SCORERS else _load_scorer(config.reward)

    def load(self) -> Iterator[rf.Task]:
        return islice(self._iter_tasks(), self.config.num_tasks)

    @rf.reward
    def correct(self, task: rf.Task, trace: rf.Trace) -> float:
        return self._scorer(task, trace)

    def gold(self, task: rf.Task) -> str | None:
        """The answer in the form that the reward reads; nobody knows what a function of yours wants."""
        if self.config.reward == "boxed":
            return f"\\boxed{{{extract_final_answer(str(task.answer))}}}"
        return str(task.answer) if self.config.reward == "exact" else None

    def _iter_tasks(self) -> Iterator[rf.Task]:
        config = self.config
        has_custom_reward = config.reward not in SCORERS
        seen: set[str] = set()
        for row_number, row in enumerate(read_rows(config.path, config.part), 1):
            prompt = _parse_prompt(_get_column(row, config.prompt, row_number), row_number)
            if (
                assign_split(prompt if isinstance(prompt, str) else json.dumps(prompt), config.eval_share)
                != config.split
            ):
                continue
            answer = _get_column(row, config.answer, row_number)
            task = rf.Task.model_validate(
                {"prompt": prompt, "system": self._get_system_prompt(row, row_number), "answer": answer}
                | ({"row": row} if has_custom_reward else {})
            )
            if task.identity not in seen:
                seen.add(task.identity)
                yield task

    def _get_system_prompt(self, row: DataRow, row_number: int) -> str | None:
        config = self.config
        if config.system is not None:
            return _get_column(row, config.system, row_number)
        return BOXED_INSTRUCTIONS if config.instructions is None and config.reward == "boxed" else config.instructions


def score_exact(task: rf.Task, trace: rf.Trace) -> float:
    """1 if the reply is the answer, spaces around both aside."""
    return float(trace.last_reply.strip() == str(task.answer).strip())


def score_boxed(task: rf.Task, trace: rf.Trace) -> float:
    """1 if the last box of the reply has the value of the answer's result."""
    answer = extract_boxed(trace.last_reply)
    return float(answer is not None and is_same_value(answer, extract_final_answer(str(task.answer))))


def extract_final_answer(answer: str) -> str:
    """The result in a worked answer: after `####`, or in its last box, else all of it."""
    if FINAL_ANSWER_MARKER in answer:
        return answer.rpartition(FINAL_ANSWER_MARKER)[2].strip()
    boxed_answer = extract_boxed(answer)
    return answer.strip() if boxed_answer is None else boxed_answer


SCORERS: dict[str, Scorer] = {"exact": score_exact, "boxed": score_boxed}


def _get_column(row: DataRow, name: str, row_number: int) -> Any:
    if name not in row:
        raise ConfigInvalid(f"dataset: row {row_number} has no column {name!r}; it has {', '.join(row)}")
    return row[name]


def _parse_prompt(value: Any, row_number: int) -> str | tuple[dict[str, Any], ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return tuple(value)
    raise ConfigInvalid(f"dataset: the prompt of row {row_number} is neither text nor messages, but {value!r:.80}")


def _load_scorer(name: str) -> Scorer:
    """The function that `path.py:function` names."""
    file, _, function = name.partition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ConfigInvalid(f"dataset: reward {name!r}: there is no file {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scorer = getattr(module, function, None)
    if not callable(scorer):
        raise ConfigInvalid(f"dataset: reward {name!r}: {file} has no function {function!r}")
    return cast(Scorer, scorer)
