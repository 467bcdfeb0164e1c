"""dataset: questions with answers from your own data files.

`path` is a jsonl, parquet, arrow, csv or json file, a directory of them, or the id of a dataset in the local cache.
Columns and reward are named in the config, so a file like GSM8K or MATH needs no code.
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
FINAL_ANSWER_MARKER = "####"  # precedes the result in answers of GSM8K

Scorer = Callable[[rf.Task, rf.Trace], float]


class DatasetConfig(rf.TasksetConfig):
    """The data files, their columns, and the reward."""

    path: str
    """A file, a directory, or the id of a Hugging Face dataset in the local cache."""
    part: str | None = None
    """The part of a directory to read, such as `train` or `test`. Default: all of it."""
    prompt: str = "prompt"
    """The column with the question: text, or a list of messages."""
    answer: str = "answer"
    """The column with the answer."""
    system: str | None = None
    """The column with the system prompt, if there is one."""
    instructions: str | None = None
    """The system prompt of all rows, if there is no such column. Default for `boxed`: a request for \\boxed{}."""
    reward: str = "exact"
    """`exact`: the reply equals the answer. `boxed`: the last \\boxed{} has its value. `path.py:function`: your own.

    The function takes (task, trace) and returns a number; `task.row` is the row. The path is relative to the current
    directory.
    """
    eval_share: float = Field(default=EVAL_SHARE, ge=0, le=1)
    """The share of rows, chosen by their prompts, in the `eval` split. Use 0 or 1 for a file of one split."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Number of rows, from the start of the split. Default: all of them."""

    @field_validator("reward")
    @classmethod
    def _reward_must_be_known(cls, reward: str) -> str:
        if reward not in SCORERS and not reward.partition(":")[0].endswith(".py"):
            raise ValueError(f"expected {', '.join(map(repr, SCORERS))} or 'path.py:function', found {reward!r}")
        return reward


class Dataset(rf.Taskset):
    """Questions from data files."""

    config: DatasetConfig

    def __init__(self, config: DatasetConfig) -> None:
        super().__init__(config)
        self._scorer = SCORERS[config.reward] if config.reward in SCORERS else _load_scorer(config.reward)

    def load(self) -> Iterator[rf.Task]:
        """Return the first `num_tasks` rows of the split as tasks."""
        return islice(self._iter_tasks(), self.config.num_tasks)

    @rf.reward
    def correct(self, task: rf.Task, trace: rf.Trace) -> float:
        """The score by the configured reward."""
        return self._scorer(task, trace)

    def gold(self, task: rf.Task) -> str | None:
        """Return the answer in the form that the reward expects; None for a custom reward."""
        if self.config.reward == "boxed":
            return f"\\boxed{{{extract_final_answer(str(task.answer))}}}"
        return str(task.answer) if self.config.reward == "exact" else None

    def _iter_tasks(self) -> Iterator[rf.Task]:
        config = self.config
        has_custom_reward = config.reward not in SCORERS
        seen: set[str] = set()
        for row_number, row in enumerate(read_rows(config.path, config.part), 1):
            prompt = _parse_prompt(_get_column(row, config.prompt, row_number), row_number)
            prompt_text = prompt if isinstance(prompt, str) else json.dumps(prompt)
            if assign_split(prompt_text, config.eval_share) != config.split:
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
