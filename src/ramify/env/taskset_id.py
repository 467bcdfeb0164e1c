"""The id by which other processes find a taskset class.

A class in a module or a file has an id already. A class that is defined in a notebook or in the running script is first
written to a file, with the imports, functions, classes and constants that it uses: other processes cannot import a
notebook, and importing a script would run it again.
"""

import ast
import importlib.util
import inspect
import linecache
import symtable
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

from ramify.core.errors import ConfigInvalid
from ramify.env.taskset import Taskset

DEFINITIONS_DIR = "notebook"  # directory below the output for the definitions of notebooks and scripts
MAIN_MODULE = "__main__"
FILE_HEADER = "# Written by Ramify from the notebook or script that defines {name}. Edit it there.\n"


def build_taskset_table(taskset: Any, output: Path) -> Any:
    """Return the configuration table of a taskset that is given as a class, an instance, an id or a table."""
    if isinstance(taskset, str):
        return {"id": taskset}
    if isinstance(taskset, type) and issubclass(taskset, Taskset):
        return {"id": get_class_id(taskset, output / DEFINITIONS_DIR)}
    if isinstance(taskset, Taskset):
        settings = taskset.config.model_dump(mode="json", exclude_unset=True, exclude={"id"})
        return {"id": get_class_id(type(taskset), output / DEFINITIONS_DIR), **settings}
    if isinstance(taskset, Mapping):
        table = dict(cast(Mapping[str, Any], taskset))
        id: Any = table.get("id")
        return {**table, "id": get_class_id(id, output / DEFINITIONS_DIR)} if isinstance(id, type) else table
    return cast(Any, taskset)


def get_class_id(cls: type, definitions_dir: Path) -> str:
    """Return the id of a class. A class that other processes cannot import is first written to `definitions_dir`.

    Raises ConfigInvalid if the source of the class, or of something it uses, is not available.
    """
    if "." in cls.__qualname__:
        problem = f"{cls.__qualname__} is defined inside a function or class; define it at the top level"
        raise ConfigInvalid(problem, key="taskset")
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if cls.__module__ == MAIN_MODULE or module is None:
        path = definitions_dir / f"{cls.__name__}.py"
        _write_if_changed(path, FILE_HEADER.format(name=cls.__name__) + build_module_source(cls))
        return f"{path}:{cls.__name__}"
    if file is not None and _find_spec(cls.__module__) is None:  # loaded from a file that is not on sys.path
        return f"{file}:{cls.__name__}"
    return f"{cls.__module__}:{cls.__name__}"


def build_module_source(cls: type) -> str:
    """Return the source of a module that defines a class of `__main__` and everything the class uses."""
    definitions = _DefinitionCollector(vars(sys.modules[MAIN_MODULE]))
    definitions.add(cls.__name__, cls)
    return "\n\n\n".join(["\n".join(definitions.imports), *definitions.statements]).strip() + "\n"


class _DefinitionCollector:
    """Collects the statements that define a name of `__main__`, dependencies first."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.imports: list[str] = []
        self.statements: list[str] = []
        self._namespace, self._visited = namespace, set[str]()

    def add(self, name: str, value: Any) -> None:
        if name in self._visited:
            return
        self._visited.add(name)
        if isinstance(value, ModuleType):
            self.imports.append(f"import {name}" if value.__name__ == name else f"import {value.__name__} as {name}")
        elif getattr(value, "__module__", None) == MAIN_MODULE and isinstance(value, type | FunctionType):
            self._add_source(name, value)
        elif (origin := _find_import_origin(value)) is not None:
            self.imports.append(f"from {origin[0]} import {origin[1]} as {name}")
        elif _is_literal(value):
            self.statements.append(f"{name} = {value!r}")
        else:
            self._add_source(name, value)

    def _add_source(self, name: str, value: Any) -> None:
        source = _find_source(name, value)
        if source is None:
            kind = type(value).__qualname__
            text = f"it uses {name!r}, a {kind} whose source is not available; put the taskset into a .py file"
            raise ConfigInvalid(text, key="taskset")
        for used in _list_global_names(source):
            if used in self._namespace:
                self.add(used, self._namespace[used])
        self.statements.append(source)


def _find_import_origin(value: Any) -> tuple[str, str] | None:
    """Return the module and the name of a class or function that can be imported; None for any other value."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == MAIN_MODULE or "." in name:
        return None
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else None


def _is_literal(value: Any) -> bool:
    try:
        return type(value) in (bool, int, float, str, bytes, list, tuple, dict, set, type(None)) and (
            ast.literal_eval(repr(value)) == value
        )
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _list_global_names(source: str) -> list[str]:
    """Return the global names that a statement uses."""
    pending = [symtable.symtable(source, "definition", "exec")]
    names: set[str] = set()
    while pending:
        table = pending.pop()
        is_module = table.get_type() == "module"
        symbols = (symbol for symbol in table.get_symbols() if symbol.is_referenced())
        names |= {symbol.get_name() for symbol in symbols if is_module or symbol.is_global()}
        pending += table.get_children()
    return sorted(names)


def _find_source(name: str, value: Any) -> str | None:
    """Return the statement that defines `name` in a file or notebook cell, or None."""
    for file in _iter_source_files(value):
        text = "".join(linecache.getlines(file))
        try:
            statements = ast.parse(text).body
        except SyntaxError:
            continue
        for statement in reversed(statements):
            if name in _list_defined_names(statement):
                decorators = getattr(statement, "decorator_list", [])
                first_line = min(node.lineno for node in (statement, *decorators))
                return "\n".join(text.splitlines()[first_line - 1 : statement.end_lineno])
    return None


def _iter_source_files(value: Any) -> Iterator[str]:
    """Yield the files that may contain the source of a value: the file of its code, or else all cells, newest first.

    Methods that a decorator generated, such as the `__init__` of a dataclass, do not tell the file of their class.
    """
    if isinstance(value, FunctionType):
        yield inspect.unwrap(value).__code__.co_filename
        return
    if isinstance(value, type):
        methods = [inspect.unwrap(item) for item in vars(value).values() if isinstance(item, FunctionType)]
        codes = [m.__code__ for m in methods if m.__code__.co_qualname.startswith(f"{value.__qualname__}.")]
        if codes:
            yield codes[0].co_filename
            return
    yield from reversed(list(linecache.cache))
    if main := getattr(sys.modules[MAIN_MODULE], "__file__", None):
        yield main


def _list_defined_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _find_spec(module: str) -> object | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
