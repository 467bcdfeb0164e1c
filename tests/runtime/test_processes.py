"""Processes that carry a mark end, whatever they are doing when they are looked for."""

import os
import subprocess
import time

from ramify.runtime.processes import MARK, end_marked
from tests.processes import runs


def test_a_process_that_becomes_another_program_all_the_time_is_found(tmp_path):
    """For a sixth of the time such a process has no environment, so one look in six would not find its mark."""
    (tmp_path / "becomes").write_text(": > begun; exec sh ./becomes\n")
    for number in range(30):
        mark = f"becomes-{os.getpid()}-{number}."
        process = subprocess.Popen(["sh", "./becomes"], cwd=tmp_path, env={**os.environ, MARK: mark})
        try:
            while not (tmp_path / "begun").exists():
                time.sleep(0.001)
            end_marked(mark)
            assert not runs(process.pid)
        finally:
            process.kill()
            process.wait()
            (tmp_path / "begun").unlink()
