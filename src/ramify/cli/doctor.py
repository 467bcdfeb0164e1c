"""`ramify doctor`: what this machine can run, what is missing and how to get it.

Nothing it finds is a failure: every optional piece may be missing on purpose, so the exit code is 0 and the report says
what each piece would be good for.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ramify import __version__
from ramify.cli import doctor_checks
from ramify.cli.app import COMMANDS
from ramify.cli.console import PipeConsole
from ramify.cli.doctor_checks import CheckResult
from ramify.cli.parser import CommandParser

CHECKS = [
    doctor_checks.check_system,
    doctor_checks.check_torch,
    doctor_checks.check_extras,
    doctor_checks.check_bubblewrap,
    doctor_checks.check_docker,
    doctor_checks.check_node,
]
STYLES = {"ok": "green", "missing": "yellow", "broken": "red"}


def run(argv: Sequence[str]) -> int:
    """Look at everything and print the report."""
    parser = CommandParser(prog="ramify doctor", description=COMMANDS["doctor"].help)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(argv)
    results = run_checks()
    if options.json:
        print(json.dumps({"version": __version__, "findings": [asdict(finding) for finding in results]}, indent=2))
    else:
        print_report(results, PipeConsole(highlight=False))
    return 0


def run_checks() -> list[CheckResult]:
    """All findings; the probes wait for other programs, so they wait together."""
    with ThreadPoolExecutor(len(CHECKS)) as pool:
        return [finding for part in pool.map(lambda probe: probe(), CHECKS) for finding in part]


def print_report(results: Sequence[CheckResult], console: Console) -> None:
    """The report for people. Findings are plain text: brackets in them are no markup."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in results:
        table.add_row(Text(finding.state, STYLES[finding.state]), Text(finding.name, "bold"), Text(finding.found))
        if finding.state != "ok":
            table.add_row("", "", Text(f"enables: {finding.enables}"))
            table.add_row("", "", Text(f"get it:  {finding.get}"))
    console.print(Text(f"ramify {__version__}", "bold"))
    console.print(table)
