"""`ramify slurm` and `ramify k8s`: what a scheduler needs to run `ramify rl` on several nodes.

The batch script of Slurm starts Ray on the nodes of an allocation. Ports are fixed, by job, because Ray's own choice
collides on busy nodes. The head starts first; workers join in waves of 1, 2, 4, ... nodes, each wave when the last one
has joined, because nodes that start all at once sometimes fail. The job can be requeued at any moment: the same command
continues the run. Slurm sends USR1 to the script before the allocation ends; the run then saves a checkpoint and exits
with 75, and the script requeues its job.

The manifests of Kubernetes are a ConfigMap with the configuration, and a RayJob, for the operator KubeRay. Each node of
the cluster is one pod. The job's command runs in the head's pod. If it fails, or its pod is lost, Kubernetes starts the
job again on new pods, and the same command continues the run from the shared directory.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from ramify.cli.arguments import ConfigCall
from ramify.core.config import dump_toml
from ramify.core.errors import ConfigInvalid, ProcessDied
from ramify.core.files import write_atomically
from ramify.launch.capacity import build_allocation_warning, check_allocation
from ramify.orchestrate.cluster_config import ClusterConfig, KubernetesConfig
from ramify.orchestrate.run_config import EXIT_RESUMABLE, RunConfig
from ramify.processes.program import run_program
from ramify.run.store import wrap_storage_errors

SLURM_STOP_MARGIN = 30  # of the seconds before the end of an allocation, for all processes to end after the checkpoint
SLURM_START_TIMEOUT = 600  # seconds for Ray to start on a wave of nodes
SLURM_SYNTAX_CHECK_TIMEOUT = 10.0  # seconds for the shell to parse one command of `setup`
# Bash exits with 0 after some syntax errors, but always prints them. A setup may turn extglob on for its later lines.
SLURM_CHECK_SYNTAX = 'LC_ALL=C bash -O extglob -n -c "$1" 2>&1 | head -n 1; exit ${PIPESTATUS[0]}'
SLURM_SUBMIT_TIMEOUT = 60.0  # seconds
SLURM_TEMPLATE = Path(__file__).with_name("slurm_job.sh")  # with @names@ for what depends on the run
K8S_MAX_NAME_CHARS = 47  # of a RayJob: the operator appends to it
K8S_CONFIG_DIRECTORY = "/etc/ramify"
K8S_OUTPUT_DIRECTORY = "/ramify/outputs"  # on the disk of the head's pod
K8S_TERMINATION_MARGIN = 30  # seconds that a pod may take to end, beyond the time for a last checkpoint
K8S_SECONDS_TO_KEEP = 3600  # that a finished job stays visible
Manifest = dict[str, Any]


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
    result = run_program(["sbatch", str(file)], timeout=SLURM_SUBMIT_TIMEOUT)
    if not result.ok:
        raise ProcessDied(f"sbatch did not take the job: {result.text}")
    print(result.text.strip())
    return 0


def _check_nodes(config: RunConfig) -> None:
    """Raise ConfigInvalid if the run does not fit the nodes; print a warning if it is not certain."""
    check_allocation(config)
    if warning := build_allocation_warning(config):
        print(warning, file=sys.stderr)


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
    settings = {"cores": node.cores, "gpus": node.gpus, "start_timeout": SLURM_START_TIMEOUT, "job": job_directory}
    grace_period = ["--launch.grace_period", str(slurm.stop_seconds - SLURM_STOP_MARGIN)]
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
    return re.sub(r"@(\w+)@", lambda match: values[match[1]], SLURM_TEMPLATE.read_text(encoding="utf-8"))


def _find_setup_problems(commands: Sequence[str]) -> list[tuple[str, str]]:
    """Return the key and the problem of each command that the shell cannot parse on its own."""
    problems: list[tuple[str, str]] = []
    for index, command in enumerate(commands):
        group = f"{{\n:\n{command}\n}}"  # a command that is not complete takes the closing brace as part of it
        result = run_program(["bash", "-c", SLURM_CHECK_SYNTAX, "bash", group], timeout=SLURM_SYNTAX_CHECK_TIMEOUT)
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


def build_manifests(config: RunConfig) -> list[Manifest]:
    """Return the ConfigMap and the RayJob of a run. Raises ConfigInvalid with every key that is missing."""
    cluster = _check_cluster(config)
    settings = cluster.kubernetes
    metadata = {"name": build_resource_name(config.path.name), "namespace": settings.namespace}
    own_cluster = cluster.model_copy(update={"address": "auto"})  # the one of the RayJob
    run_config = config.model_copy(update={"name": config.path.name, "cluster": own_cluster})
    entrypoint = f"ramify rl @ {K8S_CONFIG_DIRECTORY}/run.toml"
    if not config.output.is_absolute():
        entrypoint += f" -o {K8S_OUTPUT_DIRECTORY}"
    builder = _PodBuilder(config, cluster, metadata["name"])
    num_workers = (cluster.num_nodes or 1) - 1
    workers = {
        "groupName": "workers",
        "replicas": num_workers,
        "minReplicas": num_workers,
        "maxReplicas": num_workers,
        "rayStartParams": {},
        "template": builder.build("ray-worker", is_head=False),
    }
    job: Manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            "entrypoint": entrypoint,
            "backoffLimit": settings.retries,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": K8S_SECONDS_TO_KEEP,
            "rayClusterSpec": {
                "headGroupSpec": {"rayStartParams": {}, "template": builder.build("ray-head", is_head=True)},
                "workerGroupSpecs": [workers] if num_workers else [],
            },
        },
    }
    data = {"run.toml": dump_toml(run_config)}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}, job]


def build_resource_name(run_name: str) -> str:
    """Return a name that Kubernetes accepts: lower-case letters, digits and hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower())[:K8S_MAX_NAME_CHARS].strip("-")
    return name if name[:1].isalpha() else f"run-{name}"[:K8S_MAX_NAME_CHARS].strip("-")


