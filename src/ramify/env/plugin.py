"""Plugins: an id in a configuration becomes a class.

Tasksets, harnesses, runtimes, judges, algorithms and filters are found in the same four places: the built-in names, the
entry points of installed packages, an import path (`package.module:Class`), a file (`my_env.py`, or `my_env.py:Class`).
What a plugin may be told is its own config class, the one its `config` attribute is annotated with; keys it does not
have are refused as everywhere else. Nothing is imported but what is named.
"""

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ramify.config import Config, parse_section, raise_config_invalid
from ramify.env.settings import config_class
from ramify.errors.origin import describe_exception


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin: its entry points, what its classes derive from, and those that come with us."""

    group: str
    base: str
    builtin: Mapping[str, str]

    def load_base(self) -> type:
        module, _, name = self.base.partition(":")
        return getattr(importlib.import_module(module), name)


KINDS = {
    "taskset": Kind(
        "ramify.tasksets",
        "ramify.env.taskset:Taskset",
        {
            "alphabet-sort": "ramify.tasksets.alphabet_sort:AlphabetSort",
            "arithmetic": "ramify.tasksets.arithmetic:Arithmetic",
            "dataset": "ramify.tasksets.dataset:Dataset",
            "general-agent": "ramify.tasksets.general_agent:GeneralAgent",
            "reverse-text": "ramify.tasksets.reverse_text:ReverseText",
            "wikispeedia": "ramify.tasksets.wikispeedia:Wikispeedia",
            "wordle": "ramify.tasksets.wordle:Wordle",
        },
    ),
    "harness": Kind("ramify.harnesses", "ramify.harness:Harness", {"chat": "ramify.harness.chat:ChatHarness"}),
    "runtime": Kind("ramify.runtimes", "ramify.runtime:Runtime", {"local": "ramify.runtime.local:LocalRuntime"}),
    "judge": Kind(
        "ramify.judges",
        "ramify.env.judge:Judge",
        {"reference": "ramify.env.judge:ReferenceJudge", "rubric": "ramify.env.judge:RubricJudge"},
    ),
    "algorithm": Kind(
        "ramify.algorithms",
        "ramify.orchestrate.algorithms:Algorithm",
        {
            "dr_grpo": "ramify.orchestrate.algorithms.dr_grpo:DrGrpo",
            "grpo": "ramify.orchestrate.algorithms.grpo:Grpo",
            "max_rl": "ramify.orchestrate.algorithms.max_rl:MaxRl",
            "rloo": "ramify.orchestrate.algorithms.rloo:Rloo",
        },
    ),
    "filter": Kind(
        "ramify.filters",
        "ramify.orchestrate.filters:Filter",
        {
            "gibberish": "ramify.orchestrate.filters.gibberish:Gibberish",
            "repetition": "ramify.orchestrate.filters.repetition:Repetition",
            "zero_advantage": "ramify.orchestrate.filters.zero_advantage:ZeroAdvantage",
        },
    ),
}


def build(kind: str, table: Mapping[str, Any], *, at: str | None = None) -> Any:
    """The plugin that a table of the configuration describes. `at` is the key of the table, the kind unless given."""
    cls, config = settle(kind, table, at=at)
    return cls(config)


def settle(kind: str, table: Mapping[str, Any], *, at: str | None = None) -> tuple[type, Config]:
    """The class and the checked config that a table describes; nothing is built yet."""
    at = at or kind
    if not isinstance(table.get("id"), str) or not table["id"]:
        raise_config_invalid([(f"{at}.id", f"required: the {kind} that is meant")])
    cls = find(kind, table["id"], at=at)
    return cls, parse_section(config_class(cls, Config), dict(table), key=at)


def find(kind: str, id: str, *, at: str | None = None) -> type:
    """The class that an id names; raises ConfigInvalid with the nearest known id."""
    key, known = f"{at or kind}.id", KINDS[kind]
    entry_points = importlib.metadata.entry_points(group=known.group)
    if id in known.builtin:
        return _load(key, kind, known, known.builtin[id])
    if id in entry_points.names:
        return _load(key, kind, known, entry_points[id].value)
    if "." in id or ":" in id:
        return _load(key, kind, known, id)
    if file := _find_similar_file(id):
        return raise_config_invalid([(key, f"unknown {kind} {id!r}; did you mean {file}?")])
    names = sorted({*known.builtin, *entry_points.names})
    alike = difflib.get_close_matches(id, names, n=1)
    meant = f"did you mean {alike[0]!r}?" if alike else f"known are {', '.join(names)}, module:Class and file.py"
    return raise_config_invalid([(key, f"unknown {kind} {id!r}; {meant}")])


def _find_similar_file(id: str) -> Path | None:
    """Return the file that an id without `.py` probably means, relative to the working directory."""
    name = id.replace("-", "_")
    return next((file for file in (Path(f"{name}.py"), Path(id, f"{name}.py")) if file.is_file()), None)


def _load(key: str, kind: str, known: Kind, place: str) -> type:
    """The class at `module:Class`, `module.Class`, `file.py` or `file.py:Class`."""
    where, _, name = place.partition(":")
    if not where.endswith(".py") and not name:
        where, _, name = where.rpartition(".")
    module = _import(key, where)
    base = known.load_base()
    own = [found for found in vars(module).values() if _is_own(found, module, base)]
    if not name and len(own) != 1:
        names = ", ".join(found.__name__ for found in own) or "none"
        raise_config_invalid(
            [(key, f"{where} should have one {kind} class, it has {names}; name one as {where}:Class")]
        )
    cls = getattr(module, name, None) if name else own[0]
    if cls is None:
        names = [found.__name__ for found in own]
        alike = difflib.get_close_matches(name, names, n=1)
        meant = f"did you mean {alike[0]}?" if alike else f"its {kind} classes: {', '.join(names) or 'none'}"
        raise_config_invalid([(key, f"{where} has no {name}; {meant}")])
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise_config_invalid([(key, f"{place} is no {kind}: it does not derive from {base.__name__}")])
    return cls


def _is_own(found: object, module: ModuleType, base: type) -> bool:
    return isinstance(found, type) and issubclass(found, base) and found.__module__ == module.__name__


def _import(key: str, where: str) -> ModuleType:
    try:
        return _module_of(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except (FileNotFoundError, IsADirectoryError):
        reason = "there is no such file"
    except ModuleNotFoundError as error:
        file = Path(*where.split(".")).with_suffix(".py")
        meant = file.is_file() and where.startswith(str(error.name))
        advice = f"to use the file, write {file}:Class" if meant else "is its package installed in this environment?"
        reason = f"there is no module {error.name!r} ({advice})"
    except Exception as error:  # noqa: BLE001 - a module of the user's may raise anything while it is imported
        return raise_config_invalid([(key, f"{where} cannot be imported: {describe_exception(error)}")], cause=error)
    return raise_config_invalid([(key, f"{where}: {reason}")])


def _module_of(path: Path) -> ModuleType:
    """Load the module in a file, once per process; a file that has been edited since is another module."""
    path = path.expanduser().resolve(strict=True)
    digest = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()
    name = f"ramify_plugin_{path.stem}_{digest[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations are looked up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
