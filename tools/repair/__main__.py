"""Write the test cases and the bugs of the `repair` tasks: `python -m tools.repair`.

The result depends only on the modules, the arguments and the operators. A bug is kept if at least `MIN_FAILURES` cases
fail; so a change that makes no difference, or one that the tests cannot see, is left out. Endless loops are found by
counting lines instead of seconds, so that every machine keeps the same bugs.
"""

import json
import random
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from ramify.env.tasksets.repair import case_caller, load_sources
from tools.repair.arguments import ARGUMENTS
from tools.repair.mutations import find_edits

PACKAGE = Path(case_caller.__file__).parent
CASES_FILE, BUGS_FILE = PACKAGE / "cases.json", PACKAGE / "bugs.json"
CASES_PER_FUNCTION = 20
MIN_FAILURES = 3
FAILURES_FOR_TWO_EXAMPLES = 5
MAX_BUGS_PER_FUNCTION = 8
MAX_LINES = 50_000  # that a call may run
MAX_EXAMPLE_CHARS = 160

Case = dict[str, Any]


class TooManyLines(BaseException):
    """A call ran more than `MAX_LINES` lines."""


def main() -> None:
    """Write both files."""
    cases = {name: build_cases(name) for name in ARGUMENTS}
    bugs = [bug for name in ARGUMENTS for bug in find_bugs(name, cases[name])]
    CASES_FILE.write_text(format_cases(cases))
    BUGS_FILE.write_text(format_bugs(bugs))
    print(f"{len(cases)} modules, {sum(map(len, cases.values()))} cases, {len(bugs)} bugs")


def format_cases(cases: dict[str, list[Case]]) -> str:
    """Return the file of the test cases: one line for each case."""
    modules = (
        f'"{name}": [\n' + ",\n".join(map(json.dumps, module_cases)) + "\n]" for name, module_cases in cases.items()
    )
    return "{\n" + ",\n".join(modules) + "\n}\n"


def format_bugs(bugs: list[dict[str, Any]]) -> str:
    """Return the file of the bugs: one line for each bug."""
    return "[\n" + ",\n".join(map(json.dumps, bugs)) + "\n]\n"


def build_cases(name: str) -> list[Case]:
    """Return the test cases of a module, with the results of the correct module."""
    module = load_source(name, load_sources()[name])
    cases: list[Case] = []
    for function, (important, generate) in ARGUMENTS[name].items():
        rng = random.Random(f"{name} {function}")
        calls = list(important)
        for _ in range(10 * CASES_PER_FUNCTION):
            arguments = generate(rng)
            if len(calls) < CASES_PER_FUNCTION and arguments not in calls:
                calls.append(arguments)
        for number, arguments in enumerate(calls, 1):
            case = {"id": f"{function}-{number}", "function": function, "args": arguments}
            result = call_with_limit(module, case)
            if result.get("raises", "ValueError") != "ValueError":
                raise AssertionError(f"{name}: {case} raises {result['raises']}")
            cases.append({**case, "expected": result})
    return cases


def find_bugs(name: str, cases: list[Case]) -> list[dict[str, Any]]:
    """Return the bugs of a module that the cases detect, at most `MAX_BUGS_PER_FUNCTION` for each line's function."""
    source = load_sources()[name]
    bugs_of_function: dict[str, list[dict[str, Any]]] = {}
    for edit in find_edits(source):
        results = run_cases(name, edit.apply(source), cases)
        failed = [case for case in cases if results[case["id"]] != case["expected"]]
        if len(failed) < MIN_FAILURES or any("endless" in result for result in results.values()):
            continue
        readable = [
            case for case in failed if len(json.dumps([case, results[case["id"]]])) <= MAX_EXAMPLE_CHARS
        ] or failed
        num_examples = 2 if len(failed) >= FAILURES_FOR_TWO_EXAMPLES else 1
        examples = [{"id": case["id"], "actual": results[case["id"]]} for case in readable[:num_examples]]
        line = source.count("\n", 0, edit.start) + 1
        bug = {"module": name, "operator": edit.operator, "line": line, "start": edit.start, "stop": edit.stop}
        bugs_of_function.setdefault(find_function(source, line), []).append(
            {**bug, "text": edit.text, "num_failures": len(failed), "examples": examples}
        )
    return [bug for bugs in bugs_of_function.values() for bug in choose_bugs(bugs)]


def choose_bugs(bugs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most `MAX_BUGS_PER_FUNCTION` bugs: those that the fewest cases detect, in the order of the text."""
    hardest = sorted(bugs, key=lambda bug: (bug["num_failures"], bug["start"], bug["text"]))[:MAX_BUGS_PER_FUNCTION]
    return [bug for bug in bugs if bug in hardest]


def find_function(source: str, line: int) -> str:
    """Return the head of the function that a line belongs to."""
    return next(text for text in reversed(source.splitlines()[:line]) if text.startswith("def "))


def run_cases(name: str, source: str, cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Return the results of the cases by id."""
    module = load_source(name, source)
    results: dict[str, dict[str, Any]] = {}
    for case in cases:
        results[case["id"]] = call_with_limit(module, json.loads(json.dumps(case)))
        if "endless" in results[case["id"]]:
            return {case["id"]: {"endless": True} for case in cases}
    return results


def call_with_limit(module: ModuleType, case: Case) -> dict[str, Any]:
    """Return the result of a call; {"endless": True} if it runs too many lines."""
    num_lines = 0

    def count_line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        num_lines += 1
        if num_lines > MAX_LINES:
            raise TooManyLines
        return count_line

    sys.settrace(count_line)
    try:
        result = case_caller.call_case(module, case)
    finally:
        sys.settrace(None)
    return {"endless": True} if num_lines > MAX_LINES else result


def load_source(name: str, source: str) -> ModuleType:
    """Return a module of the given text."""
    module = ModuleType(name)
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    return module


if __name__ == "__main__":
    main()
