"""Check the structure of the package: `python -m tools.structure` lists what breaks a rule and exits with 1.

Four rules are checked on the source, without importing it:

- Layers: the table in `docs/architecture.md` lists the packages from the bottom up. A package may import those that
  stand above it, and in a row with several names those before it; its own modules may import each other. Imports inside
  functions and for type checkers count too.
- Circles: no modules import each other in a circle, also not within a package.
- Heavy libraries: only `model`, `train` and `infer` import torch and what is built on it.
- Class names: a public class has a name of its own in the whole project, so that searching for it finds one thing.

Public names that a package loads when they are first used are listed in its `__init__.pyi`; importing one counts as an
import of the module that defines it.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, TABLE = ROOT / "src", ROOT / "docs" / "architecture.md"
TABLE_HEADING = "## Who may import whom"
HEAVY_LIBRARIES = {"torch", "transformers", "peft", "triton"}
HEAVY_PACKAGES = {"model", "train", "infer"}  # the packages that may import them


@dataclass(frozen=True, slots=True)
class Import:
    """One import of a module of the project: who imports what, and in which line."""

    importer: str
    imported: str
    line: int


def main() -> int:
    """Print every problem of the source; return 1 if there is one."""
    trees = parse_modules(SOURCE)
    public_names = parse_stubs(SOURCE)
    imports = [item for module, tree in trees.items() for item in find_imports(module, tree, trees, public_names)]
    problems = [
        *find_layer_problems(imports, read_layers(TABLE.read_text())),
        *find_circles(imports),
        *find_heavy_imports(trees),
        *find_repeated_classes(trees),
    ]
    for problem in problems:
        print(problem)
    print(f"structure: {len(trees)} modules, {len(imports)} imports, {len(problems)} problems")
    return 1 if problems else 0


def parse_modules(source: Path) -> dict[str, ast.Module]:
    """Return the syntax tree of every module below `source`, by its dotted name."""
    return {_dotted_name(path.relative_to(source)): ast.parse(path.read_text()) for path in source.rglob("*.py")}


def parse_stubs(source: Path) -> dict[str, str]:
    """Return where the packages below `source` load their public names from: `a.Name` is `a.b.Name`."""
    return {
        name: target
        for path in source.rglob("__init__.pyi")
        for name, target in find_public_names(_dotted_name(path.relative_to(source)), ast.parse(path.read_text()))
    }


def find_public_names(package: str, stub: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each name that the stub of a package imports, and the same name in the module that it comes from."""
    for node in ast.walk(stub):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                yield f"{package}.{alias.asname or alias.name}", f"{package}.{node.module}.{alias.name}"


def find_imports(
    module: str, tree: ast.Module, modules: Mapping[str, object], public_names: Mapping[str, str]
) -> Iterator[Import]:
    """Yield the imports of project modules in one module.

    `from package import name` is an import of that module, or of the module that a public name of the package is in.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [_find_module(f"{node.module}.{alias.name}", modules, public_names) for alias in node.names]
        else:
            continue
        for name in dict.fromkeys(names):
            if name in modules and name != module:
                yield Import(module, name, node.lineno)


def read_layers(text: str) -> list[str]:
    """Return the packages of the table, lowest first; those in one row in the order in which they stand there."""
    section = text.partition(TABLE_HEADING)[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def find_layer_problems(imports: Sequence[Import], layers: Sequence[str]) -> Iterator[str]:
    """Yield each import of a package that does not stand above the importer's own in the table."""
    level = {name: number for number, name in enumerate(layers)}
    for item in imports:
        importer, imported = _package(item.importer), _package(item.imported)
        if importer == imported or not importer or not imported:
            continue
        missing = [name for name in (importer, imported) if name not in level]
        if missing:
            yield f"{item.importer}:{item.line}: {missing[0]} is missing from the table in docs/architecture.md"
        elif level[imported] > level[importer]:
            yield f"{item.importer}:{item.line}: {importer} may not import {imported} ({item.imported})"


def find_circles(imports: Sequence[Import]) -> Iterator[str]:
    """Yield each set of modules that import each other, in one line."""
    imports_of: dict[str, set[str]] = {}
    for item in imports:
        if not item.importer.startswith(item.imported + "."):  # a package is loaded before its modules in any case
            imports_of.setdefault(item.importer, set()).add(item.imported)
    for circle in _strongly_connected(imports_of):
        yield f"import circle: {' <-> '.join(sorted(circle))}"


def find_heavy_imports(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield each import of a heavy library outside the packages that run models."""
    for module, tree in trees.items():
        if _package(module) in HEAVY_PACKAGES:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                if name.split(".")[0] in HEAVY_LIBRARIES:
                    yield f"{module}:{node.lineno}: only {', '.join(sorted(HEAVY_PACKAGES))} may import {name}"


def find_repeated_classes(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield each public class name that more than one class has."""
    places: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{module}:{node.lineno}")
    for name, definitions in sorted(places.items()):
        if len(definitions) > 1:
            yield f"class {name} has {len(definitions)} definitions: {', '.join(sorted(definitions))}"


def _strongly_connected(graph: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Yield the strongly connected components with more than one node (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    components: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        path.append(node)
        for successor in sorted(graph.get(node, ())):
            if successor not in order:
                visit(successor)
            if successor in path:
                lowest[node] = min(lowest[node], lowest[successor])
        if lowest[node] == order[node]:
            start = path.index(node)
            components.append(set(path[start:]))
            del path[start:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return (component for component in components if len(component) > 1)


def _find_module(name: str, modules: Mapping[str, object], public_names: Mapping[str, str]) -> str:
    """Return the module that `name` is or is defined in."""
    while name not in modules and name in public_names:
        name = public_names[name]
    return name if name in modules else name.rpartition(".")[0]


def _dotted_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _package(module: str) -> str:
    """Return the package below `ramify` that a module belongs to; "" for `ramify` itself."""
    return module.split(".")[1] if "." in module else ""


if __name__ == "__main__":
    sys.exit(main())
