"""The manifest of `ramify k8s`, validated offline.

`rayjob_schema.json` has the fields of a RayJob as the CRD of KubeRay defines them, except those inside pod templates.
Pod templates and the ConfigMap are validated by kubernetes-validate, which `make test-k8s` installs.
"""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from ramify.cli import main
from ramify.cli.cluster_jobs import build_manifests, build_resource_name, format_yaml
from ramify.core.config import parse
from ramify.core.errors import ConfigInvalid
from ramify.orchestrate.run_config import RunConfig

SCHEMA = json.loads((Path(__file__).parent / "rayjob_schema.json").read_text())
CLUSTER = {
    "launcher": "ray",
    "num_nodes": 4,
    "shared_directory": "/shared/runs",
    "node": {"cores": 32, "gpus": 8, "memory_gib": 512},
    "kubernetes": {
        "image": "example.org/ramify:1",
        "namespace": "research",
        "volume_claim": "runs",
        "secrets": ["api-keys"],
        "node_selector": {"gpu": "h200"},
    },
}


@pytest.fixture
def config() -> RunConfig:
    train = [{"name": "reverse", "taskset": {"id": "reverse-text"}, "sampling": {"max_tokens": 40}}]
    return RunConfig(name="My Run_1", train=train, cluster=CLUSTER)


@pytest.fixture
def manifests(config) -> list[dict]:
    return list(yaml.safe_load_all(format_yaml(build_manifests(config))))


def list_pods(job: dict) -> list[dict]:
    """Return the pod templates of a RayJob as pods."""
    cluster = job["spec"]["rayClusterSpec"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template} for template in templates]


def test_the_yaml_is_what_was_built(config, manifests):
    assert manifests == build_manifests(config)


def test_the_configuration_in_the_manifest_is_that_of_the_run(config, manifests, tmp_path):
    config_map, job = manifests
    (tmp_path / "run.toml").write_text(config_map["data"]["run.toml"])
    assert parse(RunConfig, ["@", str(tmp_path / "run.toml")]) == config
    assert job["spec"]["entrypoint"] == "ramify rl @ /etc/ramify/run.toml -o /ramify/outputs"


def test_the_job_does_not_use_the_cluster_of_the_configuration(config):
    cluster = config.cluster.model_copy(update={"address": "10.0.0.1:6379"})
    config_map, _ = build_manifests(config.model_copy(update={"cluster": cluster}))
    assert "10.0.0.1" not in config_map["data"]["run.toml"]


def test_each_node_is_a_pod_with_its_cores_gpus_memory_and_volumes(manifests):
    _, job = manifests
    head, worker = list_pods(job)
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 3
    for pod in (head, worker):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"] == {"cpu": "32", "memory": "524288Mi", "nvidia.com/gpu": "8"}
        assert {"name": "shared", "mountPath": "/shared/runs"} in container["volumeMounts"]
        names = {mount["name"] for mount in container["volumeMounts"]}
        assert names == {volume["name"] for volume in pod["spec"]["volumes"]}
        assert pod["spec"]["terminationGracePeriodSeconds"] == 150


def test_the_job_has_only_fields_of_a_ray_job(manifests):
    jsonschema.validate(manifests[1], SCHEMA)


def test_pods_and_config_map_are_valid_for_kubernetes(manifests):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make test-k8s installs it")
    config_map, job = manifests
    for document in (config_map, *list_pods(job)):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_one_error_lists_every_missing_key():
    config = RunConfig(name="run", train=[{"taskset": {"id": "reverse-text"}}], cluster={"launcher": "ray"})
    with pytest.raises(ConfigInvalid) as error:
        build_manifests(config)
    for key in ("num_nodes", "shared_directory", "kubernetes.image", "kubernetes.volume_claim"):
        assert f"cluster.{key}: expected" in str(error.value)
    assert "ray[default]" in str(error.value)  # with Ray's dashboard, through which KubeRay submits jobs


@pytest.mark.parametrize(
    ("run", "name"), [("My Run_1", "my-run-1"), ("0x", "run-0x"), ("a" * 60, "a" * 47), ("-", "run")]
)
def test_names_are_those_that_kubernetes_accepts(run, name):
    assert build_resource_name(run) == name


def test_the_command_prints_the_manifest(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.toml").write_text(
        'name = "run"\n[[train]]\ntaskset = { id = "reverse-text" }\n[cluster]\nnum_nodes = 1\n'
        'shared_directory = "/shared"\nkubernetes = { image = "example.org/ramify:1", volume_claim = "runs" }\n'
    )
    monkeypatch.chdir(tmp_path)
    assert main(["k8s", "@", "run.toml"]) == 0
    output = capsys.readouterr()
    assert output.err.startswith("warning: [cluster.node] is not set, so each node is allocated 8 cores, 0 GPUs")
    config_map, job = yaml.safe_load_all(output.out)
    assert (config_map["kind"], job["kind"]) == ("ConfigMap", "RayJob")
    assert job["spec"]["rayClusterSpec"]["workerGroupSpecs"] == []
    assert main(["k8s", "@", "run.toml", "--cluster.engines.num_replicas", "40"]) == 2
    output = capsys.readouterr()
    assert "ClusterTooSmall: the run does not fit" in output.err and output.out == ""
    assert main(["k8s", "@", "run.toml", "--cluster.node.cores", "16"]) == 0
    assert capsys.readouterr().err == ""
