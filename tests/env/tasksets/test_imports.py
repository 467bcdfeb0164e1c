"""Built-in tasksets are written like users' tasksets: with the public API only."""

import ast
from pathlib import Path

import pytest

import ramify
import ramify.env.tasksets

ROOT = Path(ramify.env.tasksets.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imported_modules(tree: ast.AST) -> list[str]:
    """The modules of Ramify that a file imports, also inside functions; a relative import is one of its own package."""
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules += [
                f"{node.module}.{alias.name}" if node.module == "ramify" else str(node.module) for alias in node.names
            ]
    return [module for module in modules if module.split(".")[0] == "ramify"]


def is_allowed(module: str) -> bool:
    """`ramify.core.errors` is the module that `rf.errors` is."""
    return module in ("ramify", "ramify.core.errors") or f"{module}.".startswith("ramify.env.tasksets.")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_taskset_imports_only_public_modules(file: Path):
    tree = ast.parse(file.read_text("utf-8"))
    assert [module for module in imported_modules(tree) if not is_allowed(module)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_taskset_uses_only_public_names(file: Path):
    tree = ast.parse(file.read_text("utf-8"))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rf"
    }
    assert used <= set(ramify.__all__)
