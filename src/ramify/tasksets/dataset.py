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
from ramify.tasksets.drawing import EVAL_SHARE, split_of
from ramify.tasksets.reading import boxed, same_value
from ramify.tasksets.rows import Row, rows

BOXED = "Put the final answer in \\boxed{}."
FINAL = "####"  # after it comes the result, in answers written as GSM8K writes them

Score = Callable[[rf.Task, rf.Trace], float]


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
    def _known(cls, reward: str) -> str:
        if reward not in JUDGES and not reward.partition(":")[0].endswith(".py"):
            raise ValueError(f"expected {', '.join(map(repr, JUDGES))} or 'path.py:function', found {reward!r}")
        return reward


class Dataset(rf.Taskset):
    """Questions from a file."""

    config: DatasetConfig

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        self._score = JUDGES[config.reward] if config.reward in JUDGES else _function(config.reward)

    def load(self) -> Iterator[rf.Task]:
        return islice(self._tasks(), self.config.num_tasks)

    @rf.reward
    def correct(self, task: rf.Task, trace: rf.Trace) -> float:
        return self._score(task, trace)

    def gold(self, task: rf.Task) -> str | None:
        """The answer in the form that the reward reads; nobody knows what a function of yours wants."""
        if self.config.reward == "boxed":
            return f"\\boxed{{{final(str(task.answer))}}}"
        return str(task.answer) if self.config.reward == "exact" else None

    def _tasks(self) -> Iterator[rf.Task]:
        config = self.config
        own = config.reward not in JUDGES
        seen: set[str] = set()
        for number, row in enumerate(rows(config.path, config.part), 1):
            prompt = _prompt(_column(row, config.prompt, number), number)
            if split_of(prompt if isinstance(prompt, str) else json.dumps(prompt), config.eval_share) != config.split:
                continue
            answer = _column(row, config.answer, number)
            task = rf.Task.model_validate(
                {"prompt": prompt, "system": self._system(row, number), "answer": answer}
                | ({"row": row} if own else {})
            )
            if task.identity not in seen:
                seen.add(task.identity)
                yield task

    def _system(self, row: Row, number: int) -> str | None:
        config = self.config
        if config.system is not None:
            return _column(row, config.system, number)
        return BOXED if config.instructions is None and config.reward == "boxed" else config.instructions


def exact(task: rf.Task, trace: rf.Trace) -> float:
    """1 if the reply is the answer, spaces around both aside."""
    return float(trace.last_reply.strip() == str(task.answer).strip())


def in_box(task: rf.Task, trace: rf.Trace) -> float:
    """1 if the last box of the reply has the value of the answer's result."""
    found = boxed(trace.last_reply)
    return float(found is not None and same_value(found, final(str(task.answer))))


def final(answer: str) -> str:
    """The result in a worked answer: after `####`, or in its last box, else all of it."""
    if FINAL in answer:
        return answer.rpartition(FINAL)[2].strip()
    inside = boxed(answer)
    return answer.strip() if inside is None else inside


JUDGES: dict[str, Score] = {"exact": exact, "boxed": in_box}


def _column(row: Row, name: str, number: int) -> Any:
    if name not in row:
        raise ConfigInvalid(f"dataset: row {number} has no column {name!r}; it has {', '.join(row)}")
    return row[name]


def _prompt(value: Any, number: int) -> str | tuple[dict[str, Any], ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        return tuple(value)
    raise ConfigInvalid(f"dataset: the prompt of row {number} is neither text nor messages, but {value!r:.80}")


def _function(name: str) -> Score:
    """The function that `path.py:function` names."""
    file, _, function = name.partition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ConfigInvalid(f"dataset: reward {name!r}: there is no file {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigInvalid(f"dataset: reward {name!r}: {file} has no function {function!r}")
    return cast(Score, found)
