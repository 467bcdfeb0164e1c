"""Scripts of `benchmarks` as modules."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load_benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a script by its name, as the scripts import each other."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module
