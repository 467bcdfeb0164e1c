"""`ramify slurm @ config.toml`: write a batch script that runs `ramify rl` on nodes of Slurm; `--submit` submits it."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ramify.cli.rl import expand_arguments
from ramify.core.config import parse, pop_flags
from ramify.core.errors import ConfigInvalid, ProcessDied
from ramify.core.files import write_atomically
from ramify.orchestrate.config import RunConfig
from ramify.processes.probe import run_probe
from ramify.run.store import wrap_storage_errors

USAGE = """usage: ramify slurm @ FILE [--submit] [--key value]

  --submit      submit the script with sbatch; otherwise it is only written

The script is `job.sh` in RUN.slurm, beside the run directory. It allocates `cluster.num_nodes` nodes, each with the
cores, GPUs and memory of `[cluster.node]`, starts Ray on them, and runs `ramify rl` with the arguments of this command.
FILE, the working directory and this installation must be on all nodes. The job is requeued until the run is finished.

Keys, the same as for `ramify rl`:
"""

COMMAND_FLAGS = ("--submit",)
SUBMIT_TIMEOUT = 60.0  # seconds


def run(argv: Sequence[str]) -> int:
    """Read the configuration, write the script, and submit it if asked to."""
    from ramify.launch.cluster_placement import build_allocation_warning, check_allocation  # not loaded for help
    from ramify.launch.slurm import build_batch_script

    (submit,), rest = pop_flags(argv, COMMAND_FLAGS)
    rest += ["--cluster", "ray"]
    config = parse(RunConfig, expand_arguments(rest), prog="ramify slurm", usage=USAGE, command_flags=COMMAND_FLAGS)
    if submit and shutil.which("sbatch") is None:
        raise ConfigInvalid("--submit: sbatch was not found; run this command on a node of Slurm")
    job_directory = config.path.with_name(f"{config.path.name}.slurm").absolute()
    script = build_batch_script(
        config,
        arguments=rest,
        working_directory=Path.cwd(),
        bin_directory=Path(sys.executable).parent,
        job_directory=job_directory,
    )
    check_allocation(config)
    if warning := build_allocation_warning(config):
        print(warning, file=sys.stderr)
    file = job_directory / "job.sh"
    with wrap_storage_errors(file):
        job_directory.mkdir(parents=True, exist_ok=True)  # sbatch does not create the directory of its log
        write_atomically(file, script)
    print(f"the batch script is in {file}")
    if not submit:
        print(f"submit it with: sbatch {file}")
        return 0
    result = run_probe(["sbatch", str(file)], timeout=SUBMIT_TIMEOUT)
    if not result.ok:
        raise ProcessDied(f"sbatch did not take the job: {result.text}")
    print(result.text.strip())
    return 0
