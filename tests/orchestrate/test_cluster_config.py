"""`[cluster]`: settings that only make sense on one machine are refused beside it."""

import re
from pathlib import Path

import pytest

from ramify.cli import main
from ramify.cli.arguments import expand_arguments
from ramify.core.config import parse
from ramify.core.errors import ConfigInvalid
from ramify.orchestrate.run_config import RunConfig

PAGE = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
TRAIN = '--train=[{"taskset": {"id": "reverse-text"}}]'


def read(*args: str) -> RunConfig:
    return parse(RunConfig, expand_arguments("rl", [TRAIN, *args]), prog="ramify rl")


def test_the_flag_selects_the_launcher_and_keeps_the_table(tmp_path):
    assert read("--cluster", "ray").cluster.launcher == "ray"
    file = tmp_path / "run.toml"
    file.write_text('[cluster]\nnum_nodes = 2\nshared_directory = "/shared"\n')
    assert read("@", str(file), "--cluster", "ray").cluster.num_nodes == 2
    assert read("--cluster", "ray", "--cluster.engines.num_replicas", "3").cluster.engines.num_replicas == 3


@pytest.mark.parametrize("rest", [[], ["--max_steps", "3"], ["@", "run.toml"]])
def test_the_flag_needs_a_value(rest):
    with pytest.raises(ConfigInvalid, match="--cluster: expected ray, got no value"):
        read("--cluster", *rest)


def test_a_local_run_warns_of_cluster_settings_without_effect(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ramify.cli.rl._print_plan", lambda *_, **__: 0)
    args = ["rl", "reverse-text", "--dry-run", "--cluster.num_nodes", "2", "--cluster.node.gpus", "8"]
    assert main(args) == 0
    warning = "warning: without --cluster ray the run is local and ignores cluster.node, cluster.num_nodes\n"
    assert capsys.readouterr().err == warning
    for more in (["--cluster", "local"], ["--cluster", "ray", "--cluster.shared_directory", "/shared"]):
        assert main([*args, *more]) == 0
        assert capsys.readouterr().err == ""
    assert main(["rl", "reverse-text", "--dry-run", "--cluster.shared_directory", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--cluster", "rey"], "cluster.launcher: expected"),
        (["--cluster.num_nodes", "2"], "shared_directory: several nodes need a directory"),
        (
            ["--cluster.shared_directory", "runs"],
            "shared_directory: expected an absolute path",
        ),
        (["--weights.transport", "ipc"], "weights.transport: 'ipc' reaches only engines on the trainer's node"),
        (["--weights.transport", "shm"], "weights.transport: 'shm' reaches only engines on the trainer's node"),
        (["--launch.gpu_placement", "colocated"], "launch.gpu_placement: not allowed on a cluster"),
        (["--launch.base_port", "5000"], "launch.base_port: not allowed on a cluster"),
        (["-b", "http://10.0.0.1:8000", "--cluster.engines.num_replicas", "2"], "cluster.engines: not allowed"),
        (["--cluster.slurm.time_limit", "8h"], "cluster.slurm.time_limit: expected [DAYS-]HH:MM:SS, got '8h'"),
        (
            ["--cluster.slurm.time_limit", "0:05:00"],
            "time_limit: expected more than stop_seconds (300 s), got '0:05:00' (300 s)",
        ),
        (["--record_batches"], "record_batches: not supported on a cluster"),
    ],
)
def test_what_cannot_work_on_a_cluster_is_refused(args, problem):
    with pytest.raises(ConfigInvalid, match=re.escape(problem)):
        read("--cluster", "ray", *args)


def test_the_tables_of_the_docs_are_valid_one_after_another(tmp_path):
    tables = [text for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL) if "[cluster" in text]
    files = [tmp_path / f"{number}.toml" for number in range(len(tables))]
    for file, text in zip(files, tables, strict=True):
        file.write_text(text)
    config = read("--cluster", "ray", *(word for file in files for word in ("@", str(file))))
    assert (config.cluster.trainer.num_ranks, config.cluster.node.gpus, len(tables)) == (8, 8, 3)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("2-3", 183600), ("2-3:10", 184200), ("2-3:10:05", 184205)],
)
def test_time_limits_are_those_of_sbatch(text, seconds):
    limit = read("--cluster.slurm.time_limit", text, "--cluster.slurm.stop_seconds", str(seconds - 1)).cluster.slurm
    assert limit.time_limit == text
    with pytest.raises(ConfigInvalid, match=rf"\({seconds} s\), got"):
        read("--cluster.slurm.time_limit", text, "--cluster.slurm.stop_seconds", str(seconds))
    assert read("--cluster.slurm.time_limit", "0").cluster.slurm.time_limit == "0"  # no limit
