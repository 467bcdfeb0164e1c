"""`ramify data PATH`: the columns, lengths and a sample of a dataset, and what it can be used for.

A dataset of the hub is downloaded first. The columns of prompts, answers, messages and tests are guessed by the names
that datasets usually give them; the printed tables say which, so that they can be copied into a configuration.
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import numpy as np
from rich.table import Table

from ramify.core.console import PipeConsole
from ramify.core.errors import ConfigInvalid, RamifyError
from ramify.core.hub import print_to_stderr
from ramify.core.names import format_count
from ramify.env.data_config import DataFilesConfig
from ramify.env.data_rows import DataRow, count_rows, read_rows
from ramify.env.data_selection import COMMIT_CHARS, fetch_dataset
from ramify.env.tasksets.answers import parse_number
from ramify.env.tasksets.code_tests import parse_tests
from ramify.env.tasksets.dataset import Dataset, DatasetConfig, extract_final_answer
from ramify.model.render import RenderedPrompt, Renderer, load_renderer
from ramify.model.resolve import resolve_model_path
from ramify.rollout.harness.base import build_initial_messages
from ramify.train.sft.config import SftDataConfig
from ramify.train.sft.conversations import SftConversation, parse_conversations

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "input", "text")
ANSWER_COLUMNS = ("answer", "completion", "solution", "response", "output", "expected_answer", "target", "code")
MESSAGES_COLUMNS = ("messages", "conversations", "conversation")
TESTS_COLUMNS = ("tests", "test_list", "test", "test_cases", "input_output")
PERCENTILES = (50, 90, 99, 100)
MAX_EXACT_CHARS = 60  # of an answer that a reply can be expected to equal
MIN_SHARE = 0.9  # of the rows that a reward must be able to score to be suggested
MAX_EXAMPLE_CHARS = 60
MAX_SAMPLE_CHARS = 4000


@dataclass(frozen=True, slots=True)
class DataColumns:
    """The columns that a dataset probably has for each purpose; None for those it lacks."""

    prompt: str | None
    answer: str | None
    messages: str | None
    tests: str | None

    @classmethod
    def guess(cls, row: DataRow) -> "DataColumns":
        """Return the columns by their names in a row."""
        candidates = (PROMPT_COLUMNS, ANSWER_COLUMNS, MESSAGES_COLUMNS, TESTS_COLUMNS)
        return cls(*(next((name for name in names if name in row), None) for names in candidates))


@dataclass(frozen=True, slots=True)
class DatasetSample:
    """The first rows of a dataset, and what they are described with."""

    config: DataFilesConfig
    keys: dict[str, str]
    """The keys that selected the dataset, for the printed tables."""
    rows: Sequence[DataRow]
    columns: DataColumns
    renderer: Renderer
    model: str

    def describe_tasks(self) -> Iterator[str]:
        """Yield what `ramify rl` can do with the rows: which rewards fit, and the lengths of the prompts."""
        columns = self.columns
        if columns.prompt is None or (columns.answer is None and columns.tests is None):
            yield f"ramify rl: no prompt ({', '.join(PROMPT_COLUMNS)}) with an answer ({', '.join(ANSWER_COLUMNS)})"
            return
        shares = find_reward_shares(self.rows, columns)
        yield f"ramify rl: rows that a reward can score: {', '.join(f'{name} {v:.0%}' for name, v in shares.items())}"
        reward = next((name for name, share in shares.items() if share >= MIN_SHARE), None)
        names = {"prompt_column": columns.prompt, "answer_column": columns.answer}
        names |= {"tests_column": columns.tests} if reward == "tests" else {}
        changed = _without_defaults(names, DatasetConfig)
        table = {"id": "dataset", **self.keys, **changed, "reward": reward or "reward.py:score"}
        yield f"taskset = {_format_table(table)}"
        if reward is None:
            yield "no reward fits: write a function `score(task, trace)` in reward.py"
        settings: dict[str, Any] = {
            **self.config.model_dump(),
            **changed,
            "eval_share": 0.0,
            "reward": reward or "exact",
        }
        tasks = Dataset(DatasetConfig(**settings, num_tasks=len(self.rows))).load()
        prompts = (build_initial_messages(task) for task in tasks)
        yield from self._describe_texts("prompts", [self.renderer.render(m, media=media) for m, media in prompts])

    def describe_conversations(self) -> Iterator[str]:
        """Yield what `ramify sft` can do with the rows: the form of the conversations, and their lengths."""
        columns = self.columns
        if columns.messages is None and (columns.prompt is None or columns.answer is None):
            yield f"ramify sft: no messages ({', '.join(MESSAGES_COLUMNS)}), and no prompt with an answer"
            return
        form = "prompt and completion" if columns.messages is None else "messages"
        names = {"prompt_column": columns.prompt, "completion_column": columns.answer}
        names = names if columns.messages is None else {"messages_column": columns.messages}
        changed = _without_defaults(names, SftDataConfig)
        yield f"ramify sft: {form}"
        yield f"data = {_format_table({**self.keys, **changed})}"
        settings: dict[str, Any] = {**self.config.model_dump(), **changed}
        conversations = parse_conversations(self.rows, SftDataConfig(**settings))
        yield from self._describe_texts("conversations", [self._render(item) for item in conversations])

    def _render(self, conversation: SftConversation) -> RenderedPrompt:
        options: dict[str, Any] = {"add_generation_prompt": False, "media": conversation.media}
        return self.renderer.render(conversation.messages, conversation.tools, **options)

    def _describe_texts(self, noun: str, rendered: Sequence[RenderedPrompt]) -> Iterator[str]:
        """Yield the lengths of rendered texts, and the first of them."""
        values = np.percentile([len(prompt.token_ids) for prompt in rendered], PERCENTILES)
        parts = [f"{percent}% up to {value:.0f}" for percent, value in zip(PERCENTILES[:-1], values)]
        yield f"{noun} in tokens of {self.model}: {', '.join(parts)}, at most {values[-1]:.0f}"
        yield f"the first one:\n{self.renderer.tokenizer.decode(rendered[0].token_ids)[:MAX_SAMPLE_CHARS]}"


def run(options: Namespace) -> int:
    """Print the description of a dataset."""
    if options.rows < 1:
        raise ConfigInvalid(f"--rows: expected at least 1, got {options.rows}")
    selection = {name: getattr(options, name) for name in DataFilesConfig.model_fields}
    config = DataFilesConfig(**selection)
    commit = fetch_dataset(config, print_to_stderr)
    pinned = config if commit is None else config.model_copy(update={"revision": commit})
    rows = list(islice(read_rows(pinned), options.rows))
    if not rows:
        raise ConfigInvalid(f"dataset: {config.path} has no rows")
    renderer = load_renderer(resolve_model_path(options.model))
    keys = {name: value for name, value in selection.items() if value}
    sample = DatasetSample(pinned, keys, rows, DataColumns.guess(rows[0]), renderer, options.model)
    console = PipeConsole(soft_wrap=True)
    title = [config.path, *(f"{name} {value}" for name, value in keys.items() if name in ("subset", "part"))]
    console.print(", ".join([*title, *([f"commit {commit[:COMMIT_CHARS]}"] if commit else [])]))
    console.print(f"{format_count(count_rows(pinned), 'row')}, described by the first {len(rows)}\n")
    console.print(_build_column_table(rows))
    for lines in (sample.describe_tasks(), sample.describe_conversations()):
        console.print()
        try:
            for line in lines:
                console.print(line)
        except RamifyError as error:
            console.print(f"not possible: {error.message}")
    return 0


def _build_column_table(rows: Sequence[DataRow]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("column", "type", "empty", "example")
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        present = [value for value in values if value not in (None, "", [])]
        types = ", ".join(sorted({describe_type(value) for value in present})) or "nothing"
        example = str(present[0]) if present else ""
        shown = example if len(example) <= MAX_EXAMPLE_CHARS else f"{example[:MAX_EXAMPLE_CHARS]}..."
        table.add_row(name, types, str(len(values) - len(present)), shown.replace("\n", "\\n"))
    return table


def describe_type(value: Any) -> str:
    """Return the type of a value in words."""
    if isinstance(value, dict):
        return "image" if "bytes" in value else "message" if "role" in value else "table"
    if isinstance(value, list):
        types = sorted({f"{describe_type(item)}s" for item in cast(list[Any], value)})
        return f"list of {' or '.join(types)}" if types else "list"
    name = str(type(cast(object, value)).__name__)
    return {"bool": "boolean", "int": "integer", "float": "number", "str": "text"}.get(name, name)


def find_reward_shares(rows: Sequence[DataRow], columns: DataColumns) -> dict[str, float]:
    """Return the share of the rows that each reward of the taskset `dataset` can score, the best one first."""
    answer_column, tests_column = columns.answer or "", columns.tests
    answers = [str(row[answer_column]) for row in rows if row.get(answer_column) is not None]
    results = list(map(extract_final_answer, answers))
    shares = {
        "boxed": sum(parse_number(result) is not None for result in results) / len(rows),
        "math-verify": sum(any(map(str.isdigit, result)) or "\\" in result for result in results) / len(rows),
        "exact": sum(len(answer) <= MAX_EXACT_CHARS and "\n" not in answer for answer in answers) / len(rows),
    }
    if tests_column is None:
        return shares
    num_tested = sum(_has_tests(row, tests_column) for row in rows)
    return {"tests": num_tested / len(rows), **shares}


def _has_tests(row: DataRow, column: str) -> bool:
    try:
        parse_tests(row, column, row_number=0)
    except (RamifyError, ValueError, LookupError, TypeError):
        return False
    return True


def _without_defaults(names: Mapping[str, str | None], cls: type[DataFilesConfig]) -> dict[str, str]:
    """Return the columns that a configuration has to name."""
    return {key: name for key, name in names.items() if name is not None and name != cls.model_fields[key].default}


def _format_table(table: dict[str, Any]) -> str:
    """Return an inline table of TOML."""
    return "{ " + ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items()) + " }"
