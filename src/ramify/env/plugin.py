"""Plugins: an id in a configuration becomes a class.

Tasksets, harnesses, runtimes, judges, algorithms and filters are looked up in the same four places: the built-in names,
the entry points of installed packages, an import path (`package.module:Class`, or `package.module` if it defines one),
a file (`my_env.py`, or `my_env.py:Class`). A plugin's options are the fields of the config class that annotates its
`config` attribute; unknown keys are errors. Only the named module is imported.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_type_hints

import ramify
from ramify.core.config import Config, parse_section
from ramify.core.errors import ConfigInvalid, ConfigProblem
from ramify.core.errors.origin import describe_exception
from ramify.core.names import suggest

C = TypeVar("C", bound=Config)


def get_config_class(plugin: type, base: type[C]) -> type[C]:
    """Return the class in the annotation `config: MyConfig` of the plugin or of a base class."""
    try:
        annotation = get_type_hints(plugin).get("config", base)
    except NameError as error:
        raise ConfigInvalid(f"{plugin.__qualname__}: an annotation cannot be resolved: {error}") from error
    if not (isinstance(annotation, type) and issubclass(annotation, base)):
        raise ConfigInvalid(
            f"{plugin.__qualname__}: config must be annotated with a subclass of {base.__name__}, found {annotation!r}"
        )
    return annotation


@dataclass(frozen=True, slots=True)
class PluginKind:
    """A kind of plugin: its entry point group, the import path of its base class, and its built-in classes by id."""

    entry_point_group: str
    base_class_path: str
    builtin_paths: Mapping[str, str]

    def load_base_class(self) -> type:
        """Import the base class."""
        module, _, name = self.base_class_path.partition(":")
        return getattr(importlib.import_module(module), name)


def _read_plugin_kinds() -> dict[str, PluginKind]:
    """Return the kinds of plugins from `plugins.toml`, at the top of the package."""
    tables = tomllib.loads(Path(ramify.__file__).with_name("plugins.toml").read_text())
    return {kind: PluginKind(**table) for kind, table in tables.items()}


PLUGIN_KINDS = _read_plugin_kinds()


def build_plugin(kind: str, table: Mapping[str, Any], *, table_key: str | None = None) -> Any:
    """Return the plugin described by a configuration table, which errors call `table_key` (default: the kind)."""
    cls, config = resolve_plugin(kind, table, table_key=table_key)
    return cls(config)


def resolve_plugin(kind: str, table: Mapping[str, Any], *, table_key: str | None = None) -> tuple[type, Config]:
    """Return the class and the validated config described by a table, without creating the plugin."""
    table_key = table_key or kind
    if not isinstance(table.get("id"), str) or not table["id"]:
        raise ConfigInvalid(f"required: the name of a {kind}", key=f"{table_key}.id")
    cls = find_plugin_class(kind, table["id"], table_key=table_key)
    return cls, parse_section(get_config_class(cls, Config), dict(table), key=table_key)


def resolve_plugins(tables: Iterable[tuple[str, str, Mapping[str, Any]]]) -> list[tuple[type, Config]]:
    """Return the class and the config of each table, given as kind, key and table.

    Raises ConfigInvalid with the problems of all tables.
    """
    resolved: list[tuple[type, Config]] = []
    problems: list[ConfigProblem] = []
    for kind, table_key, table in tables:
        try:
            resolved.append(resolve_plugin(kind, table, table_key=table_key))
        except ConfigInvalid as error:
            problems += error.problems
    if problems:
        raise ConfigInvalid(problems=problems)
    return resolved


def find_plugin_class(kind: str, id: str, *, table_key: str | None = None) -> type:
    """Return the class that an id names. Raises ConfigInvalid, which suggests the closest known id."""
    config_key, plugin_kind = f"{table_key or kind}.id", PLUGIN_KINDS[kind]
    if id in plugin_kind.builtin_paths:
        return _load_class(config_key, kind, plugin_kind, plugin_kind.builtin_paths[id])
    if ":" in id:
        return _load_class(config_key, kind, plugin_kind, id)
    # reads the metadata of every installed package, so it comes after what needs none
    entry_points = importlib.metadata.entry_points(group=plugin_kind.entry_point_group)
    if id in entry_points.names:
        return _load_class(config_key, kind, plugin_kind, entry_points[id].value)
    if "." in id:
        return _load_class(config_key, kind, plugin_kind, id)
    if file := _find_similar_file(id):
        raise ConfigInvalid(f"unknown {kind} {id!r}; did you mean {file}?", key=config_key)
    if id.isidentifier() and id not in sys.stdlib_module_names and importlib.util.find_spec(id) is not None:
        return _load_class(config_key, kind, plugin_kind, id)
    names = sorted({*plugin_kind.builtin_paths, *entry_points.names})
    hint = suggest(id, names, f"expected one of {', '.join(names)}, a module, module:Class or file.py")
    raise ConfigInvalid(f"unknown {kind} {id!r}; {hint}", key=config_key)


def _find_similar_file(id: str) -> Path | None:
    """Return the file that an id without `.py` probably means, relative to the working directory."""
    name = id.replace("-", "_")
    return next((file for file in (Path(f"{name}.py"), Path(id, f"{name}.py")) if file.is_file()), None)


def _load_class(config_key: str, kind: str, plugin_kind: PluginKind, import_path: str) -> type:
    """Import the class at `module:Class`, `module.Class`, `module`, `file.py` or `file.py:Class`."""
    module_path, _, name = import_path.partition(":")
    if not module_path.endswith(".py") and not name:
        module_path, name = _split_import_path(config_key, module_path)
    module = _import_module(config_key, module_path)
    base = plugin_kind.load_base_class()
    candidates = [value for value in vars(module).values() if _is_defined_in(value, module, base)]
    names = [candidate.__name__ for candidate in candidates]
    listed = ", ".join(names) or "none"
    if not name and len(candidates) != 1:
        advice = f"select one as {module_path}:Class" if names else "define one in it, or select another module"
        text = f"{module_path} should have one {kind} class, it has {listed}; {advice}"
        raise ConfigInvalid(text, key=config_key)
    cls = getattr(module, name, None) if name else candidates[0]
    if cls is None:
        hint = suggest(name, names, f"its {kind} classes: {listed}", "{}")
        raise ConfigInvalid(f"{module_path} has no {name}; {hint}", key=config_key)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigInvalid(f"{import_path} is not a {kind}: it does not derive from {base.__name__}", key=config_key)
    return cls


def _split_import_path(config_key: str, import_path: str) -> tuple[str, str]:
    """Return the module and the class in `module.Class`; the class is "" if the path names a module."""
    parent_path, _, name = import_path.rpartition(".")
    if not parent_path:
        return import_path, ""
    parent = _import_module(config_key, parent_path)
    if isinstance(getattr(parent, name, None), type) or not hasattr(parent, "__path__"):
        return parent_path, name
    return (import_path, "") if importlib.util.find_spec(import_path) is not None else (parent_path, name)


def _is_defined_in(value: object, module: ModuleType, base: type) -> bool:
    """Return whether the value is a subclass of `base` that the module, or a module of the package, defines."""
    if not (isinstance(value, type) and issubclass(value, base)):
        return False
    return value.__module__ == module.__name__ or value.__module__.startswith(f"{module.__name__}.")


def _import_module(config_key: str, module_path: str) -> ModuleType:
    try:
        if module_path.endswith(".py"):
            return load_module_from_file(Path(module_path))
        return importlib.import_module(module_path)
    except (FileNotFoundError, IsADirectoryError):
        reason = "there is no such file"
    except ModuleNotFoundError as error:
        file = Path(*module_path.split(".")).with_suffix(".py")
        means_file = file.is_file() and module_path.startswith(str(error.name))
        hint = f"to use the file, write {file}:Class" if means_file else "is its package installed in this environment?"
        reason = f"there is no module {error.name!r} ({hint})"
    except Exception as error:
        raise ConfigInvalid(f"{module_path} cannot be imported: {describe_exception(error)}", key=config_key) from error
    raise ConfigInvalid(f"{module_path}: {reason}", key=config_key)


def load_module_from_file(path: Path) -> ModuleType:
    """Load a file as a module, once per process and content: an edited file becomes another module."""
    path = path.expanduser().resolve(strict=True)
    digest = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()
    name = f"ramify_plugin_{path.stem}_{digest[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where `get_type_hints` looks up annotations
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
