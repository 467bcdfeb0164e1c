"""`ramify doctor`: check what this machine can run, and how to install what is missing.

A missing component is not a failure, because all of them are optional. So the exit code is 0, and the report says what
each component is needed for.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ramify import __version__
from ramify.cli import doctor_checks
from ramify.cli.doctor_checks import CheckResult
from ramify.cli.parser import CommandParser
from ramify.core.console import PipeConsole

CHECKS: list[Callable[[], list[CheckResult]]] = [
    doctor_checks.check_system,
    doctor_checks.check_torch,
    doctor_checks.check_extras,
    doctor_checks.check_node,
    doctor_checks.check_sandbox,
]
STYLES = {"ok": "green", "missing": "yellow", "broken": "red"}


def run(argv: Sequence[str]) -> int:
    """Run all checks and print the report."""
    parser = CommandParser("doctor")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(argv)
    results = run_checks()
    if options.json:
        print(json.dumps({"version": __version__, "findings": [result.to_json() for result in results]}, indent=2))
    else:
        print_report(results, PipeConsole())
    return 0


def run_checks() -> list[CheckResult]:
    """Run all checks concurrently, because they wait for other programs, and return their results in order."""
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        futures = [pool.submit(check) for check in CHECKS]
        return [result for future in futures for result in future.result()]


def print_report(results: Sequence[CheckResult], console: Console) -> None:
    """Print the results as a table."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for result in results:
        table.add_row(Text(result.state, STYLES[result.state]), Text(result.name, "bold"), Text(result.detail))
        if result.state != "ok":
            table.add_row("", "", Text(f"needed for: {result.needed_for}"))
            table.add_row("", "", Text(f"install:    {result.fix}"))
    console.print(Text(f"ramify {__version__}", "bold"))
    console.print(table)
