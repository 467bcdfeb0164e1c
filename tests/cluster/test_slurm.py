"""The script of `ramify slurm` on a real Slurm: after a signal and after the loss of a node, the run continues."""

import os
import stat
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.run

TIMEOUT = 900.0  # seconds; Slurm waits for two minutes before it starts a requeued job
RUN = """
name = "run"
max_steps = {max_steps}
seq_len = 256

[orchestrator]
batch_size = 32
group_size = 8

[trainer]
pack_tokens = 4096

[checkpoint]
interval = 4

[[train]]
name = "reverse"
taskset = {{ id = "reverse-text" }}
sampling = {{ temperature = 1.0, max_tokens = 48 }}
max_turns = 1

[cluster]
num_nodes = 3
shared_directory = "{directory}/shared"
node = {{ cores = 4, memory_gib = 1 }}
lease_duration = 10

[cluster.slurm]
time_limit = "60"
stop_seconds = 60
setup = ["export RAMIFY_RAY_DIRECTORY={directory}/ray", "export PATH={directory}/bin:$PATH"]
"""


@pytest.fixture
def slurm():
    if "RAMIFY_SLURM" not in os.environ:
        pytest.skip("RAMIFY_SLURM names the root of an installation of Slurm")
    with Hosts(3) as hosts:
        cluster = SlurmCluster(hosts, Path(os.environ["RAMIFY_SLURM"]))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()


def write_programs(directory: Path) -> None:
    """Write the commands of the environment with Ray."""
    python = os.environ["RAMIFY_RAY_PYTHON"]
    (directory / "bin").mkdir()
    for name, command in {"ramify": f"{python} -m ramify", "ray": str(Path(python).with_name("ray"))}.items():
        (directory / "bin" / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (directory / "bin" / name).chmod(stat.S_IRWXU)


@pytest.mark.parametrize("fault", ["signal", "lost node"])
def test_a_job_is_requeued_and_continues_the_run(slurm, fault):
    directory = slurm.hosts.directory
    write_programs(directory)
    (directory / "shared").mkdir()
    (directory / "run.toml").write_text(RUN.format(directory=directory, max_steps=12))
    ramify = (str(directory / "bin" / "ramify"),)
    flags = ("@", f"{directory}/run.toml", "-o", str(directory / "outputs"))

    def wait_for(condition, what: str) -> None:
        deadline, started = time.monotonic() + TIMEOUT, time.monotonic()
        while not condition():
            logs = [path.read_text()[-3000:] for path in directory.glob("outputs/run.slurm/*.log")]
            assert time.monotonic() < deadline, f"{what}: {slurm.get_state(job)}\n{logs}"
            time.sleep(1)
        print(f"{what}: {time.monotonic() - started:.0f} s", flush=True)

    def count_checkpoint_steps() -> int:
        names = [path.name for path in directory.glob("shared/run/checkpoints/step_*")]
        return max((int(name.removeprefix("step_").partition("-")[0]) for name in names), default=0)

    job = slurm.run(*ramify, "slurm", *flags, "--submit").split()[-1]
    wait_for(lambda: count_checkpoint_steps() >= 4, "first checkpoint")
    if fault == "signal":
        slurm.run("scancel", "--batch", "--signal=USR1", job)
    else:
        slurm.hosts[2].cut()
    wait_for(lambda: slurm.get_state(job)[1] == 1, "requeued")
    slurm.hosts[2].heal()
    wait_for(lambda: slurm.get_state(job)[0] not in ("PENDING", "RUNNING", "COMPLETING"), "finished")
    assert slurm.get_state(job) == ("COMPLETED", 1)
    assert "no problems" in slurm.run(*ramify, "why", str(directory / "outputs" / "run"), "--audit")
