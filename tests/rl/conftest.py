"""More time for tests with runs of several processes, on a machine that is busy with other tests."""

import pytest

from tests.support.runs import FULL

RUN_TIMEOUT = 600  # seconds


def pytest_collection_modifyitems(items):
    for item in items:
        if not FULL and "tests/rl" in str(item.path) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(RUN_TIMEOUT))
