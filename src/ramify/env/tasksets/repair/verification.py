"""Runs test cases in a fresh sandbox, and compares the results in this process.

A result counts only if the program in the sandbox reports it with the id of its case and the nonce of this run. The
exit status counts for nothing. Results are compared as JSON text: no method of the agent's objects is called, and 1,
1.0 and true differ.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import ramify as rf
from ramify.core.errors import AgentFailed, EnvironmentFault

RUNNER = Path(__file__).with_name("case_runner.py")
CALLER = Path(__file__).with_name("case_caller.py")
CASE_FIELDS = ("id", "function", "args")  # what the sandbox learns of a case
START_TIMEOUT = 30.0  # seconds that the programs may take in addition to the cases
NO_PROGRAM_EXIT_CODES = (126, 127)  # the runtime could not run it

Case = Mapping[str, Any]


async def collect_results(
    runtime: rf.Runtime, file: str, cases: Sequence[Case], timeout: float
) -> dict[str, list[dict[str, Any]]]:
    """Run all cases on the agent's file and return what was reported for each id.

    Raises EnvironmentFault if there is no Python in the sandbox. A sandbox that the agent's file ends reports nothing
    more.
    """
    nonce = secrets.token_hex(16)
    request = {
        "nonce": nonce,
        "program": CALLER.read_text("utf-8"),
        "timeout": timeout,
        "file": file,
        "cases": [{field: case[field] for field in CASE_FIELDS} for case in cases],
    }
    command = ["python3", "-I", "-c", RUNNER.read_text("utf-8")]
    try:
        result = await runtime.run(command, stdin=json.dumps(request).encode() + b"\n", timeout=timeout + START_TIMEOUT)
    except AgentFailed:
        return {}
    if result.returncode in NO_PROGRAM_EXIT_CODES and not result.stdout:
        raise EnvironmentFault(f"the tests cannot run: {result.stderr.decode('utf-8', 'replace')}")
    return parse_reports(result.text, nonce)


def parse_reports(output: str, nonce: str) -> dict[str, list[dict[str, Any]]]:
    """Return the results of all lines with the nonce, by the id of their case."""
    results: dict[str, list[dict[str, Any]]] = {}
    for line in output.splitlines():
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(report, dict):
            continue
        fields = cast(dict[str, Any], report)
        if fields.get("nonce") == nonce and isinstance(fields.get("id"), str):
            results.setdefault(fields["id"], []).append(fields.get("result", {}))
    return results


def find_failed_cases(cases: Sequence[Case], results: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Return the ids of the cases that did not report exactly the expected result, with the reason."""
    failed: dict[str, str] = {}
    for case in cases:
        reported = results.get(case["id"], ())
        if len(reported) != 1:
            failed[case["id"]] = "not reported" if not reported else "reported more than once"
        elif _to_text(reported[0]) != _to_text(case["expected"]):
            failed[case["id"]] = "wrong result"
    return failed


def _to_text(result: Any) -> str:
    return json.dumps(result, sort_keys=True)
