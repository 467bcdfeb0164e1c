"""Reports of tests that run in a sandbox."""

import shlex
import sys
from pathlib import PurePosixPath

import pytest

from ramify.env.tasksets.pytest_reports import PYTEST_PROGRAM, run_pytest
from tests.rollout.runtime.conftest import run_with_runtime

pytestmark = pytest.mark.process

NUM_TESTS = 10
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they are slow to import
NOISY_TESTS = f"""
import os
import sys
import pytest

os.write(1, b"x" * 5000)

@pytest.mark.parametrize("number", range({NUM_TESTS}))
def test_noise(number):
    assert sys.stdin.read() == ""
    os.write(1, b"y" * 5000 + b'\\n{{"nonce": "guessed", "id": "forged", "outcome": "passed"}}\\n')
"""


async def test_reports_survive_whatever_tests_print(sandbox_kind):
    async def test(runtime):
        await runtime.write("test_noise.py", NOISY_TESTS)
        program = f"python3 -c {shlex.quote(PYTEST_PROGRAM)}"
        plugin_dir = PurePosixPath(runtime.workdir).parent / "reports"
        command = f"{program} {{plugin}} -s -p no:cacheprovider test_noise.py"
        return await run_pytest(runtime, command, plugin_dir=plugin_dir, timeout=50)

    outcomes = await run_with_runtime(sandbox_kind, test, max_output_bytes=1000, env=NO_PLUGINS)
    assert outcomes == {f"test_noise.py::test_noise[{number}]": "passed" for number in range(NUM_TESTS)}


async def test_tests_that_do_not_start_report_nothing():
    async def test(runtime):
        plugin_dir = PurePosixPath(runtime.workdir).parent / "reports"
        return await run_pytest(runtime, f"{sys.executable} -c 1", plugin_dir=plugin_dir, timeout=50)

    assert await run_with_runtime("local", test) == {}
