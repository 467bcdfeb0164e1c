"""Every configuration key and every flag of `ramify` that the docs and the examples name exists."""

import contextlib
import re
import shlex
import tomllib
import typing
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ramify.core.config import Config, parse
from ramify.env.plugin import PLUGIN_KINDS, find_plugin_class, get_config_class
from ramify.infer.config import ServeConfig
from ramify.orchestrate.run_config import RunConfig, TrainSourceConfig
from ramify.rollout.envserver.config import EnvServerConfig
from ramify.rollout.evals.config import EvalConfig, EvalSourceConfig, ValidateConfig
from ramify.train.config import TrainerProcessConfig
from ramify.train.sft.config import SftConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("examples/**/README.md"))]
COMMANDS = (RunConfig, EvalConfig, SftConfig, ServeConfig, EnvServerConfig, TrainerProcessConfig, ValidateConfig)
PLUGIN_KEYS = {"filters": "filter", "judges": "judge"} | {kind: kind for kind in PLUGIN_KINDS}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--([a-z][\w.-]*\w)")
FOREIGN_CELL = re.compile(r"^\| .*? \|", re.MULTILINE)  # in the tables for migration: the key of another project
DOTTED_KEY = re.compile(r"[a-z]\w*(\.\w+)+")


def list_sections(annotation: Any) -> list[type[Config]]:
    """Return the config classes in the type of a key."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in list_sections(part)]


@cache
def list_plugin_configs(kind: str) -> list[type[Config]]:
    return [get_config_class(find_plugin_class(kind, name), Config) for name in PLUGIN_KINDS[kind].builtin_paths]


def has_key(section: type[Config], path: list[str]) -> bool:
    """Return whether a section has a key; the names of its dictionaries and the indices of its lists are free."""
    if not path:
        return True
    if path[0] not in section.model_fields:
        return False
    annotation = section.model_fields[path[0]].annotation
    sections = list_sections(annotation)
    if not sections and (kind := PLUGIN_KEYS.get(path[0])):
        sections = list_plugin_configs(kind)
    rest = path[1:]
    if rest and (rest[0].isdigit() or (typing.get_origin(annotation) is dict and not PLUGIN_KEYS.get(path[0]))):
        rest = rest[1:]
    if not rest or not sections:
        return not rest or annotation is dict or typing.get_origin(annotation) is dict
    return any(has_key(child, rest) for child in sections)


def list_all_sections() -> list[type[Config]]:
    """Return every config class of the package."""
    for kind in PLUGIN_KINDS:
        list_plugin_configs(kind)  # imports them
    return [section for section in list_subclasses(Config) if section.__module__.startswith("ramify.")]


def list_subclasses(base: type[Config]) -> list[type[Config]]:
    return [section for child in base.__subclasses__() for section in (child, *list_subclasses(child))]


def is_key(path: str, roots: Iterable[type[Config]] = (*COMMANDS, TrainSourceConfig, EvalSourceConfig)) -> bool:
    return any(has_key(root, path.replace("-", "_").split(".")) for root in roots)


SECTIONS = {
    name
    for root in (*COMMANDS, TrainSourceConfig)
    for name, field in root.model_fields.items()
    if list_sections(field.annotation) or name in PLUGIN_KEYS
}
OTHER_NAMES = {
    "checkpoint.json",  # a file
    "orchestrator.json",  # a file
    "runtime.run",  # a method
    "trainer.loss.teacher_tau",  # prime-rl's name of a key, in a table of names
    "orchestrator.teacher_model",
    "adv_tau",
    "kv",  # a field of a request
    *("environment", "environment.network_mode", "task", "task.requires"),  # fields of tasks
}
OTHER_FLAGS = {"privileged", "max-logprobs", "taskset.judge"}  # of podman, of vLLM, and of a taskset on a page


@cache
def read_known_flags() -> frozenset[str]:
    """Return the flags that the source names: of the commands, the benchmarks, and the programs they start."""
    files = [*(ROOT / "src" / "ramify").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    return frozenset(flag for file in files for flag in FLAG.findall(file.read_text()))


def is_flag(flag: str) -> bool:
    return flag in read_known_flags() | OTHER_FLAGS or is_key(re.sub(r"^no[-_]", "", flag)) or is_key(flag)


def read_tables(text: str) -> list[dict[str, Any]]:
    """Return a TOML text as tables: one, or one per line where the lines are alternatives."""
    try:
        return [tomllib.loads(text)]
    except tomllib.TOMLDecodeError:
        return [tomllib.loads(line) for line in text.splitlines()]


def list_paths(table: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys of a table. The keys below a plugin of the reader are not known here."""
    paths: list[str] = []
    for key, value in table.items():
        paths.append(f"{prefix}{key}")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, dict) and not re.search("[.:]", str(child.get("id", ""))):
                paths += list_paths(child, f"{prefix}{key}.")
    return paths


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_and_flags_of_the_page_exist(page: Path) -> None:
    text = FOREIGN_CELL.sub("", page.read_text()) if page.name.startswith("from-") else page.read_text()
    blocks = BLOCK.findall(text)
    spans = re.findall("`([^`\n]+)`", BLOCK.sub("", text))
    keys = {span for span in spans if DOTTED_KEY.fullmatch(span) and span.split(".")[0] in SECTIONS} - OTHER_NAMES
    for language, block in blocks:
        keys |= {path for table in read_tables(block) for path in list_paths(table)} if language == "toml" else set()
    short_keys: set[str] = set()  # named without the section that has them
    for span in spans:
        if re.match(r"[a-z][\w.]* = [^.<…]+$", span):
            with contextlib.suppress(tomllib.TOMLDecodeError):
                short_keys |= set(list_paths(tomllib.loads(span)))
    assert sorted(key for key in keys if not is_key(key)) == []
    assert sorted(short_keys - OTHER_NAMES - {key for key in short_keys if is_key(key, list_all_sections())}) == []

    lines = [line.strip() for _, block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [line.partition(" # ")[0] for line in [*spans, *lines] if line.startswith(("ramify ", "--"))]
    assert sorted(flag for line in commands for flag in FLAG.findall(line) if not is_flag(flag)) == []


def test_flags_of_the_configuration_page_are_accepted(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    (tmp_path / "run.toml").write_text(next(block for language, block in BLOCK.findall(page) if language == "toml"))
    rows = re.findall(r"^\| (`--.*?) \|", page, re.MULTILINE)
    examples = [span for row in rows for span in re.findall("`([^`]+)`", row)]
    assert len(examples) > 8
    for example in examples:
        parse(RunConfig, ["@", str(tmp_path / "run.toml"), *shlex.split(example)])
