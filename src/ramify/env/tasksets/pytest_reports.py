"""Runs tests with pytest in a fresh sandbox and reads which tests reported which outcome.

`pytest_plugin` is loaded into the pytest of the sandbox, and writes its reports to a file with a random name. Only they
count, each with the id of a test and the nonce of this run; the exit status and all that tests print count for nothing.
But tests and the code that they import share a process, and code that searches this process can find the nonce.
`repair` shows how to do without such a process.
"""

import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, cast

import ramify as rf
from ramify.core.errors import AgentFailed

PLUGIN = Path(__file__).with_name("pytest_plugin.py")
PLUGIN_MODULE = "ramify_test_reports"  # the name of the plugin in the sandbox
REPORTS_VARIABLE = "RAMIFY_TEST_REPORTS"  # tells the plugin to report; it removes the variable
PASSED = "passed"
# `python -m pytest` would import a pytest.py of the work directory
PYTEST_PROGRAM = 'import sys; sys.path.remove(""); import pytest; sys.exit(pytest.main(sys.argv[1:]))'


async def run_pytest(
    runtime: rf.Runtime,
    command: str,
    *,
    plugin_dir: PurePosixPath,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Run a shell command that calls pytest; return the reported outcome of each test by its id.

    The command contains `{plugin}`, which becomes the options that load the plugin from `plugin_dir`. A sandbox that
    the tests end, or a command that takes longer than `timeout` seconds, reports nothing more.
    """
    nonce, reports_file = secrets.token_hex(16), plugin_dir / f"{secrets.token_hex(16)}.jsonl"
    await runtime.write(plugin_dir / f"{PLUGIN_MODULE}.py", PLUGIN.read_text("utf-8"))
    search_path = f'export PYTHONPATH={shlex.quote(str(plugin_dir))}"${{PYTHONPATH:+:$PYTHONPATH}}"'
    try:
        await runtime.run(
            f"{search_path}; {command.replace('{plugin}', f'-p {PLUGIN_MODULE}')}",
            env={**(env or {}), REPORTS_VARIABLE: "1"},
            stdin=f"{nonce}\n{reports_file}\n".encode(),
            timeout=timeout,
        )
        reports = await runtime.read(reports_file)
    except (AgentFailed, OSError, ValueError):  # the sandbox has ended, or there is no such file, or it is too large
        return {}
    return parse_outcomes(reports.decode("utf-8", "replace"), nonce)


def parse_outcomes(reports: str, nonce: str) -> dict[str, str]:
    """Return the outcomes of all lines with the nonce, by test id. A test with two different outcomes has failed."""
    outcomes: dict[str, str] = {}
    for line in reports.splitlines():
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(report, dict):
            continue
        fields = cast(dict[str, Any], report)
        if fields.get("nonce") == nonce:
            id, outcome = str(fields.get("id")), str(fields.get("outcome"))
            outcomes[id] = outcome if outcomes.get(id, outcome) == outcome else "failed"
    return outcomes


def find_not_passed(expected: Sequence[str], outcomes: Mapping[str, str]) -> dict[str, str]:
    """Return the expected tests that did not pass, with the outcome, or "not reported".

    An expected id may name a function, which stands for all its parameters, or be cut off at a space.
    """
    unpassed: dict[str, str] = {}
    for id in expected:
        matching = [outcomes[id]] if id in outcomes else [outcomes[other] for other in outcomes if _is_part(other, id)]
        worst = next((outcome for outcome in matching if outcome != PASSED), PASSED if matching else "not reported")
        if worst != PASSED:
            unpassed[id] = worst
    return unpassed


def _is_part(reported: str, expected: str) -> bool:
    """Return whether a reported id is one of the parameters of an expected function, or its uncut form."""
    is_cut = "[" in expected and not expected.endswith("]")
    return reported.startswith(expected if is_cut else f"{expected}[")
