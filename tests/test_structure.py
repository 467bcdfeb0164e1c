"""The rules of the package's structure, each broken on purpose. `make lint` checks that the source keeps them."""

import ast
from types import MappingProxyType

import pytest

from tools.structure import (
    build_graph,
    count_floors,
    find_circles,
    find_eager_kernel_imports,
    find_heavy_imports,
    find_imports,
    find_missing_parts,
    find_package,
    find_part,
    find_public_names,
    find_repeated_classes,
    find_upward_imports,
    read_order,
)

TABLE = """
## Who may import whom

| room | its parts | holds |
|---|---|---|
| `core` | `errors`, own modules, `config` | names |
| `trace` | | data |
| `cli` | | commands |

## Next

| `monitor` | | not part of it |
"""
ORDER = ["core.errors", "core", "core.config", "trace", "cli"]


def imports_of(public_names=MappingProxyType({}), **sources):
    """The imports of modules given as `trace__codec="import ..."`, and the part of each module."""
    trees = {f"ramify.{name.replace('__', '.')}": ast.parse(text) for name, text in sources.items()}
    imports = [item for name, tree in trees.items() for item in find_imports(name, tree, trees, public_names)]
    return imports, {name: find_part(name, trees) for name in trees}


def test_the_order_is_read_from_the_page():
    assert read_order(TABLE) == ORDER


def test_the_part_of_a_module_is_the_package_in_its_room_or_the_room():
    modules = ["ramify", "ramify.__main__", "ramify.cli", "ramify.core.errors", "ramify.core.errors.base"]
    assert [find_part(name, modules) for name in modules] == ["", "", "cli", "core.errors", "core.errors"]
    assert find_part("ramify.core.files", modules) == "core"


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
    (problem,) = find_upward_imports(*imports_of(trace__codec=source, cli__main=""), ORDER)
    assert "trace may not import cli" in problem
    assert not list(find_upward_imports(*imports_of(cli__main="import ramify.trace.codec", trace__codec=""), ORDER))


def test_an_import_upward_between_the_parts_of_a_room_is_found():
    imports = imports_of(core__files="import ramify.core.config.base", core__config__base="")
    (problem,) = find_upward_imports(*imports, ORDER)
    assert "core may not import core.config" in problem


def test_a_part_that_the_table_lacks_is_named():
    _, parts = imports_of(video__codec="", video__gif__header="", core__errors__base="")
    assert [problem.split()[0] for problem in find_missing_parts(parts.values(), ORDER)] == ["video", "video.gif"]


def test_floors_are_the_longest_chain_of_imports():
    imports, parts = imports_of(
        cli__main="import ramify.view.page\nimport ramify.core.files",
        view__page="import ramify.core.files",
        core__files="",
    )
    assert count_floors(build_graph(imports, parts)) == 3


def test_rooms_that_import_each_other_through_different_modules_are_found():
    imports, parts = imports_of(a__one="import ramify.b.one", b__one="", b__two="import ramify.a.two", a__two="")
    assert not list(find_circles(imports))
    assert list(find_circles(imports, parts)) == ["import circle: a <-> b"]


def test_a_circle_of_three_modules_is_found():
    circle, _ = imports_of(
        trace__a="import ramify.trace.b",
        trace__b="def f():\n    import ramify.trace.c",
        trace__c="import ramify.trace.a",
    )
    assert list(find_circles(circle)) == ["import circle: ramify.trace.a <-> ramify.trace.b <-> ramify.trace.c"]
    assert not list(find_circles(imports_of(trace__a="import ramify.trace.b", trace__b="")[0]))


def test_an_import_of_a_public_name_is_one_of_the_module_that_defines_it():
    stubs = {"ramify": "from .trace import Trace as Trace", "ramify.trace": "from .codec import Trace as Trace"}
    public_names = dict(pair for package, text in stubs.items() for pair in find_public_names(package, ast.parse(text)))
    for name in ("ramify", "ramify.trace"):
        imports, _ = imports_of(
            public_names, trace="", trace__codec="import ramify.trace.graph", trace__graph=f"from {name} import Trace"
        )
        assert list(find_circles(imports)) == ["import circle: ramify.trace.codec <-> ramify.trace.graph"]
    imports = imports_of(public_names, core__errors__base="from ramify import Trace", trace="", trace__codec="")
    (problem,) = find_upward_imports(*imports, ORDER)
    assert "core.errors may not import trace (ramify.trace.codec)" in problem


def test_torch_outside_the_packages_that_run_models_is_found():
    lazily = ast.parse("def f():\n    from torch.nn import Module")
    modules = {"ramify.run.store.index": lazily, "ramify.model.load": lazily, "ramify.model.render.base": lazily}
    first, second = find_heavy_imports(modules, {name: find_part(name, modules) for name in modules})
    assert first.startswith("ramify.run.store.index:2: only infer, model,") and first.endswith("may import torch.nn")
    assert second.startswith("ramify.model.render.base:2:")


def test_kernels_that_load_with_a_module_of_every_machine_are_found():
    sources = {
        "model__kernels": "import triton",
        "model__other_kernels": "import triton\nfrom ramify.model.kernels import f",
        "model__attention": "from ramify.model.kernels import f",
        "model__decoder": "def f():\n    from ramify.model.kernels import f",
    }
    trees = {f"ramify.{name.replace('__', '.')}": ast.parse(text) for name, text in sources.items()}
    (problem,) = find_eager_kernel_imports(trees, imports_of(**sources)[0])
    assert problem == "ramify.model.attention:1: ramify.model.kernels needs Triton; import it where it is used"


def test_a_public_class_name_that_is_used_twice_is_found():
    trees = {"ramify.a": ast.parse("class State: ...\nclass _State: ..."), "ramify.b": ast.parse("class State: ...")}
    assert list(find_repeated_classes(trees)) == ["class State has 2 definitions: ramify.a:1, ramify.b:1"]
    assert not list(find_repeated_classes({"ramify.a": trees["ramify.a"]}))


def test_a_package_and_one_below_it_that_import_each_other_are_found():
    imports, _ = imports_of(a__b__one="import ramify.a.b.c.one", a__b__c__one="import ramify.a.b.two", a__b__two="")
    modules = ["ramify.a.b.one", "ramify.a.b.two", "ramify.a.b.c.one"]
    packages = {name: find_package(name, modules) for name in modules}
    assert list(find_circles(imports, packages)) == ["import circle: a.b <-> a.b.c"]
