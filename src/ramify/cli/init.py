"""`ramify init NAME`: a taskset package that works, to be changed into one's own.

What is written is small on purpose: one module with one example of each thing most environments need, an entry point
so that the name is an id everywhere, and a test that plays the gold replies. The task is one that `tiny` learns within
minutes, so `ramify rl` shows a rising reward before anything was changed.
"""

import importlib.util
import keyword
import re
from collections.abc import Sequence
from pathlib import Path

from ramify.cli.parser import CommandParser
from ramify.env import plugin
from ramify.errors import ConfigInvalid, StorageFailed

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
    """What can be set as --taskset.KEY, or in the `taskset` table of a file."""

    num_tasks: int = Field(default=200, ge=1)
    seed: int = 0


class {cls}(rf.Taskset):
    """Write a word backwards."""

    config: {cls}Config

    def load(self) -> Iterator[rf.Task]:
        # The tasks depend on the config alone, so a run can be repeated; train and eval tasks differ.
        rng = random.Random(f"{{self.config.seed}} {{self.config.split}}")
        for number in range(self.config.num_tasks):
            word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(4, 7)))
            yield rf.Task(key=str(number), prompt=word, system=SYSTEM, answer=word[::-1])

    @rf.reward
    def letters(self, task: rf.Task, trace: rf.Trace) -> float:
        # The share of letters in the right place. A reward of all or nothing would give every attempt of a group 0
        # while the model is still bad at the task, and a group whose rewards are all equal teaches nothing.
        reply = answer_in(trace.last_reply)
        right = sum(said == expected for said, expected in zip(reply, task.answer))
        return right / max(len(reply), len(task.answer))

    @rf.metric
    def exact(self, task: rf.Task, trace: rf.Trace) -> float:
        return float(answer_in(trace.last_reply) == task.answer)

    def gold(self, task: rf.Task) -> str:
        """What a perfect agent would reply; `ramify validate` plays it."""
        return task.answer


def answer_in(reply: str) -> str:
    """The reply without tags such as <answer>."""
    return re.sub("<[^>]*>", "", reply).strip()
'''

TEST_TEMPLATE = '''\
"""Every task is sound: it can be set up, and its gold replies earn a reward."""

from ramify.cli import main


def test_every_task_is_sound():
    assert main(["validate", "{module}:{cls}", "-n", "20"]) == 0
'''

README_TEMPLATE = """\
# {name}

A taskset for Ramify: tasks, and the rewards that judge an attempt at one.

    pip install -e .
    ramify validate {name}          # every task, without a model
    ramify eval {name} -m tiny      # a model's rewards; the same command again continues
    ramify rl {name} -m tiny --max-steps 40    # its mean reward rises from about 0.5 to over 0.7
    pytest

The environment is `{module}.py`: `load` gives the tasks, `@rf.reward` scores a rollout, `@rf.metric` reports a number,
`gold` says what a perfect agent would reply.
"""


def run(argv: Sequence[str]) -> int:
    """Write the package and say what to do next."""
    from ramify.cli.app import COMMANDS

    parser = CommandParser(prog="ramify init", description=COMMANDS["init"].help)
    parser.add_argument("name", metavar="NAME", help="the taskset's id, such as letter-count")
    parser.add_argument("-o", dest="directory", metavar="DIR", type=Path, help="where to write it; ./NAME by default")
    options = parser.parse_args(argv)
    directory = options.directory or Path(options.name)
    written = scaffold(options.name, directory)
    print("\n".join(f"wrote {path}" for path in written))
    module = written[1].name
    steps = [
        f"cd {directory}",
        f"ramify validate {module}",
        f"ramify eval {module} -m tiny -n 20",
        f"ramify rl {module} -m tiny --max-steps 40",
    ]
    print("\n  ".join(["next:", *steps]))
    print(f"to use it as `{options.name}` anywhere: pip install -e .")
    return 0


def scaffold(name: str, directory: Path) -> list[Path]:
    """Write the package; ConfigInvalid, before anything is written, if the name cannot be one or the place is taken."""
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise ConfigInvalid(
            f"{name!r} cannot be a taskset's name: use small letters, digits, dashes and underscores, a letter first"
        )
    if name in plugin.PLUGIN_KINDS["taskset"].builtin_paths:
        raise ConfigInvalid(f"{name!r} cannot be a taskset's name: it is that of a built-in one, which would be found")
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:  # a file beside which Python's own would not be imported any more
        raise ConfigInvalid(f"{name!r} cannot be a taskset's name: there is a module {module} already, {spec.origin}")
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
