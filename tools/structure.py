"""Check the structure of the package: `python -m tools.structure` lists what breaks a rule and exits with 1.

A room is a package or module directly below `src/ramify`; `__main__` is not one. The parts of a room are the packages
directly below it, and its own modules together. Five rules are checked on the source, without importing it:

- Layers: the table in `docs/architecture.md` lists the rooms from the bottom up, and beside each room its parts from
  the bottom up. A room or part may import those before it; the modules of one part may import each other. Imports
  inside functions and for type checkers count too.
- Circles: no rooms, parts, packages or modules import each other in a circle. A package is here what it holds itself,
  without the packages below it.
- Heavy libraries: only the parts that run models import torch and what is built on it.
- Triton: only a torch for CUDA brings it, so a module of kernels is imported inside functions, or by other kernels.
- Class names: a public class has a name of its own in the whole project, so that searching for it finds one thing.

Public names that a package loads when they are first used are listed in its `__init__.pyi`; importing one counts as an
import of the module that defines it. `python -m tools.structure DIRECTORY` checks another copy of the repository.
"""

import ast
import gc
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE_HEADING = "## Who may import whom"
OWN_MODULES = "own modules"  # how the table names the modules directly in a room
HEAVY_LIBRARIES = {"torch", "transformers", "triton"}
HEAVY_PARTS = {"model", "model.kernels", "train", "train.sft", "infer"}  # the parts that may import them


@dataclass(frozen=True, slots=True)
class Import:
    """One import of a module of the project: who imports what, and in which line."""

    importer: str
    imported: str
    line: int


def main(root: Path = ROOT) -> int:
    """Print every problem of the source and its sizes; return 1 if there is a problem."""
    gc.disable()  # nodes of trees are not garbage, and collections take half of the time
    source = root / "src"
    trees = parse_modules(source)
    public_names = parse_stubs(source)
    imports = [item for module, tree in trees.items() for item in find_imports(module, tree, trees, public_names)]
    parts = {module: find_part(module, trees) for module in trees}
    rooms = {module: part.partition(".")[0] for module, part in parts.items()}
    order = read_order((root / "docs" / "architecture.md").read_text())
    upward = list(find_upward_imports(imports, parts, order))
    room_circles = list(find_circles(imports, rooms))
    packages = {module: find_package(module, trees) for module in trees}
    circles = {*find_circles(imports), *find_circles(imports, packages), *find_circles(imports, parts), *room_circles}
    problems = [
        *find_missing_parts(parts.values(), order),
        *upward,
        *sorted(circles),
        *find_heavy_imports(trees, parts),
        *find_eager_kernel_imports(trees, imports),
        *find_repeated_classes(trees),
    ]
    for problem in problems:
        print(problem)
    floors = "-" if room_circles else count_floors(build_graph(imports, rooms))
    num_lines = sum(len(path.read_text().splitlines()) for path in source.rglob("*.py"))
    print(
        f"structure: {len(set(rooms.values()) - {''})} rooms on {floors} floors, {len(circles)} circles, "
        f"{len(upward)} imports upward, {len(trees)} files, {num_lines} lines"
    )
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


def walk_statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also inside functions, classes and blocks; expressions are not visited."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()):
            if isinstance(node, ast.stmt):
                yield node
            yield from walk_statements(node)


