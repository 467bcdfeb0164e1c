"""`examples/minimal_rl.py` learns, fits on a few screens, and uses only the documented API."""

import ast
import runpy
from pathlib import Path

import pytest

import ramify

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "minimal_rl.py"


@pytest.mark.run
def test_the_script_learns_to_reverse_text():
    import torch  # here, so that collecting the tests does not import it

    torch.set_num_threads(1)  # tests run in parallel, and small matrices gain nothing from a second thread
    score_before, score_after = runpy.run_path(str(SCRIPT))["main"]()
    assert score_before < 0.6
    assert score_after >= 0.9


def test_the_script_is_short_and_imports_only_torch_and_documented_names():
    source, page = SCRIPT.read_text("utf-8"), (ROOT / "docs" / "api.md").read_text("utf-8")
    assert len(source.splitlines()) <= 250
    tree = ast.parse(source)
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert imported == ["torch", "ramify"]
    from_modules = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in from_modules if f"`{node.module}`" not in page] == []
    assert [alias.name for node in from_modules for alias in node.names if f"`{alias.name}`" not in page] == []
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    of_ramify = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "rf"}
    assert of_ramify <= set(ramify.__all__)
