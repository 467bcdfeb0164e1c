"""Processes that carry a mark end, whatever they are doing when they are looked for."""

import os
import subprocess
import time
from types import SimpleNamespace

import pytest

from ramify.runtime.process_cleanup import MARKER_VARIABLE, _read_marker, kill_marked_processes
from tests.processes import runs


def test_a_process_that_becomes_another_program_all_the_time_is_found(tmp_path):
    """For a sixth of the time such a process has no environment, so one look in six would not find its mark."""
    (tmp_path / "becomes").write_text(": > begun; exec sh ./becomes\n")
    for number in range(30):
        mark = f"becomes-{os.getpid()}-{number}."
        process = subprocess.Popen(["sh", "./becomes"], cwd=tmp_path, env={**os.environ, MARKER_VARIABLE: mark})
        try:
            while not (tmp_path / "begun").exists():
                time.sleep(0.001)
            kill_marked_processes(mark)
            assert not runs(process.pid)
        finally:
            process.kill()
            process.wait()
            (tmp_path / "begun").unlink()


@pytest.mark.parametrize(("name", "mark"), [("kthreadd", ""), ("sh", None)])
def test_process_2_is_looked_at_again_unless_it_is_the_kernels(name, mark):
    """In a container it may be any program, such as the one that starts all others."""
    second = SimpleNamespace(
        pid=2,
        name=lambda: name,
        parent=lambda: None,
        environ=dict,
        status=lambda: "running",
        uids=lambda: SimpleNamespace(effective=os.geteuid()),
    )
    assert _read_marker(second) == mark
    child = SimpleNamespace(**{**vars(second), "pid": 77, "name": lambda: "worker", "parent": lambda: second})
    assert _read_marker(child) == mark
