"""The manifest of `ramify k8s`: a ConfigMap with the configuration, and a RayJob, for the operator KubeRay.

Each node of the cluster is one pod. The job's command runs in the head's pod. If it fails, or its pod is lost,
Kubernetes starts the job again on new pods, and the same command continues the run from the shared directory.
"""

import json
import re
from typing import Any, cast

from ramify.core.config import dump_toml
from ramify.core.errors import ConfigInvalid
from ramify.orchestrate.cluster_config import ClusterConfig, KubernetesConfig
from ramify.orchestrate.run_config import RunConfig

MAX_NAME_CHARS = 47  # of a RayJob: the operator appends to it
CONFIG_DIRECTORY = "/etc/ramify"
OUTPUT_DIRECTORY = "/ramify/outputs"  # on the disk of the head's pod
TERMINATION_MARGIN = 30  # seconds that a pod may take to end, beyond the time for a last checkpoint
SECONDS_TO_KEEP = 3600  # that a finished job stays visible

Manifest = dict[str, Any]


def build_manifests(config: RunConfig) -> list[Manifest]:
    """Return the ConfigMap and the RayJob of a run. Raises ConfigInvalid with every key that is missing."""
    cluster = _check_cluster(config)
    settings = cluster.kubernetes
    metadata = {"name": build_resource_name(config.path.name), "namespace": settings.namespace}
    own_cluster = cluster.model_copy(update={"address": "auto"})  # the one of the RayJob
    run_config = config.model_copy(update={"name": config.path.name, "cluster": own_cluster})
    entrypoint = f"ramify rl @ {CONFIG_DIRECTORY}/run.toml"
    if not config.output.is_absolute():
        entrypoint += f" -o {OUTPUT_DIRECTORY}"
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
            "ttlSecondsAfterFinished": SECONDS_TO_KEEP,
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
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower())[:MAX_NAME_CHARS].strip("-")
    return name if name[:1].isalpha() else f"run-{name}"[:MAX_NAME_CHARS].strip("-")


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
            "terminationGracePeriodSeconds": int(self.config.launch.grace_period) + TERMINATION_MARGIN,
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
            volumes[CONFIG_DIRECTORY] = {"name": "config", "configMap": {"name": self.config_map}}
            volumes[OUTPUT_DIRECTORY] = {"name": "outputs", "emptyDir": {}}
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
        if isinstance(item, dict | list) and item:
            lines += [prefix, *_format_value(item, indent + 2)]
        elif isinstance(item, str) and item.endswith("\n"):
            lines += [f"{prefix} |", *(f"{pad}  {line}".rstrip() for line in item.splitlines())]
        else:
            lines.append(f"{prefix} {json.dumps(item)}")
    return lines


def _format_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z][\w./-]*", key) else json.dumps(key)
