"""`ramify k8s @ config.toml`: write a RayJob that runs `ramify rl` on Kubernetes."""

import sys
from collections.abc import Sequence

from ramify.cli.rl import expand_arguments
from ramify.core.config import parse
from ramify.orchestrate.config import RunConfig

USAGE = """usage: ramify k8s @ FILE [--key value] > job.yaml; kubectl apply -f job.yaml

Prints a ConfigMap with the resolved configuration, and a RayJob, for a Kubernetes cluster with the operator KubeRay.
Each of the `cluster.num_nodes` nodes is a pod with what `[cluster.node]` says; `[cluster.kubernetes]` names the image
and the volume. The image needs `ray[default]`, because KubeRay submits the job through Ray's dashboard.

Keys, the same as for `ramify rl`:
"""


def run(argv: Sequence[str]) -> int:
    """Read the configuration and print the manifest."""
    from ramify.launch.cluster_placement import build_allocation_warning, check_allocation  # not loaded for help
    from ramify.launch.kubernetes import build_manifests, format_yaml

    config = parse(RunConfig, expand_arguments([*argv, "--cluster", "ray"]), prog="ramify k8s", usage=USAGE)
    manifests = build_manifests(config)
    check_allocation(config)
    if warning := build_allocation_warning(config):
        print(warning, file=sys.stderr)
    sys.stdout.write(format_yaml(manifests))
    return 0
