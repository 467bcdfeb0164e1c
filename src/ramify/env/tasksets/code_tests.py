"""Tests of programs that a model writes: what rows of datasets contain, and how they are run in a runtime.

Two shapes of tests are known. Assertions are Python code that runs after the program; the result is a nonce that is
printed at the very end, so a program that exits early passes nothing. Pairs are an input and the expected output; the
expected output never enters the runtime.
"""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, cast

import ramify as rf
from ramify.core.errors import ConfigInvalid

CODE_BLOCK = re.compile(r"```[\w+-]*\n(.*?)```", re.DOTALL)
SOLUTION_FILE, TESTS_FILE = "solution.py", "run_tests.py"
# Reads the nonce before the program runs, and prints it after all assertions have passed.
TESTS_PROGRAM = """import json, sys
nonce, assertions = json.load(sys.stdin)
scope = {{"__name__": "solution"}}
exec(compile(open({solution!r}).read(), {solution!r}, "exec"), scope)
exec(compile(assertions, "tests", "exec"), scope)
sys.__stdout__.write("\\n" + nonce + "\\n")
sys.__stdout__.flush()
"""


@dataclass(frozen=True, slots=True)
class CodeTests:
    """The tests of a row: assertions, or pairs of input and expected output."""

    assertions: str = ""
    pairs: tuple[tuple[str, str], ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return the tests as plain data, for a task."""
        return {"assertions": self.assertions} if self.assertions else {"pairs": [list(pair) for pair in self.pairs]}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "CodeTests":
        """Return the tests that `to_plain` converted."""
        return cls(plain.get("assertions", ""), tuple((given, expected) for given, expected in plain.get("pairs", ())))


def parse_tests(row: dict[str, Any], column: str, row_number: int) -> CodeTests:
    """Return the tests of a row.

    The column holds Python code, a list of assertions, a list of objects with `input` and `output`, an object with
    `inputs` and `outputs`, or one of these as JSON. A function `check` in the code is called with the row's
    `entry_point`, as in HumanEval.
    """
    tests = row.get(column)
    if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
        tests = json.loads(tests)
    if isinstance(tests, list) and all(isinstance(item, str) for item in cast(list[Any], tests)):
        tests = "\n".join([str(row.get("test_setup_code") or ""), *cast(list[str], tests)]).strip()
    if isinstance(tests, str) and tests:
        calls_check = "def check(" in tests and row.get("entry_point")
        return CodeTests(f"{tests}\ncheck({row['entry_point']})" if calls_check else tests)
    pairs: list[tuple[str, str]] = []
    if isinstance(tests, dict) and {"inputs", "outputs"} <= set(table := cast(dict[str, list[Any]], tests)):
        pairs = [(str(given), str(expected)) for given, expected in zip(table["inputs"], table["outputs"], strict=True)]
    elif isinstance(tests, list):
        objects = cast(list[Any], tests)
        if all(isinstance(item, dict) and {"input", "output"} <= set(cast(dict[str, Any], item)) for item in objects):
            pairs = [(str(item["input"]), str(item["output"])) for item in objects]
    if not pairs:
        raise ConfigInvalid(
            f"dataset: the tests of row {row_number} are {row.get(column)!r:.80}; expected assertions, or inputs with "
            "outputs"
        )
    return CodeTests(pairs=tuple(pairs))


def extract_code(reply: str) -> str:
    """Return the last code block of a reply, or all of it if it has none."""
    blocks = CODE_BLOCK.findall(reply)
    return blocks[-1] if blocks else reply


async def count_passed(runtime: rf.Runtime, code: str, tests: CodeTests, *, python: str, timeout: float) -> int:
    """Run the tests on a program and return how many passed; assertions count as one test. `timeout` is for each."""
    await runtime.write(SOLUTION_FILE, code)
    if tests.assertions:
        nonce = secrets.token_hex(16)
        await runtime.write(TESTS_FILE, TESTS_PROGRAM.format(solution=SOLUTION_FILE))
        given = json.dumps([nonce, tests.assertions]).encode()
        result = await runtime.run([python, TESTS_FILE], stdin=given, timeout=timeout)
        return int(result.text.rstrip().endswith(nonce) and not result.returncode)
    passed = 0
    for given, expected in tests.pairs:
        result = await runtime.run([python, SOLUTION_FILE], stdin=given.encode(), timeout=timeout)
        passed += not result.returncode and _normalize(result.text) == _normalize(expected)
    return passed


def _normalize(output: str) -> list[str]:
    """Return the lines of an output without trailing spaces and without empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().splitlines()]
