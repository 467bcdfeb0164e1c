"""Ramify without its extras: every help page and every dry run works.

One process prints all of them, because a help page takes a second or more.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ramify.cli.commands import COMMANDS, ConfigCommand

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
RUN = """
max_steps = 2
[[train]]
taskset = { id = "reverse-text" }
[[eval]]
taskset = { id = "reverse-text", split = "eval" }
"""
DRY_RUNS = {
    "rl": ["rl", "@", "run.toml", "-m", "tiny", "--dry-run"],
    "eval": ["eval", "reverse-text", "-m", "tiny", "--dry-run"],
    "sft": ["sft", "-m", "tiny", "--data.path", "chats.jsonl", "--dry-run"],
    "serve": ["serve", "-m", "tiny", "--dry-run"],
    "trainer": ["trainer", "-m", "tiny", "--address", "tcp://127.0.0.1:1", "--dry-run"],
    "orchestrator": ["orchestrator", "@", "run.toml", "-b", "http://127.0.0.1:1", "--dry-run"],
    "env-server": ["env-server", "@", "run.toml", "--source", "train/reverse-text", "-b", "http://x:1", "--dry-run"],
}
SCRIPT = """
import contextlib, importlib.machinery, io, json, sys, traceback

hidden, commands = json.loads(sys.argv[1]), json.loads(sys.argv[2])

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[:] = [Finder if each is importlib.machinery.PathFinder else each for each in sys.meta_path]
from ramify.cli.app import main

ended = {}
for name, args in commands.items():
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = main(args)
        except SystemExit as exit:
            code = exit.code or 0
        except BaseException:
            code = traceback.format_exc()
    ended[name] = [code, out.getvalue()]
print(json.dumps(ended))
"""


def extras() -> list[str]:
    """Return the import names of packages that are installed only with an extra."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [requirement for requirements in found.values() for requirement in requirements]
    return [re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in wanted]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Exit code and output of each command in a process that cannot import the extras."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "run.toml").write_text(RUN)
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    (folder / "chats.jsonl").write_text("\n".join([json.dumps(chat)] * 16))
    asked = {f"{name} --help": [name, "--help"] for name in COMMANDS} | {"--help": ["--help"]}
    asked |= {f"rl --help {section}": ["rl", "--help", section] for section in ("train", "all")}
    asked |= {f"{name} --dry-run": args for name, args in DRY_RUNS.items()}
    command = [sys.executable, "-c", SCRIPT, json.dumps(extras()), json.dumps(asked)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_every_help_page_is_printed(ended):
    for name in ["--help", *(f"{name} --help" for name in COMMANDS)]:
        code, output = ended[name]
        assert code == 0 and f"usage: ramify {name}".removesuffix(" --help") in output, (name, code, output[-1000:])


def test_help_begins_with_what_people_set_and_is_short(ended):
    lines = ended["rl --help"][1].splitlines()
    keys = [line.split()[0] for line in lines if line.startswith("  --") and "." in line.split()[0]]
    assert keys[:2] == ["--model.name", "--train.0.taskset"] and "--trainer.optim.lr" in keys
    assert len(lines) < 100
    assert "whole run:\n\n  --model.name TEXT" in ended["serve --help"][1]


def test_help_of_a_section_has_the_keys_of_the_sources(ended):
    shown = ended["rl --help train"][1] + ended["rl --help all"][1]
    assert all(
        text in shown for text in ("--train.0.weight NUMBER", "--eval.0.num_tasks INT", "--inference.python TEXT")
    )


@pytest.mark.parametrize("command", ["serve", "trainer", "env-server"])
def test_help_describes_the_accepted_files(ended, command):
    assert "of a whole run, as for `ramify rl`" in ended[f"{command} --help"][1]


@pytest.mark.parametrize("name", DRY_RUNS)
def test_every_dry_run_works(ended, name):
    code, output = ended[f"{name} --dry-run"]
    assert code == 0, (code, output[-1000:])


def test_every_command_with_a_dry_run_is_covered():
    commands = {name: command for name, command in COMMANDS.items() if isinstance(command, ConfigCommand)}
    assert {name for name, command in commands.items() if "--dry-run" in command.flags} == set(DRY_RUNS)
