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
from ramify.cli import findings
from ramify.cli.app import COMMANDS
from ramify.cli.findings import Finding
from ramify.cli.paper import Paper
from ramify.cli.parser import CommandParser

PROBES = [findings.system, findings.torch, findings.extras, findings.bubblewrap, findings.docker, findings.node]
STYLES = {"ok": "green", "missing": "yellow", "broken": "red"}


def run(args: Sequence[str]) -> int:
    """Look at everything and print the report."""
    parser = CommandParser(prog="ramify doctor", description=COMMANDS["doctor"].help)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    asked = parser.parse_args(args)
    found = examine()
    if asked.json:
        print(json.dumps({"version": __version__, "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        show(found, Paper(highlight=False))
    return 0


def examine() -> list[Finding]:
    """All findings; the probes wait for other programs, so they wait together."""
    with ThreadPoolExecutor(len(PROBES)) as pool:
        return [finding for part in pool.map(lambda probe: probe(), PROBES) for finding in part]


def show(found: Sequence[Finding], console: Console) -> None:
    """The report for people. Findings are plain text: brackets in them are no markup."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        table.add_row(Text(finding.state, STYLES[finding.state]), Text(finding.name, "bold"), Text(finding.found))
        if finding.state != "ok":
            table.add_row("", "", Text(f"enables: {finding.enables}"))
            table.add_row("", "", Text(f"get it:  {finding.get}"))
    console.print(Text(f"ramify {__version__}", "bold"))
    console.print(table)
