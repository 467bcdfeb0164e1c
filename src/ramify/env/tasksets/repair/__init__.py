"""repair: find and fix the bug in a small module.

The agent's sandbox holds only the module with its bug. The tests are data: calls with their expected results. They are
run in a fresh sandbox, which gets the agent's file and the calls. The expected results stay in the worker, which
compares them, so nothing that the file does there can make a wrong result right. A result counts only if the program
reports it with the id of its case and the nonce of this run. Results are compared as JSON text: no method of the
agent's objects is called, and 1, 1.0 and true differ.

`python -m tools.repair` made the bugs, one edit of one of the modules each.
"""

import json
import random
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field

import ramify as rf
from ramify.core.errors import AgentFailed, ConfigInvalid, EnvironmentFault
from ramify.env.tasksets.splits import assign_split

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


PACKAGE = Path(__file__).parent
TESTS_KEY = "tests"  # in the `info` of a trace: the outcome of the tests


class RepairConfig(rf.TasksetConfig):
    """The choice of bugs. The splits have different modules."""

    num_tasks: int | None = Field(default=None, ge=1)
    """Number of bugs. Default: all of the split."""
    seed: int = 0
    """Determines the order of the bugs."""
    requires: tuple[Literal["isolation", "private_network"], ...] = ()
    """What the runtime must enforce. Without isolation, an agent could read the tests in the installed package."""
    timeout: float = Field(default=20.0, gt=0)
    """Seconds that all tests of a module may take together."""


class RepairTask(rf.Task):
    """A module with a bug: `source` is the text of `module`, `operator` the kind of edit that made the bug."""

    module: str
    source: str
    operator: str

    @property
    def file(self) -> str:
        """The name of the file that the agent repairs."""
        return f"{self.module}.py"


class Repair(rf.Taskset):
    """Fix the bug in a small module."""

    config: RepairConfig
    task_type = RepairTask

    def load(self) -> Iterator[RepairTask]:
        """Yield one task per bug of the split, in an order set by the seed."""
        config = self.config
        bugs = [bug for bug in load_bugs() if assign_split(bug["module"]) == config.split]
        random.Random(f"repair {config.split} {config.seed}").shuffle(bugs)
        if config.num_tasks is not None and config.num_tasks > len(bugs):
            raise ConfigInvalid(f"repair: num_tasks is {config.num_tasks}, but {config.split} has {len(bugs)} bugs")
        for bug in bugs[: config.num_tasks]:
            yield build_task(bug, config.requires)

    async def setup(self, task: RepairTask, runtime: rf.Runtime) -> None:
        """Write the module with its bug."""
        await runtime.write(task.file, task.source)

    @rf.reward
    async def repaired(self, task: RepairTask, trace: rf.Trace, runtime: rf.Runtime) -> float:
        """1 if every test reports the expected result, else 0."""
        failed, num_tests = await self._run_tests(task, runtime)
        trace.info[TESTS_KEY] = {"failed": failed, "count": num_tests}
        return float(not failed)

    @rf.metric
    def passed_tests(self, trace: rf.Trace) -> float:
        """The share of tests that reported the expected result."""
        tests = trace.info[TESTS_KEY]
        return 1 - len(tests["failed"]) / tests["count"]

    async def validate(self, task: RepairTask, runtime: rf.Runtime) -> str | None:
        """Check that the tests detect the bug."""
        failed, _ = await self._run_tests(task, runtime)
        return None if failed else "the tests pass without a change"

    async def gold(self, task: RepairTask, runtime: rf.Runtime) -> str:
        """Write the correct file and return the reply of the agent."""
        await runtime.write(task.file, load_sources()[task.module])
        return "Fixed."

    async def _run_tests(self, task: RepairTask, runtime: rf.Runtime) -> tuple[dict[str, str], int]:
        """Return the failed tests with the reasons, and the number of all tests."""
        cases = load_cases()[task.module]
        results = await collect_results(runtime, task.file, cases, self.config.timeout)
        return find_failed_cases(cases, results), len(cases)


def build_task(bug: dict[str, Any], requires: tuple[Literal["isolation", "private_network"], ...]) -> RepairTask:
    """Return the task of a bug."""
    source = load_sources()[bug["module"]]
    cases = {case["id"]: case for case in load_cases()[bug["module"]]}
    examples = [_describe_example(cases[example["id"]], example["actual"]) for example in bug["examples"]]
    file = f"{bug['module']}.py"
    lines = [
        f"{file} in the work directory has a bug: one of its functions does not do what its docstring says.",
        *examples,
        f"Find the bug and fix it in {file}, and change nothing else. Tests that you do not see call all functions.",
    ]
    return RepairTask(
        prompt="\n".join(lines),
        module=bug["module"],
        source=source[: bug["start"]] + bug["text"] + source[bug["stop"] :],
        operator=bug["operator"],
        outputs=(file,),
        requires=requires,
    )


@cache
def load_bugs() -> tuple[dict[str, Any], ...]:
    """Return all bugs."""
    return tuple(json.loads((PACKAGE / "bugs.json").read_text("utf-8")))


@cache
def load_cases() -> dict[str, list[dict[str, Any]]]:
    """Return the tests of each module: id, function, arguments and expected result."""
    return json.loads((PACKAGE / "cases.json").read_text("utf-8"))


@cache
def load_sources() -> dict[str, str]:
    """Return the correct text of each module. In the file, a line with its name comes before the text of a module."""
    text = (PACKAGE / "modules.txt").read_text("utf-8")
    return dict(re.findall(r"^=== (\w+) ===\n(.*?)(?=^=== |\Z)", text, flags=re.MULTILINE | re.DOTALL))


def _describe_example(case: dict[str, Any], actual: dict[str, Any]) -> str:
    call = f"{case['function']}({', '.join(map(repr, case['args']))})"
    return f"- {call} should {_describe_result(case['expected'], '')}; it {_describe_result(actual, 's')}."


def _describe_result(result: dict[str, Any], ending: str) -> str:
    return f"raise{ending} {result['raises']}" if "raises" in result else f"return{ending} {result['value']!r}"
