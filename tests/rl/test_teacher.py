"""A teacher that dies or stops answering: the run goes on, and no rollout is trained without its scores."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from ramify.orchestrate.batches import rebuild_forests
from ramify.run.store import RunStore
from ramify.run.store.ledger import Ledger
from tests.support.runs import TIMEOUT, command, read_values, run_command
from tests.support.traces import refuse_top_logprobs

pytestmark = pytest.mark.run

STEPS, FAULTS = 24, 5
STOP_SECONDS = 4.0
CONFIG = f"""
name = "run"
max_steps = {STEPS}
seq_len = 256

[models.teacher]
name = "tiny"

[orchestrator]
batch_size = 32
group_size = 4
max_staleness = 2

[checkpoint]
interval = 4

[launch]
max_restarts = 100

[[train]]
name = "reverse"
taskset = {{ id = "reverse-text", num_tasks = 64 }}
sampling = {{ max_tokens = 40 }}
max_turns = 1
algorithm = {{ id = "opd" }}
teacher = "teacher"
"""


@pytest.mark.timeout(600)
@pytest.mark.full("a run in which the teacher is killed and stopped ten times")
def test_run_survives_a_teacher_that_is_killed_and_stopped(tmp_path):
    (tmp_path / "rl.toml").write_text(CONFIG)
    path = tmp_path / "outputs" / "run"
    with (tmp_path / "output.txt").open("w") as output:
        run = subprocess.Popen(command("rl", "@", "rl.toml"), cwd=tmp_path, stdout=output, stderr=output)
        try:
            for fault in range(2 * FAULTS):
                pid = wait_for_process(run, path, "models/teacher", step=2 * fault)
                if fault % 2:
                    os.kill(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(STOP_SECONDS)
                    os.kill(pid, signal.SIGCONT)
            assert run.wait(TIMEOUT) == 0, (tmp_path / "output.txt").read_text()
        finally:
            run.kill()
            run.wait()
    assert len(read_values(tmp_path / "outputs/run", "train/grad_norm")) == STEPS
    assert run_command("why", "outputs/run", "--audit", cwd=tmp_path).returncode == 0
    with RunStore.open(path, write=False) as store:
        for batch in Ledger.open_readonly(store).batches():
            for forest in rebuild_forests(batch, store.read_traces, refuse_top_logprobs):
                assert forest.targets.ref_kl.all() and np.isfinite(forest.targets.ref_logprob).all()


def wait_for_process(command: subprocess.Popen, run: Path, name: str, *, step: int) -> int:
    """Wait until a process of a run is ready and `step` steps are trained, and return its pid."""
    deadline = time.monotonic() + TIMEOUT
    while True:
        assert command.poll() is None and time.monotonic() < deadline, f"the run ended before step {step}"
        time.sleep(0.02)
        try:
            process = json.loads((run / "supervisor.json").read_text())["processes"][name]
            if process["state"] == "ready" and json.loads((run / "orchestrator.json").read_text())["step"] >= step:
                return process["pid"]
        except (OSError, ValueError, KeyError):  # not written yet
            continue
