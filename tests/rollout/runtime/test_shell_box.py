"""The records of programs that a shell started."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.rollout.runtime.shell_process import SPAWN_SCRIPT, RecordFilter

MARKER = "0123456789abcdef"
PART = st.sampled_from([b"\x1e", b"\x1e0123", MARKER.encode(), b"\n", b"text", b"\x1e" + MARKER.encode() + b"x"])


@given(st.lists(PART), st.lists(PART), st.lists(st.integers(0, 60)))
def test_record_is_found_however_the_stream_is_cut(before, after, cuts):
    stream = b"".join(before) + f"\x1e{MARKER} exited 3\n".encode() + b"".join(after)
    passed, records = bytearray(), []
    record_filter = RecordFilter(MARKER, passed.extend, records.append)
    position = 0
    for cut in [*cuts, len(stream)]:
        record_filter.write(stream[position : position + cut])
        position += cut
    record_filter.flush()
    assert records == [["exited", "3"]]
    assert bytes(passed) == b"".join(before) + b"".join(after)


def test_complete_line_is_passed_on_at_once():
    passed = bytearray()
    RecordFilter(MARKER, passed.extend, lambda _: None).write(b"a line\n")
    assert passed == b"a line\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("cwd", "argv", "record", "status"),
    [
        ("/", ["sh", "-c", "exit 5"], "exited 5", 5),
        ("/nowhere", ["sh"], "failed 2 cwd", 127),
        ("/", ["no-such-program"], "failed 2 program", 127),
        ("/", ["/etc/passwd"], "failed 13 program", 127),
    ],
)
def test_shell_reports_how_a_program_started_and_ended(cwd, argv, record, status):
    command = ["sh", "-c", SPAWN_SCRIPT, "sh", MARKER, cwd, "yes", *argv]
    result = subprocess.run(command, input="never read", capture_output=True, text=True, timeout=60)
    assert result.returncode == status
    assert result.stderr.endswith(f"\x1e{MARKER} {record}\n")


@pytest.mark.process
def test_shell_changes_no_variable_of_the_program():
    names = ("marker", "cwd", "program", "file", "directory", "status", "line", "round")
    command = ["sh", "-c", SPAWN_SCRIPT, "sh", MARKER, "/", "", "env"]
    env = {"PATH": "/usr/bin:/bin", **dict.fromkeys(names, "mine")}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert {f"{name}=mine" for name in names} <= set(result.stdout.splitlines())
    assert "PATH=/usr/bin:/bin" in result.stdout.splitlines()
