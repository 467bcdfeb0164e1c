"""The garbage collector pauses for imports only."""

import gc

import pytest

from ramify.cli.heavy_imports import pause_garbage_collection


def test_collector_continues_also_after_a_failed_import():
    with pytest.raises(ImportError), pause_garbage_collection():
        assert not gc.isenabled()
        raise ImportError("no module")
    assert gc.isenabled()
