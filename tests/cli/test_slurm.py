"""The batch script of `ramify slurm`, run by bash with stand-ins for the programs of Slurm and Ray."""

import contextlib
import os
import re
import shlex
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from ramify.cli import main
from ramify.cli.arguments import expand_arguments
from ramify.cli.cluster_jobs import build_batch_script
from ramify.core.config import parse
from ramify.core.errors import ConfigInvalid
from ramify.orchestrate.run_config import RunConfig

pytestmark = pytest.mark.process

TRAIN = {"name": "reverse", "taskset": {"id": "reverse-text"}}
CLUSTER = {
    "launcher": "ray",
    "num_nodes": 5,
    "shared_directory": "/shared/runs",
    "node": {"cores": 16, "gpus": 4, "memory_gib": 64},
    "slurm": {
        "partition": "gpu",
        "time_limit": "4:00:00",
        "extra_args": ["--qos=x"],
    },
}
PROGRAMS = {
    "scontrol": """case "$1 $2" in
      "show hostnames") printf 'a\\nb\\nc\\nd\\ne\\n';;
      "show node") echo "NodeName=$4 NodeAddr=127.0.0.1 State=IDLE";;
      *) echo "scontrol $*" >> "$CALLS";;
    esac""",
    "srun": """for last; do :; done
    for argument; do case $argument in --nodelist=*) node=${argument#*=};; esac; done
    echo "start $node" >> "$CALLS"
    [ -z "${SIGNAL_JOB:-}" ] || kill -"$SIGNAL_JOB" $PPID
    case "$*" in *"--head"*) [ -z "${BROKEN_HEAD:-}" ] || exit 1;; esac
    echo "Ray runtime started."
    exec sleep 60""",
    "ramify": """echo "ramify $* RAY_ADDRESS=$RAY_ADDRESS GREETING=$GREETING" >> "$CALLS"
    trap 'echo saved >> "$CALLS"; exit 75' USR1 TERM
    [ -n "${RUNS:-}" ] || exit "${CODE:-0}"
    echo running
    while :; do sleep 0.05; done""",
}