def find_public_names(package: str, stub: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each name that the stub of a package imports, and the same name in the module that it comes from."""
    for node in walk_statements(stub):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                yield f"{package}.{alias.asname or alias.name}", f"{package}.{node.module}.{alias.name}"


def find_imports(
    module: str, tree: ast.Module, modules: Mapping[str, object], public_names: Mapping[str, str]
) -> Iterator[Import]:
    """Yield the imports of project modules in one module.

    `from package import name` is an import of that module, or of the module that a public name of the package is in.
    """
    for node in walk_statements(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [_find_module(f"{node.module}.{alias.name}", modules, public_names) for alias in node.names]
        else:
            continue
        for name in dict.fromkeys(names):
            if name in modules and name != module:
                yield Import(module, name, node.lineno)


def find_package(module: str, modules: Iterable[str]) -> str:
    """Return the package that holds a module; a package holds its `__init__`."""
    is_package = any(other.startswith(f"{module}.") for other in modules)
    return (module if is_package else module.rpartition(".")[0]).removeprefix("ramify").removeprefix(".")


def find_part(module: str, modules: Iterable[str]) -> str:
    """Return the part that a module belongs to: `room.package`, or `room` for its own modules; "" for `ramify`."""
    names = module.split(".")[1:]
    if not names or names[0] == "__main__":
        return ""
    package = f"ramify.{'.'.join(names[:2])}"
    is_package = len(names) > 2 or (len(names) == 2 and any(other.startswith(f"{package}.") for other in modules))
    return ".".join(names[:2]) if is_package else names[0]


def read_order(text: str) -> list[str]:
    """Return the parts in the order of the table: rooms from the bottom up, and each room's parts in their order."""
    section = text.partition(TABLE_HEADING)[2].partition("\n## ")[0]
    order: list[str] = []
    for line in section.splitlines():
        if line.startswith("| `"):
            first, *others = line.strip("| ").split("|")
            (room, *more_rooms) = re.findall(r"`(\w+)`", first)
            names = re.findall(rf"`(\w+)`|({OWN_MODULES})", others[0]) if len(others) == 2 else []
            parts = [f"{room}.{name}" if name else room for name, _ in names] or [room]
            order += [*parts, *more_rooms]
    return order


def find_missing_parts(parts: Iterable[str], order: Sequence[str]) -> Iterator[str]:
    """Yield each part that the table does not list."""
    for part in sorted({*parts} - {*order, ""}):
        yield f"{part} is missing from the table in docs/architecture.md"


def find_upward_imports(imports: Sequence[Import], parts: Mapping[str, str], order: Sequence[str]) -> Iterator[str]:
    """Yield each import of a part that stands after the importer's own in the table."""
    level = {name: number for number, name in enumerate(order)}
    for item in imports:
        importer, imported = parts[item.importer], parts[item.imported]
        if importer in level and imported in level and level[imported] > level[importer]:
            yield f"{item.importer}:{item.line}: {importer} may not import {imported} ({item.imported})"


def build_graph(imports: Sequence[Import], names: Mapping[str, str] | None = None) -> dict[str, set[str]]:
    """Return who imports whom: modules, or what `names` calls the module's room or part."""
    graph: dict[str, set[str]] = {}
    for item in imports:
        importer, imported = (names[item.importer], names[item.imported]) if names else (item.importer, item.imported)
        is_parent = item.importer.startswith(f"{item.imported}.")  # a package is loaded before its modules in any case
        if importer and imported and importer != imported and not is_parent:
            graph.setdefault(importer, set()).add(imported)
    return graph


def find_circles(imports: Sequence[Import], names: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield each set of modules, or of rooms or parts by `names`, that import each other, in one line."""
    for circle in _strongly_connected(build_graph(imports, names)):
        yield f"import circle: {' <-> '.join(sorted(circle))}"


def count_floors(graph: Mapping[str, set[str]]) -> int:
    """Return the number of nodes on the longest chain of a graph without circles."""

    @cache
    def height(node: str) -> int:
        return 1 + max((height(successor) for successor in graph.get(node, ())), default=0)

    return max(map(height, graph), default=0)


def find_heavy_imports(trees: Mapping[str, ast.Module], parts: Mapping[str, str]) -> Iterator[str]:
    """Yield each import of a heavy library outside the parts that run models."""
    for module, tree in trees.items():
        if parts[module] in HEAVY_PARTS:
            continue
        for node in walk_statements(tree):
            for name in _imported_names(node):
                if name.split(".")[0] in HEAVY_LIBRARIES:
                    yield f"{module}:{node.lineno}: only {', '.join(sorted(HEAVY_PARTS))} may import {name}"


def find_eager_kernel_imports(trees: Mapping[str, ast.Module], imports: Sequence[Import]) -> Iterator[str]:
    """Yield each import that loads Triton as soon as a module is imported that is not a module of kernels itself."""
    kernels = {module for module, tree in trees.items() if any("triton" in _imported_names(node) for node in tree.body)}
    for item in imports:
        is_eager = any(node.lineno == item.line for node in trees[item.importer].body)
        if is_eager and item.imported in kernels and item.importer not in kernels:
            yield f"{item.importer}:{item.line}: {item.imported} needs Triton; import it where it is used"


def _imported_names(node: ast.stmt) -> list[str]:
    """Return the modules that an import statement names; none for other statements."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def find_repeated_classes(trees: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield each public class name that more than one class has."""
    places: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in walk_statements(tree):
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


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
