"""Commands that a test runs in its own process."""

import subprocess
from collections.abc import Callable

import pytest

from ramify.cli import main


@pytest.fixture
def ramify(capsys) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in this process, and return its exit code and output."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        try:
            exit_code = main(list(args))
        except SystemExit as ended:  # raised by argparse
            exit_code = ended.code
        return subprocess.CompletedProcess(args, exit_code, *capsys.readouterr())

    return run
