"""Control characters in texts of agents are printed as text, by every way to the terminal."""

import asyncio
import io
import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ramify.core.console import PipeConsole
from ramify.core.display import LiveDisplay, LogDisplay
from ramify.core.terminal import EscapingStream, escape_controls, print_exception
from ramify.rollout.envserver.log import EnvServerLog
from ramify.run.store import Ledger, RolloutRecord, RunStore
from ramify.run.store.ledger import GroupRecord
from ramify.run.store.run_log import RunLog
from tests.support.traces import make_rollout

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eabc\x7f \x1b[31mred"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\u009b31m\u202eabc\u007f \x1b[31mred"
FORBIDDEN = ("\x1b]", "\x1b[2J", "\x1b[31m", "\x07", "\x9b", "\x7f", "\u202e")

RUNS_COMMANDS = """
import json, sys
from ramify.cli import main
for command in json.loads(sys.argv[1]):
    print("exit code", main(command))
"""


def assert_escaped(output: str) -> None:
    for sequence in FORBIDDEN:
        assert sequence not in output, repr(output)


def run_in_terminal(*command: str) -> str:
    """Run a command whose stdout and stderr are a terminal, and return what the terminal gets."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # the process has closed the terminal
                return
            output.append(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    process.wait(60)
    reader.join(60)
    os.close(ours)
    return b"".join(output).decode()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A training run with hostile text in a message, a record, a failure, a source and a drop reason."""

    async def fill(store: RunStore) -> None:
        ledger = Ledger.open(store)
        await ledger.declare_source("reverse", 100)
        await ledger.issue_groups([GroupRecord(0, "reverse", 0, 1)])
        record, traces = make_rollout(0, text=HOSTILE)
        traces[0].metrics = {HOSTILE: 1.0}
        hostile = RolloutRecord("r0", HOSTILE, 0, HOSTILE, 0.5, None, {**record.summary, "stop": HOSTILE})
        await ledger.record_sampled(0, 0, hostile, traces)
        log = RunLog(store)
        log.log_event("failure", where=HOSTILE, name="AgentFailed", message=HOSTILE)
        log.log_event("started", detail=HOSTILE)
        await asyncio.wrap_future(log.log_metrics(0, {HOSTILE: 1.0}))

    path = tmp_path_factory.mktemp("run")
    with RunStore.open(path) as store:
        asyncio.run(fill(store))
    (path / "config.toml").write_text("[[train]]\n")
    return path


@pytest.mark.process
def test_commands_show_escape_sequences_as_text(run):
    rollouts = ["show", str(run)]
    commands = [rollouts, [*rollouts, "r0", "--full"], ["why", str(run)], ["metrics", str(run)], ["show", HOSTILE]]
    output = run_in_terminal(sys.executable, "-c", RUNS_COMMANDS, json.dumps([*commands, [HOSTILE]]))
    assert_escaped(output)
    outputs = output.replace("\r\n", "").split("exit code ")
    assert len(outputs) == 7, output
    for text in outputs[:-1]:
        assert "x1b]0;owned" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HOSTILE, SHOWN),
        ("a\tb\n\u05d0\u200f é 中 👩\u200d🚀", "a\tb\n\u05d0\u200f é 中 👩\u200d🚀"),
        ("all right\rall wrong", r"all right\x0dall wrong"),
        ("line\r\nline\r\n", "line\r\nline\r\n"),
        ("\r 50%", "\r 50%"),
        ("50%\r", "50%\r"),
        ("\ud800", r"\ud800"),
        ("\u2028\x00\x08", r"\u2028\x00\x08"),
    ],
)
def test_control_characters_are_escaped(text, expected):
    assert escape_controls(text) == expected
    assert escape_controls(expected) == expected


def test_stream_escapes_and_rich_writes_below_it():
    file = io.StringIO()
    stream = EscapingStream(EscapingStream(file))
    assert stream.write(HOSTILE) == len(HOSTILE)
    print(HOSTILE, file=stream)
    assert file.getvalue() == f"{SHOWN}{SHOWN}\n"
    console = Console(file=stream, force_terminal=True)
    console.print(Text("green", style="green"))
    assert "\x1b[32mgreen" in file.getvalue()


def test_console_escapes_texts_and_keeps_its_own_colors():
    console = PipeConsole(file=io.StringIO(), force_terminal=True, width=300, color_system="standard")
    table = Table("column")
    table.add_row(HOSTILE)
    table.add_row("[link=http://example.org]x[/link]")
    console.print(table, Text(HOSTILE, style="green"), HOSTILE)
    output = console.file.getvalue()
    assert_escaped(output)
    assert "\x1b[32m" in output
    assert "[link=http://example.org]x[/link]" in output


def test_displays_escape_their_lines(capsys, tmp_path):
    LogDisplay(None).print_line(HOSTILE)
    assert capsys.readouterr().out == f"{SHOWN}\n"
    console = PipeConsole(file=io.StringIO(), force_terminal=True, width=200)
    with LiveDisplay(None, console) as display:
        display.print_line(HOSTILE)
        print(HOSTILE)  # a library that prints while the page is drawn
    output = console.file.getvalue()
    for sequence in ("\x1b]", "\x1b[31m", "\x9b", "\u202e"):
        assert sequence not in output
    assert output.count("x1b]0;owned") == 2
    log = EnvServerLog(tmp_path / "log")
    log.write("worker", HOSTILE)
    log.close()
    assert (tmp_path / "log").read_text().endswith(f"worker {SHOWN}\n")


def test_tracebacks_are_escaped(capsys):
    print_exception(ValueError, ValueError(HOSTILE), None)
    assert capsys.readouterr().err == f"ValueError: {SHOWN}\n"
