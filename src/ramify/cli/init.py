"""`ramify init NAME`: create a taskset package from a working template.

The package is small: one module with an example of what most environments need, an entry point that makes the name an
id, and a test that plays the gold replies. `tiny` learns the example task within minutes, so `ramify rl` shows a rising
reward before anything is changed.
"""

import importlib.util
import keyword
import re
from collections.abc import Sequence
from pathlib import Path

from ramify.cli.parser import CommandParser
from ramify.core.errors import ConfigInvalid, StorageFailed
from ramify.env import plugin

PYPROJECT_TEMPLATE = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "A taskset for Ramify."
requires-python = ">=3.11"
dependencies = ["ramify"]

[project.entry-points."ramify.tasksets"]
{name} = "{module}:{cls}"

[tool.hatch.build.targets.wheel]
only-include = ["{module}.py"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

MODULE_TEMPLATE = '''\
"""{name}: write a word backwards, letter by letter."""

import random
import re
import string
from collections.abc import Iterator

import ramify as rf
from pydantic import Field

SYSTEM = "Write the word backwards, letter by letter."


class {cls}Config(rf.TasksetConfig):
    """The keys that can be set as --taskset.KEY, or in the `taskset` table of a file."""

    num_tasks: int = Field(default=200, ge=1)
    seed: int = 0


class {cls}(rf.Taskset):
    """Write a word backwards."""

    config: {cls}Config

    def load(self) -> Iterator[rf.Task]:
        # The tasks depend only on the config, so a run can be reproduced; train and eval tasks differ.
        rng = random.Random(f"{{self.config.seed}} {{self.config.split}}")
        for number in range(self.config.num_tasks):
            word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(4, 7)))
            yield rf.Task(key=str(number), prompt=word, system=SYSTEM, answer=word[::-1])

    @rf.reward
    def letters(self, task: rf.Task, trace: rf.Trace) -> float:
        # The share of letters in the right place. An all-or-nothing reward would be 0 for every attempt of a group
        # while the model is still bad at the task, and a group of equal rewards gives no training signal.
        reply = parse_answer(trace.last_reply)
        num_right = sum(letter == expected for letter, expected in zip(reply, task.answer))
        return num_right / max(len(reply), len(task.answer))

    @rf.metric
    def exact(self, task: rf.Task, trace: rf.Trace) -> float:
        return float(parse_answer(trace.last_reply) == task.answer)

    def gold(self, task: rf.Task) -> str:
        """Return the reply of a perfect agent; `ramify validate` plays it."""
        return task.answer


def parse_answer(reply: str) -> str:
    """Return the reply without tags such as <answer>."""
    return re.sub("<[^>]*>", "", reply).strip()
'''

TEST_TEMPLATE = '''\
"""Every task is valid: it can be set up, and its gold replies have a reward."""

from ramify.cli import main


def test_every_task_is_valid():
    assert main(["validate", "{module}:{cls}", "-n", "20"]) == 0
'''

README_TEMPLATE = """\
# {name}

A taskset for Ramify: tasks and their rewards.

    pip install -e .
    ramify validate {name}          # check every task, without a model
    ramify eval {name} -m tiny      # evaluate a model; rerun to resume
    ramify rl {name} -m tiny --max-steps 40    # the mean reward rises from about 0.5 to over 0.7
    pytest

The environment is `{module}.py`: `load` yields the tasks, `@rf.reward` scores a rollout, `@rf.metric` reports a number,
`gold` returns the reply of a perfect agent.
"""


def run(argv: Sequence[str]) -> int:
    """Write the package and print the next steps."""
    parser = CommandParser("init")
    parser.add_argument("name", metavar="NAME", help="id of the taskset, such as letter-count")
    parser.add_argument("-o", dest="directory", metavar="DIR", type=Path, help="directory to write (default: ./NAME)")
    options = parser.parse_args(argv)
    directory = options.directory or Path(options.name)
    paths = write_package(options.name, directory)
    print("\n".join(f"wrote {path}" for path in paths))
    module = paths[1].name
    steps = [
        f"cd {directory}",
        f"ramify validate {module}",
        f"ramify eval {module} -m tiny -n 20",
        f"ramify rl {module} -m tiny --max-steps 40",
    ]
    print("\n  ".join(["next:", *steps]))
    print(f"to use it as `{options.name}` anywhere: pip install -e .")
    return 0


def write_package(name: str, directory: Path) -> list[Path]:
    """Write the package and return its files.

    Raises ConfigInvalid, before anything is written, if the name is not allowed or the directory is not empty.
    """
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise ConfigInvalid(
            f"{name!r} is not a valid taskset name: use lowercase letters, digits, dashes and underscores, starting "
            "with a letter"
        )
    if name in plugin.PLUGIN_KINDS["taskset"].builtin_paths:
        raise ConfigInvalid(f"{name!r} is the name of a built-in taskset; choose another name")
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:  # the new file would shadow it, or be shadowed
        raise ConfigInvalid(f"{name!r} is the name of an existing module, {spec.origin}; choose another name")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigInvalid(f"{directory} exists and is not empty; nothing was written")
    cls = "".join(word.capitalize() for word in module.split("_"))
    files = {
        "pyproject.toml": PYPROJECT_TEMPLATE,
        f"{module}.py": MODULE_TEMPLATE,
        "README.md": README_TEMPLATE,
        f"tests/test_{module}.py": TEST_TEMPLATE,
    }
    try:
        for path, text in files.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.format(name=name, module=module, cls=cls), encoding="utf-8")
    except OSError as error:
        raise StorageFailed(f"{directory} cannot be written: {error.strerror}") from error
    return [directory / path for path in files]