def format_yaml(manifests: list[Manifest]) -> str:
    """Return the manifests as YAML documents. Scalars are written as JSON, of which YAML is a superset."""
    return "".join("---\n" + "\n".join(_format_value(manifest, 0)) + "\n" for manifest in manifests)


def _check_cluster(config: RunConfig) -> ClusterConfig:
    cluster, settings = config.cluster, config.cluster.kubernetes
    needed = [
        ("cluster.num_nodes", cluster.num_nodes is not None, "the number of pods"),
        ("cluster.shared_directory", cluster.shared_directory is not None, "the directory to mount the volume at"),
        ("cluster.kubernetes.image", bool(settings.image), "a container image with ramify[ray,local] and ray[default]"),
        (
            "cluster.kubernetes.volume_claim",
            bool(settings.volume_claim),
            "the claim of a volume for all pods",
        ),
    ]
    if problems := [(key, f"expected {what}, got none") for key, is_set, what in needed if not is_set]:
        raise ConfigInvalid(problems=problems)
    return cluster


class _PodBuilder:
    def __init__(self, config: RunConfig, cluster: ClusterConfig, config_map: str) -> None:
        self.config, self.cluster, self.config_map = config, cluster, config_map
        self.settings: KubernetesConfig = cluster.kubernetes

    def build(self, container_name: str, *, is_head: bool) -> Manifest:
        """Build the template of a pod."""
        settings, volumes = self.settings, self._list_volumes(is_head=is_head)
        container: Manifest = {
            "name": container_name,
            "image": settings.image,
            "env": [{"name": "RAY_agent_register_timeout_ms", "value": "300000"}],
            "envFrom": [{"secretRef": {"name": name}} for name in settings.secrets],
            "resources": {"requests": self._resources, "limits": self._resources},
            "volumeMounts": [{"name": volume["name"], "mountPath": path} for path, volume in volumes.items()],
        }
        spec: Manifest = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": int(self.config.launch.grace_period) + K8S_TERMINATION_MARGIN,
            "nodeSelector": settings.node_selector,
            "containers": [container],
            "volumes": list(volumes.values()),
        }
        return {"spec": spec}

    @property
    def _resources(self) -> dict[str, str]:
        node = self.cluster.node
        gpus = {"nvidia.com/gpu": str(node.gpus)} if node.gpus else {}
        return {"cpu": str(node.cores), "memory": f"{int(node.memory_gib * 1024)}Mi", **gpus}

    def _list_volumes(self, *, is_head: bool) -> dict[str, Manifest]:
        """Return the volumes by the path at which they are mounted."""
        volumes: dict[str, Manifest] = {"/dev/shm": {"name": "shm", "emptyDir": {"medium": "Memory"}}}
        claim = {"claimName": self.settings.volume_claim}
        volumes[str(self.cluster.shared_directory)] = {"name": "shared", "persistentVolumeClaim": claim}
        if is_head:
            volumes[K8S_CONFIG_DIRECTORY] = {"name": "config", "configMap": {"name": self.config_map}}
            volumes[K8S_OUTPUT_DIRECTORY] = {"name": "outputs", "emptyDir": {}}
        return volumes


def _format_value(value: Any, indent: int) -> list[str]:
    """Return the lines of a non-empty table or list."""
    pad, lines = " " * indent, list[str]()
    entries: list[tuple[str, Any]] = (
        [(f"{pad}{_format_key(key)}:", item) for key, item in cast(Manifest, value).items()]
        if isinstance(value, dict)
        else [(f"{pad}-", item) for item in value]
    )
    for prefix, item in entries:
        if isinstance(item, (dict, list)) and item:
            lines += [prefix, *_format_value(item, indent + 2)]
        elif isinstance(item, str) and item.endswith("\n"):
            lines += [f"{prefix} |", *(f"{pad}  {line}".rstrip() for line in item.splitlines())]
        else:
            lines.append(f"{prefix} {json.dumps(item)}")
    return lines


def _format_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z][\w./-]*", key) else json.dumps(key)
