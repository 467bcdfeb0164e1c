"""Digests of the source files that an environment consists of.

Rewards can be compared only if the same code computed them, so a run stores digests of that code: the module of a
plugin, and all modules of the same package that it imports, directly or not. Imports are read from the source text,
including those inside functions, so the result does not depend on what has been executed so far. Modules that are
imported by a computed name, data files, and other packages are not covered. Of Ramify itself only the built-in tasksets
count.
"""

import ast
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

import ramify

DIGEST_CHARS = 16
RAMIFY_ROOT = Path(ramify.__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class ModuleScope:
    """The modules below `root` whose dotted name starts with `prefix`. An empty prefix means all but Ramify's own."""

    root: Path
    prefix: tuple[str, ...] = ()

    def iter_files(self, module_name: tuple[str, ...]) -> Iterator[Path]:
        """Yield the files that importing the module executes: its packages' `__init__.py`, then the module."""
        if module_name[: len(self.prefix)] != self.prefix or (not self.prefix and module_name[:1] == ("ramify",)):
            return
        for depth in range(max(1, len(self.prefix)), len(module_name) + 1):
            path = self.root.joinpath(*module_name[:depth])
            for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
                if file.is_file():
                    yield file


BUILTIN_TASKSETS = ModuleScope(RAMIFY_ROOT, ("ramify", "env", "tasksets"))


@cache  # per class: the digests cover the loaded code, even if its file is edited later
def compute_code_digests(plugin: type) -> dict[str, str]:
    """Return the digest of every source file of a plugin, by its path relative to the root of its package."""
    module = sys.modules.get(plugin.__module__)
    file = getattr(module, "__file__", None)
    if file is None:
        return {plugin.__qualname__: _compute_digest(_get_source(plugin).encode())}
    path = Path(file).resolve()
    scopes = _find_scopes(plugin.__module__, path)
    if not scopes:
        return {}
    digests: dict[str, str] = {}
    pending = [path]
    while pending:
        current = pending.pop()
        root = next(scope.root for scope in scopes if current.is_relative_to(scope.root))
        name = current.relative_to(root).as_posix()
        if name in digests:
            continue
        data = current.read_bytes()
        digests[name] = _compute_digest(data)
        package = current.relative_to(root).parts[:-1]
        pending += [
            file for target in _iter_imports(data, package) for scope in scopes for file in scope.iter_files(target)
        ]
    return dict(sorted(digests.items()))


def _find_scopes(module_name: str, path: Path) -> list[ModuleScope]:
    """Return the scopes that contain the modules of a plugin's package; none for a plugin that is part of Ramify."""
    parts = tuple(module_name.split("."))
    if parts[0] == "ramify":
        return [BUILTIN_TASKSETS] if parts[:3] == BUILTIN_TASKSETS.prefix else []
    if len(parts) > 1 or path.name == "__init__.py":  # a module of a package
        return [ModuleScope(path.parents[len(parts) - (path.name != "__init__.py")], parts[:1]), BUILTIN_TASKSETS]
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    package = [ModuleScope(root, path.relative_to(root).parts[:1])] if root != path.parent else []
    site_packages = {Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib")}
    siblings = ModuleScope(path.parent, (path.stem,) if path.parent in site_packages else ())
    return [siblings, *package, BUILTIN_TASKSETS]


def _iter_imports(source: bytes, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the dotted names that a source file imports. Relative imports start at `package`."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            yield from ((*base, alias.name) for alias in node.names)  # the alias is a module or a name in one


def _get_source(plugin: type) -> str:
    """Return the source of a class that was defined in an interactive session, or its byte code without a source."""
    functions = [value for cls in plugin.__mro__ for value in vars(cls).values() if _is_defined_with(value, plugin)]
    try:
        return "\n".join(inspect.getsource(function) for function in functions)
    except OSError:
        return "\n".join(
            f"{function.__qualname__} {function.__code__.co_code.hex()} {_list_constants(function)}"
            for function in functions
        )


def _is_defined_with(value: object, plugin: type) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == plugin.__module__


def _list_constants(function: FunctionType) -> list[str]:
    return [repr(value) for value in function.__code__.co_consts if not isinstance(value, CodeType)]


def _compute_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGEST_CHARS]
