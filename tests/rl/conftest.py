"""A finished run, shared by the tests that only read it."""

import pytest

from tests.rl.run_helpers import run_command, write_config


@pytest.fixture(scope="package")
def finished(tmp_path_factory):
    """Return the home of a run of three steps that alternated sampling and training."""
    home = write_config(tmp_path_factory.mktemp("finished"), steps=3, off_policy=0)
    result = run_command("rl", "@", "rl.toml", cwd=home)
    assert result.returncode == 0, result.stdout + result.stderr
    return home
