"""This version reads, exports and resumes the runs of every released version."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.cli import main
from ramify.core.config import parse
from ramify.model.weights_manifest import Manifest
from ramify.orchestrate.run_config import RunConfig
from ramify.run.store import RunStore
from ramify.train.checkpoint_manifest import CheckpointManifest
from ramify.train.token_stats import read_token_stats
from tests.run.released_runs import FOLDER, unpack_run

ARCHIVES = sorted(FOLDER.glob("*.tar.xz"))
MAX_BYTES = 200_000


@pytest.fixture(params=ARCHIVES, ids=lambda archive: archive.name.removesuffix(".tar.xz"))
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack_run(request.param, tmp_path)


def test_archives_are_small() -> None:
    assert ARCHIVES and all(archive.stat().st_size < MAX_BYTES for archive in ARCHIVES)


def test_configuration_store_weights_and_checkpoint_are_read(run: Path) -> None:
    config = parse(RunConfig, ["@", str(run / "config.toml")])
    assert (config.max_steps, config.trainer.lora.rank, config.train[0].taskset["id"]) == (2, 1, "reverse-text")
    with RunStore.open(run, write=False) as store:
        rollouts = store.rollouts()
        assert len(rollouts) >= 24 and {rollout.source for rollout in rollouts} == {"reverse", "eval/held-out"}
        traces = [trace for rollout in rollouts for trace in store.read_traces(rollout.id)]
    assert all(trace.reward is not None and trace.sampled_nodes for trace in traces)
    assert Manifest.read(run / "weights" / "0-000002").version.step == 2
    assert CheckpointManifest.read(run / "checkpoints" / "step_000002-0").step == 2
    assert len(read_token_stats(run, 1, 0).logprob)


def test_commands_read_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(run), "--audit"]) == 0
    assert main(["show", str(run), "--tokens"]) == 0
    assert main(["export", str(run), "--to", "jsonl"]) == 0
    capsys.readouterr()
    assert main(["metrics", str(run), "--json", "--name", "reward/all/mean"]) == 0
    assert [point["step"] for point in json.loads(capsys.readouterr().out)] == [0, 1]


@pytest.mark.run
@pytest.mark.full("a run")
def test_the_run_is_resumed_and_its_model_exported(run: Path, tmp_path: Path) -> None:
    ramify = [sys.executable, "-m", "ramify"]
    resume = [*ramify, "rl", "@", str(run / "config.toml"), "-o", str(tmp_path), "--max_steps", "3", "--accept-changes"]
    subprocess.run([*ramify, "export", str(run), "--model", str(tmp_path / "model")], check=True, timeout=200)
    assert (tmp_path / "model" / "config.json").is_file()
    done = subprocess.run(resume, check=True, timeout=280, capture_output=True, text=True)
    assert "finished: all 3 steps" in done.stdout, done.stdout
    assert main(["why", str(run), "--audit"]) == 0
