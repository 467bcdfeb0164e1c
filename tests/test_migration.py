"""The pages for users of other projects: each row names keys, commands and names that exist, or says "not available".

The pages are `docs/from-*.md`; the rows are in tables with the columns "NAME | Ramify | note".
"""

import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import ramify as rf
from ramify.cli.commands import COMMANDS
from ramify.core.config import parse
from ramify.env.plugin import PLUGIN_KINDS
from ramify.env.taskset import TasksetHooks
from ramify.orchestrate.run_config import RunConfig
from ramify.run.reader import read_metrics
from tests.test_docs_keys import is_flag, is_key, list_all_sections, list_paths

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("from-*.md"))
TABLE = re.compile(r"^\| [^|]+ \| Ramify \| note \|\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
LOSSES = re.findall(r"^### (\w+)", (ROOT / "docs" / "losses.md").read_text(), re.MULTILINE)
SHORT_FLAGS = {"-m", "-b", "-o", "-n", "-r", "-c", "-d"}


def read_rows(page: Path) -> list[list[str]]:
    """Return the cells of each row of a page's tables of names."""
    rows = [row for table in TABLE.findall(page.read_text()) for row in table.splitlines()]
    return [row.strip("| ").split(" | ") for row in rows]


def is_known(name: str, section: str) -> bool:
    """Return whether Ramify has what a cell names; `.key` is a key in the section of the key before it."""
    sections = list_all_sections()
    if name.startswith("ramify "):
        return name.split()[1] in COMMANDS
    if name.startswith("-"):
        return name in SHORT_FLAGS or is_flag(name.removeprefix("--"))
    if attribute := re.match(r"@?rf\.(\w+)(?:\.(\w+))?", name):
        owner = getattr(rf, attribute[1], None)
        names = {field.name for field in fields(TasksetHooks)} if owner is rf.Taskset else set()
        return owner is not None and (attribute[2] in {None, *names} or hasattr(owner, attribute[2]))
    if "{" in name:
        return all(is_key(path, sections) for path in list_paths(tomllib.loads(name)))
    if name.startswith("."):
        return is_key(section + name)
    path = re.sub(r"^\[+(\w+)\]+ ?", r"\1.0.", name.partition(" = ")[0]).removesuffix(".0.")
    return is_key(path) or is_key(path, sections)


CASES = [(page.stem, cells) for page in PAGES for cells in read_rows(page)]


@pytest.mark.parametrize(("page", "cells"), CASES, ids=[f"{page}-{cells[0]}" for page, cells in CASES])
def test_what_a_row_names_exists_or_is_called_not_available(page: str, cells: list[str]) -> None:
    names = re.findall("`([^`]+)`", cells[1])
    if cells[1] == "not available":
        foreign = re.findall("`([^`]+)`", cells[0].partition(" = ")[2] or cells[0])
        own = {key for section in list_all_sections() for key in section.model_fields}
        own |= {id for kind in PLUGIN_KINDS.values() for id in kind.builtin_paths} | set(LOSSES)
        assert [name for name in foreign if name.split(".")[-1] in own] == [], "available now: name it in the row"
        return
    assert names, "name a key, a command or a class, or write 'not available'"
    section = ""
    for name in names:
        assert is_known(name, section), name
        section = section if name.startswith(".") else name.rpartition(".")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_has_names_and_what_is_not_available(page: Path) -> None:
    rows = read_rows(page)
    assert len(rows) >= 10 and ["not available" in cells for cells in rows].count(True) >= 1


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/from_*/*.toml")), ids=lambda path: path.parent.name)
def test_converted_examples_are_valid(path: Path) -> None:
    assert parse(RunConfig, ["@", str(path)]).train


@pytest.mark.run
@pytest.mark.full("two runs of half a minute")
@pytest.mark.parametrize("name", ["from_prime_rl", "from_verifiers"])
def test_converted_examples_learn(name: str, tmp_path: Path) -> None:
    run = parse(RunConfig, ["@", f"examples/{name}/rl.toml", "--output", str(tmp_path)])
    command = [sys.executable, "-m", "ramify", "rl", "@", f"examples/{name}/rl.toml", "-o", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=280)
    rewards = [point.value for point in read_metrics(tmp_path / run.name, "reward/all/mean")]
    assert sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3 >= 0.25
