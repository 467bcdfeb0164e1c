"""A finished run, shared by the tests that only read it."""

import pytest

from tests.rl.run_helpers import FULL, run_command, write_config

RUN_TIMEOUT = 600  # seconds for a test with a run of several processes, on a machine that is busy with other tests


def pytest_collection_modifyitems(items):
    """Give the tests with runs more time than others; with full counts, all have more."""
    for item in items:
        if not FULL and "tests/rl" in str(item.path) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(RUN_TIMEOUT))


@pytest.fixture(scope="package")
def finished(tmp_path_factory):
    """Return the home of a run of three steps that alternated sampling and training."""
    home = write_config(tmp_path_factory.mktemp("finished"), steps=3, off_policy=0)
    result = run_command("rl", "@", "rl.toml", cwd=home)
    assert result.returncode == 0, result.stdout + result.stderr
    return home
