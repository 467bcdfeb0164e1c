"""The batch script of `ramify slurm`: it starts Ray on the nodes of an allocation and runs `ramify rl` there.

Ports are fixed, by job, because Ray's own choice collides on busy nodes. The head starts first; workers join in waves
of 1, 2, 4, ... nodes, each wave when the last one has joined, because nodes that start all at once sometimes fail.
The job can be requeued at any moment: the same command continues the run. Slurm sends USR1 to the script before the
allocation ends; the run then saves a checkpoint and exits with 75, and the script requeues its job.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from ramify.core.errors import ConfigInvalid
from ramify.orchestrate.run_config import EXIT_RESUMABLE, RunConfig
from ramify.processes.program import run_program

STOP_MARGIN = 30  # of the seconds before the end of an allocation, for all processes to end after the checkpoint
START_TIMEOUT = 600  # seconds for Ray to start on a wave of nodes
SYNTAX_CHECK_TIMEOUT = 10.0  # seconds for the shell to parse one command of `setup`
# Bash exits with 0 after some syntax errors, but always prints them. A setup may turn extglob on for its later lines.
CHECK_SYNTAX = 'LC_ALL=C bash -O extglob -n -c "$1" 2>&1 | head -n 1; exit ${PIPESTATUS[0]}'

TEMPLATE = Path(__file__).with_name("slurm_job.sh")  # with @names@ for what depends on the run


def build_batch_script(
    config: RunConfig, *, arguments: Sequence[str], working_directory: Path, bin_directory: Path, job_directory: Path
) -> str:
    """Return the batch script that runs `ramify rl` with these arguments in `working_directory`.

    `bin_directory` has the commands `ramify` and `ray`; logs go to `job_directory`. All three must be on all nodes.
    Raises ConfigInvalid if the configuration does not say how many nodes to allocate, or if an entry of `setup` is not
    a complete command.
    """
    cluster = config.cluster
    if cluster.num_nodes is None:
        raise ConfigInvalid("expected the number of nodes to allocate, got none", key="cluster.num_nodes")
    if problems := _find_setup_problems(cluster.slurm.setup):
        raise ConfigInvalid(problems=problems)
    node, slurm = cluster.node, cluster.slurm
    options = {
        "--job-name": config.path.name.replace("/", "-"),
        "--nodes": cluster.num_nodes,
        "--ntasks-per-node": 1,
        "--cpus-per-task": node.cores,
        "--mem": f"{int(node.memory_gib * 1024)}M",
        **({"--gpus-per-node": node.gpus} if node.gpus else {}),
        **({"--partition": slurm.partition} if slurm.partition else {}),
        **({"--account": slurm.account} if slurm.account else {}),
        "--time": slurm.time_limit,
        "--signal": f"B:USR1@{slurm.stop_seconds}",
        "--output": job_directory / "slurm-%j.log",
        "--open-mode": "append",
    }
    lines = [f"#SBATCH {name}={value}" for name, value in options.items()]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {argument}" for argument in slurm.extra_args)]
    settings = {"cores": node.cores, "gpus": node.gpus, "start_timeout": START_TIMEOUT, "job": job_directory}
    grace_period = ["--launch.grace_period", str(slurm.stop_seconds - STOP_MARGIN)]
    address = ["--cluster.address", "auto"]  # the cluster that the script starts, at RAY_ADDRESS
    values = {
        "options": "\n".join(lines),
        "working_directory": shlex.quote(str(working_directory)),
        "bin_directory": shlex.quote(str(bin_directory)),
        "setup": "\n".join(line for command in slurm.setup for line in _run_or_exit(command)),
        "settings": "\n".join(f"{name}={shlex.quote(str(value))}" for name, value in settings.items()),
        # Of two values of a key the last one counts.
        "command": shlex.join(["ramify", "rl", *grace_period, *arguments, *address]),
        "resumable": str(EXIT_RESUMABLE),
    }
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], TEMPLATE.read_text(encoding="utf-8"))


def _find_setup_problems(commands: Sequence[str]) -> list[tuple[str, str]]:
    """Return the key and the problem of each command that the shell cannot parse on its own."""
    problems: list[tuple[str, str]] = []
    for index, command in enumerate(commands):
        group = f"{{\n:\n{command}\n}}"  # a command that is not complete takes the closing brace as part of it
        result = run_program(["bash", "-c", CHECK_SYNTAX, "bash", group], timeout=SYNTAX_CHECK_TIMEOUT)
        if not result.ok or result.text:
            reason = re.sub(r"^bash: -c: line \d+: ", "", result.text)
            problem = f"expected a complete shell command, got {command!r} ({reason})"
            advice = "put lines that belong together into one entry, separated by \\n"
            problems.append((f"cluster.slurm.setup.{index}", f"{problem}; {advice}"))
    return problems


def _run_or_exit(command: str) -> list[str]:
    """Return the lines that run a shell command, and end the script if it fails."""
    message = shlex.quote(f"setup failed: {command}")
    return [command, f"(($? == 0)) || {{ echo {message} >&2; exit 1; }}"]