def build_job(tmp_path: Path, *setup: str) -> Path:
    """Write a batch script and the programs that it calls to a directory."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(stat.S_IRWXU)
    cluster = {**CLUSTER, "slurm": {**CLUSTER["slurm"], "setup": setup}}
    config = RunConfig(name="run", output=tmp_path, train=[TRAIN], cluster=cluster)
    script = build_batch_script(
        config,
        arguments=["@", "my run.toml"],
        working_directory=tmp_path,
        bin_directory=programs,
        job_directory=tmp_path,
    )
    (tmp_path / "job.sh").write_text(script)
    return tmp_path


@pytest.fixture
def job(tmp_path):
    """A directory with a batch script and the programs that it calls."""
    return build_job(tmp_path, "# greet", "export GREETING=hello", "", "true  # a comment")


def start(job: Path, **variables: str) -> subprocess.Popen:
    environment = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "x", "CALLS": str(job / "calls"), **variables}
    command = ["bash", str(job / "job.sh")]
    env = {**os.environ, **environment}
    return subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen) -> int:
    try:
        process.communicate(timeout=60)
        return process.returncode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the stand-ins of Ray


def calls(job: Path) -> list[str]:
    file = job / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_the_head_starts_first_and_the_others_in_growing_waves(job):
    assert finish(start(job)) == 0
    started = [line.removeprefix("start ") for line in calls(job) if line.startswith("start")]
    assert started[:2] == ["a", "b"] and sorted(started[2:4]) == ["c", "d"] and started[4] == "e"
    command = "ramify rl --launch.grace_period 270 @ my run.toml --cluster.address auto"
    assert calls(job)[-1] == f"{command} RAY_ADDRESS=127.0.0.1:12000 GREETING=hello"


def test_the_job_asks_for_the_nodes_of_the_configuration(job):
    script = (job / "job.sh").read_text()
    for option in [
        "--nodes=5",
        "--ntasks-per-node=1",
        "--cpus-per-task=16",
        "--gpus-per-node=4",
        "--mem=65536M",
        "--partition=gpu",
        "--time=4:00:00",
        "--signal=B:USR1@300",
        "--requeue",
        "--open-mode=append",
        "--qos=x",
    ]:
        assert f"#SBATCH {option}\n" in script


@pytest.mark.parametrize(("number", "is_requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_is_passed_on_and_the_end_of_the_allocation_requeues_the_job(job, number, is_requeued):
    process = start(job, RUNS="1")
    try:
        assert process.stdout.readline() == b"running\n"
        process.send_signal(number)
    finally:
        code = finish(process)
    assert code == 75 and "saved" in calls(job)
    assert ("scontrol requeue 1234" in calls(job)) is is_requeued


@pytest.mark.parametrize(("number", "is_requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_signal_while_ray_starts_ends_the_run_as_soon_as_it_starts(job, number, is_requeued):
    process = start(job, RUNS="1", SIGNAL_JOB=str(number.value))
    assert finish(process) != 0
    assert ("scontrol requeue 1234" in calls(job)) is is_requeued


def test_a_node_on_which_ray_does_not_start_ends_the_job_at_once(job):
    process = start(job, BROKEN_HEAD="1")
    assert finish(process) == 1
    assert not any(line.startswith("ramify") for line in calls(job))


def test_a_setup_command_that_fails_ends_the_job(tmp_path):
    job = build_job(tmp_path, "source /nowhere/activate  # the environment", "export GREETING=hello")
    process = start(job)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and calls(job) == []
    assert b"setup failed: source /nowhere/activate  # the environment\n" in errors


INCOMPLETE = ["if true; then", 'echo "a', "export A=1 \\", "cat <<END\nx", "fi", "a=$(ls", "[[ -f x"]


@pytest.mark.parametrize("command", INCOMPLETE)
def test_a_setup_command_that_is_not_complete_is_refused_with_its_entry(tmp_path, command):
    with pytest.raises(ConfigInvalid) as error:
        build_job(tmp_path, "true", command)
    expected = f"cluster.slurm.setup.1: expected a complete shell command, got {command!r} ("
    assert expected in error.value.message and "; put lines that belong together into one entry" in error.value.message
    assert "setup.0" not in error.value.message and "(`}')" not in error.value.message


def test_setup_is_checked_where_the_locale_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "xx_YY.UTF-8")
    build_job(tmp_path, "true")


def test_a_setup_command_may_span_lines(tmp_path):
    extended = "shopt -s extglob\necho /nowhere/!(x)"
    job = build_job(tmp_path, "if true; then\n  export GREETING=hello\nfi", "cat <<END\nready\nEND", extended)
    assert finish(start(job)) == 0
    assert calls(job)[-1].endswith(" GREETING=hello")


def test_a_failed_run_is_not_requeued(job):
    assert finish(start(job, CODE="1")) == 1
    assert not any("requeue" in line for line in calls(job))


def test_the_number_of_nodes_is_needed(tmp_path):
    config = RunConfig(name="run", output=tmp_path, train=[TRAIN], cluster={"launcher": "ray"})
    with pytest.raises(ConfigInvalid, match=r"cluster\.num_nodes: expected the number of nodes to allocate"):
        build_batch_script(
            config, arguments=[], working_directory=tmp_path, bin_directory=tmp_path, job_directory=tmp_path
        )


CLUSTER_TABLE = '[cluster]\nnum_nodes = 4\nshared_directory = "/shared/runs"\nnode = { cores = 64, gpus = 8 }\n'


def write_config(tmp_path: Path, cluster: str) -> None:
    (tmp_path / "run.toml").write_text(f'name = "run"\n[[train]]\ntaskset = {{ id = "reverse-text" }}\n{cluster}')


def test_a_run_that_does_not_fit_the_allocation_is_refused(tmp_path, monkeypatch, capsys):
    write_config(tmp_path, CLUSTER_TABLE)
    monkeypatch.chdir(tmp_path)
    assert main(["slurm", "@", "run.toml", "--cluster.engines.num_replicas", "40"]) == 2
    assert "ClusterTooSmall: the run does not fit" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()
    # Slurm has names for its nodes that are not known before the job starts.
    assert main(["slurm", "@", "run.toml", "--cluster.engines.nodes", '["gpu7"]']) == 0


def test_an_allocation_of_unspecified_nodes_is_reported(tmp_path, monkeypatch, capsys):
    write_config(tmp_path, CLUSTER_TABLE)
    monkeypatch.chdir(tmp_path)
    assert main(["slurm", "@", "run.toml"]) == 0
    assert capsys.readouterr().err == ""
    write_config(tmp_path, CLUSTER_TABLE.partition("node =")[0])
    assert main(["slurm", "@", "run.toml"]) == 0
    warning = "warning: [cluster.node] is not set, so each node is allocated 8 cores, 0 GPUs and 32 GiB of memory"
    assert capsys.readouterr().err.startswith(warning)


def test_the_job_does_not_use_the_cluster_of_the_configuration(tmp_path, monkeypatch):
    write_config(tmp_path, CLUSTER_TABLE + 'address = "10.0.0.1:6379"\n')
    monkeypatch.chdir(tmp_path)
    for args in ([], ["--cluster.address", "10.0.0.1:6379"]):
        assert main(["slurm", "@", "run.toml", *args]) == 0
        (line,) = re.findall(r"^ramify rl .*", (tmp_path / "outputs" / "run.slurm" / "job.sh").read_text(), re.M)
        job_args = expand_arguments("rl", shlex.split(line.removesuffix(" &"))[2:])
        assert parse(RunConfig, job_args, prog="ramify rl").cluster.address == "auto"


def test_the_command_writes_and_submits_the_script(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.toml").write_text(
        'name = "run"\n[[train]]\ntaskset = { id = "reverse-text" }\n'
        '[cluster]\nnum_nodes = 2\nshared_directory = "/shared/runs"\n'
    )
    monkeypatch.chdir(tmp_path)
    assert main(["slurm", "@", "run.toml"]) == 0
    script = tmp_path / "outputs" / "run.slurm" / "job.sh"
    assert "ramify rl --launch.grace_period 270 @ run.toml --cluster ray --cluster.address auto &" in script.read_text()
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(f'#!/bin/bash\n[ "$1" = {script} ] && echo Submitted batch job 7\n')
    (programs / "sbatch").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert main(["slurm", "@", "run.toml", "--submit"]) == 0
    assert "Submitted batch job 7" in capsys.readouterr().out
