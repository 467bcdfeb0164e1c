"""The rules of the package's structure, each broken on purpose. `make lint` checks that the source keeps them."""

import ast
from types import MappingProxyType

import pytest

from tools.structure import (
    find_circles,
    find_heavy_imports,
    find_imports,
    find_layer_problems,
    find_public_names,
    find_repeated_classes,
    read_layers,
)

TABLE = """
## Who may import whom

| package | holds |
|---|---|
| `errors` | names |
| `trace`, `config` | data |
| `cli` | commands |

## Next

| `monitor` | not part of it |
"""


def imports_of(public_names=MappingProxyType({}), **sources):
    """The imports of modules given as `trace__codec="import ..."`."""
    trees = {f"ramify.{name.replace('__', '.')}": ast.parse(text) for name, text in sources.items()}
    return [item for name, tree in trees.items() for item in find_imports(name, tree, trees, public_names)]


def test_the_table_is_read_from_the_page_in_its_order():
    assert read_layers(TABLE) == ["errors", "trace", "config", "cli"]


@pytest.mark.parametrize(
    "source",
    [
        "from ramify.cli.main import run",
        "import ramify.cli.main",
        "from ramify.cli import main",
        "def later():\n    from ramify.cli.main import run",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ramify.cli.main import run",
    ],
)
def test_an_import_against_the_table_is_found_wherever_it_stands(source):
    imports = imports_of(trace__codec=source, cli__main="")
    (problem,) = find_layer_problems(imports, read_layers(TABLE))
    assert "trace may not import cli" in problem
    assert not list(
        find_layer_problems(imports_of(cli__main="import ramify.trace.codec", trace__codec=""), ["trace", "cli"])
    )


def test_a_package_that_the_table_lacks_is_named():
    (problem,) = find_layer_problems(imports_of(video__codec="import ramify.errors.base", errors__base=""), ["errors"])
    assert "video is missing from the table" in problem


def test_a_circle_of_three_modules_is_found():
    circle = imports_of(
        trace__a="import ramify.trace.b",
        trace__b="def f():\n    import ramify.trace.c",
        trace__c="import ramify.trace.a",
    )
    assert list(find_circles(circle)) == ["import circle: ramify.trace.a <-> ramify.trace.b <-> ramify.trace.c"]
    assert not list(find_circles(imports_of(trace__a="import ramify.trace.b", trace__b="")))


def test_an_import_of_a_public_name_is_one_of_the_module_that_defines_it():
    stubs = {"ramify": "from .trace import Trace as Trace", "ramify.trace": "from .codec import Trace as Trace"}
    public_names = dict(pair for package, text in stubs.items() for pair in find_public_names(package, ast.parse(text)))
    for name in ("ramify", "ramify.trace"):
        imports = imports_of(
            public_names, trace="", trace__codec="import ramify.trace.graph", trace__graph=f"from {name} import Trace"
        )
        assert list(find_circles(imports)) == ["import circle: ramify.trace.codec <-> ramify.trace.graph"]
    (problem,) = find_layer_problems(
        imports_of(public_names, errors__base="from ramify import Trace", trace="", trace__codec=""), read_layers(TABLE)
    )
    assert "errors may not import trace (ramify.trace.codec)" in problem


def test_torch_outside_the_packages_that_run_models_is_found():
    lazily = ast.parse("def f():\n    from torch.nn import Module")
    (problem,) = find_heavy_imports({"ramify.store.index": lazily, "ramify.model.load": lazily})
    assert problem.startswith("ramify.store.index:2: only infer, model, train may import torch.nn")


def test_a_public_class_name_that_is_used_twice_is_found():
    trees = {"ramify.a": ast.parse("class State: ...\nclass _State: ..."), "ramify.b": ast.parse("class State: ...")}
    assert list(find_repeated_classes(trees)) == ["class State has 2 definitions: ramify.a:1, ramify.b:1"]
    assert not list(find_repeated_classes({"ramify.a": trees["ramify.a"]}))
