"""One finished run for all who only look at it."""

import pytest

from tests.rl.running import ask, write


@pytest.fixture(scope="package")
def finished(tmp_path_factory):
    """A run of a few steps that sampled and trained in turns."""
    home = write(tmp_path_factory.mktemp("finished"), steps=3, off_policy=0)
    done = ask("rl", "@", "rl.toml", cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    return home
