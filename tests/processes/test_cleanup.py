"""Marked processes are killed, even during `exec`."""

import os
import subprocess
import time
from types import SimpleNamespace

import pytest

from ramify.processes.cleanup import MARKER_VARIABLE, _read_marker, kill_marked_processes
from tests.support.processes import is_running, wait_until


@pytest.mark.process
def test_process_that_constantly_calls_exec_is_killed(tmp_path):
    """Such a process has no environment for a sixth of the time, so one check in six would not see its marker."""
    (tmp_path / "becomes").write_text(": > begun; exec sh ./becomes\n")
    for number in range(240 if os.environ.get("RAMIFY_FULL") else 20):
        marker = f"becomes-{os.getpid()}-{number}."
        process = subprocess.Popen(["sh", "./becomes"], cwd=tmp_path, env={**os.environ, MARKER_VARIABLE: marker})
        try:
            wait_until((tmp_path / "begun").exists)
            kill_marked_processes(marker, started_after=time.time())
            assert not is_running(process.pid)
        finally:
            process.kill()
            process.wait()
            (tmp_path / "begun").unlink()


@pytest.mark.parametrize(("name", "marker"), [("kthreadd", ""), ("sh", None)])
def test_pid_2_is_checked_again_unless_it_is_a_kernel_thread(name, marker):
    """In a container, pid 2 may be any program."""
    process_2 = SimpleNamespace(
        pid=2,
        name=lambda: name,
        parent=lambda: None,
        environ=dict,
        status=lambda: "running",
        uids=lambda: SimpleNamespace(effective=os.geteuid()),
    )
    assert _read_marker(process_2) == marker
    child = SimpleNamespace(**{**vars(process_2), "pid": 77, "name": lambda: "worker", "parent": lambda: process_2})
    assert _read_marker(child) == marker
