"""A finished run: metrics, logprobs of trainer and engine, replay, audit, and what repeating its command does."""

import contextlib
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ramify as rf
from ramify.cli import main
from ramify.run.store import RunStore
from ramify.run.store.ledger import Ledger
from ramify.trace import Forest
from ramify.train.batch_source import BatchRecording
from ramify.train.token_stats import read_token_stats
from tests.support.runs import FINISHED_STEPS, FULL, SECOND_TEMPERATURE, read_values, run_command, write_config

pytestmark = pytest.mark.run

NUM_TOKENS = 100_000 if FULL else 100
LONG = {
    "max_steps": 24,
    "orchestrator.batch_size": 512,
    "orchestrator.group_size": 16,
    "checkpoint.interval": 24,
    "trainer.optim.lr": 2e-5,  # a run that learns too fast has no trainable groups left
}


def test_every_step_is_trained_and_has_metrics(finished_run):
    assert len(read_values(finished_run, "train/grad_norm")) == FINISHED_STEPS
    assert read_values(finished_run, "reward/all/mean")  # absent for a step before which no rollout was scored
    assert all(ratio > 1.5 for ratio in read_values(finished_run, "forest/token_ratio"))
    assert len(read_values(finished_run, "eval/held-out/avg")) == 2  # before the first step and at the end


@pytest.mark.promise
def test_audit_reports_no_problem(finished_run):
    assert main(["why", str(finished_run), "--audit"]) == 0


# -- the trainer's logprobs -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_policy_run(finished_run, tmp_path_factory) -> Path:
    """A run that alternated sampling and training: the finished one or, with RAMIFY_FULL, one of 1e5 tokens."""
    if not FULL:
        return finished_run
    home = write_config(tmp_path_factory.mktemp("long"), steps=3, max_staleness=0, more=SECOND_TEMPERATURE)
    flags = [argument for key, value in LONG.items() for argument in (f"--{key}", str(value))]
    result = run_command("rl", "@", "rl.toml", *flags, cwd=home, timeout=1200.0)
    assert result.returncode == 0, result.stdout + result.stderr
    return home / "outputs" / "run"


@pytest.mark.promise
def test_trainer_computes_the_logprobs_of_the_engine_for_each_temperature(on_policy_run):
    counts, divergences = (np.array(read_values(on_policy_run, name)) for name in ("entries", "mismatch_kl"))
    assert counts.sum() >= NUM_TOKENS
    assert max(read_values(on_policy_run, "staleness/max")) == 0
    assert counts @ divergences / counts.sum() < 1e-8
    assert max(read_values(on_policy_run, "max_log_ratio")) < 1e-3
    for source in ("warm", "cool"):
        divergences = read_values(on_policy_run, f"mismatch_kl/{source}/age_0")
        assert divergences and max(divergences) < 1e-8


def test_swapped_temperatures_raise_mismatch_kl(finished_run):
    """A control of `mismatch_kl`: with swapped temperatures it is large."""
    from ramify.model.resolve import resolve_model_path
    from ramify.train.build import build_trainer  # imports torch
    from ramify.train.config import TrainerConfig
    from ramify.train.distributed import init_distributed

    (batch,) = BatchRecording(finished_run / "batches").read_shares(0)
    temperatures = {float(value) for pack in batch.packs for value in pack.calls["temperature"]}
    assert temperatures == {1.0, float(np.float32(0.7))}
    batch = replace(batch, packs=[swap_temperatures(pack) for pack in batch.packs])
    with init_distributed(TrainerConfig(threads=1)) as ranks:
        trainer = build_trainer(resolve_model_path("tiny"), TrainerConfig(threads=1), ranks)
        assert trainer.step(batch).to_dict()["mismatch_kl"] > 1e-3


def swap_temperatures(pack: Forest) -> Forest:
    calls = pack.calls.copy()
    calls["temperature"] = np.where(calls["temperature"] == 1.0, np.float32(0.7), np.float32(1.0))
    return replace(pack, calls=calls)


def test_trainer_logprobs_of_a_rollout_can_be_read_and_equal_the_samplers(finished_run):
    num_trained = 0
    with RunStore.open(finished_run, write=False) as store:
        ledger = Ledger.open_readonly(store)
        steps = {group.number: group.step for group in ledger.groups() if group.step is not None}
        for attempt in ledger.attempts():
            if attempt.group_number not in steps or attempt.rollout_id is None:
                continue
            (trace,) = store.read_traces(attempt.rollout_id)
            (node,) = trace.sampled_nodes
            start, stop = trace.nodes[node].sampled_span
            step = steps[attempt.group_number]
            stats = read_token_stats(finished_run, step, ledger.get_step_trainer(step))
            logprobs, entropies = (values[start:stop] for values in stats.select_node(trace, node))
            if not np.isnan(logprobs).all():  # a filter excluded the rollout
                num_trained += 1
                assert logprobs == pytest.approx(trace.nodes[node].logprobs, abs=1e-3)  # the run is on-policy
                assert (entropies > -1e-4).all()
    assert num_trained >= len(steps)


@pytest.mark.promise
def test_replay_has_the_gradients_of_the_run_also_with_flat_packs(finished_run, capsys, tmp_path):
    def replay_gradient_norms(*flags: str) -> list[float]:
        arguments = ["trainer", "-m", "tiny", "-o", str(tmp_path), "--replay", str(finished_run / "batches"), *flags]
        assert main([*arguments, "--trainer.threads", "1", "--trainer.optim.lr", "1e-4"]) == 0
        return [float(norm) for norm in re.findall(r"grad_norm=(\S+)", capsys.readouterr().out)]

    trained, replayed = read_values(finished_run, "train/grad_norm"), replay_gradient_norms()
    flat = replay_gradient_norms("--flat")
    assert len(trained) == len(replayed) == len(flat) == FINISHED_STEPS
    assert replayed == pytest.approx(trained, rel=1e-4)
    assert flat == pytest.approx(replayed, rel=1e-4)
    assert not list(tmp_path.rglob("*.safetensors"))  # no weights are written


# -- the same command again -------------------------------------------------------------------------------------------


@pytest.fixture
def in_home(finished_run, monkeypatch, check_plugins_in_process):
    """Change to the home of the finished run; processes of a run are not prepared, because none starts."""
    monkeypatch.chdir(finished_run.parents[1])
    server = "ramify.launch.local_launcher.start_prefork_server"
    monkeypatch.setattr(server, lambda modules, env: contextlib.nullcontext())


@pytest.mark.usefixtures("in_home")
def test_finished_run_is_not_repeated(capsys):
    assert main(["rl", "@", "rl.toml"]) == 0
    out = capsys.readouterr().out
    assert "is already finished" in out and "a larger --max-steps trains on" in out
    assert "weights: outputs/run/weights/" in out and "ramify serve -m outputs/run/weights/" in out
    result = rf.rl(tomllib.loads(Path("rl.toml").read_text()))
    assert (result.path, result.outcome.value, result.did_run) == (Path("outputs/run"), 0, False)


@pytest.mark.usefixtures("in_home")
def test_different_identity_is_refused(capsys):
    assert main(["rl", "@", "rl.toml", "--train.0.sampling.temperature", "0.9"]) == 2
    assert "temperature" in capsys.readouterr().err
