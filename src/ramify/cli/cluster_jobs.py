"""`ramify slurm` and `ramify k8s`: what a scheduler needs to run `ramify rl` on several nodes."""

import shutil
import sys
from pathlib import Path

from ramify.cli.arguments import ConfigCall
from ramify.core.errors import ConfigInvalid, ProcessDied
from ramify.core.files import write_atomically
from ramify.launch.capacity import build_allocation_warning, check_allocation
from ramify.launch.cluster_jobs import build_batch_script, build_manifests, format_yaml
from ramify.orchestrate.run_config import RunConfig
from ramify.processes.program import run_program
from ramify.run.store import wrap_storage_errors

SUBMIT_TIMEOUT = 60.0  # seconds


def print_manifest(call: ConfigCall[RunConfig]) -> int:
    """Print the manifest of a RayJob."""
    manifests = build_manifests(call.config)
    _check_nodes(call.config)
    sys.stdout.write(format_yaml(manifests))
    return 0


def write_slurm_script(call: ConfigCall[RunConfig]) -> int:
    """Write the batch script, and submit it if asked to."""
    config, submit = call.config, call.flags.submit
    if submit and shutil.which("sbatch") is None:
        raise ConfigInvalid("sbatch was not found; run this command on a node of Slurm", key="--submit")
    job_directory = config.path.with_name(f"{config.path.name}.slurm").absolute()
    script = build_batch_script(
        config,
        arguments=[*(arg for arg in call.argv if arg != "--submit"), "--cluster", "ray"],
        working_directory=Path.cwd(),
        bin_directory=Path(sys.executable).parent,
        job_directory=job_directory,
    )
    _check_nodes(config)
    file = job_directory / "job.sh"
    with wrap_storage_errors(file):
        job_directory.mkdir(parents=True, exist_ok=True)  # sbatch does not create the directory of its log
        write_atomically(file, script)
    print(f"the batch script is in {file}")
    if not submit:
        print(f"submit it with: sbatch {file}")
        return 0
    result = run_program(["sbatch", str(file)], timeout=SUBMIT_TIMEOUT)
    if not result.ok:
        raise ProcessDied(f"sbatch did not take the job: {result.text}")
    print(result.text.strip())
    return 0


def _check_nodes(config: RunConfig) -> None:
    """Raise ConfigInvalid if the run does not fit the nodes; print a warning if it is not certain."""
    check_allocation(config)
    if warning := build_allocation_warning(config):
        print(warning, file=sys.stderr)
