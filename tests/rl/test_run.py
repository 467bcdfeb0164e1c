"""A whole run with real processes: training, resuming, fault tolerance."""

import contextlib
import random
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import numpy as np
import psutil
import pytest

import ramify as rf
from ramify.cli import main
from ramify.store import RunStore
from ramify.store.ledger import Ledger
from ramify.train.token_stats import read_token_stats
from tests.rl.run_helpers import FULL, KILLS, TIMEOUT, command, metrics, run_command, write_config


def test_every_step_is_trained_and_has_metrics(finished):
    assert len(metrics(finished, "reward/all/mean")) == 3
    assert len(metrics(finished, "train/grad_norm")) == 3
    assert all(ratio > 1.5 for ratio in metrics(finished, "forest/token_ratio"))
    assert len(metrics(finished, "eval/held-out/avg")) == 2  # before the first step and at the end


def test_trainer_logprobs_of_a_rollout_can_be_read_and_are_those_of_the_sampler(finished):
    path, num_trained = finished / "outputs/run", 0
    with RunStore.open(path, write=False) as store:
        ledger = Ledger.open_readonly(store)
        steps = {group.number: group.step for group in ledger.groups() if group.step is not None}
        for attempt in ledger.attempts():
            if attempt.group_number not in steps or attempt.rollout_id is None:
                continue
            (trace,) = store.read_traces(attempt.rollout_id)
            (node,) = trace.sampled_nodes
            start, stop = trace.nodes[node].sampled_span
            step = steps[attempt.group_number]
            stats = read_token_stats(path, step, ledger.get_step_trainer(step))
            logprobs, entropies = (values[start:stop] for values in stats.select_node(trace, node))
            if not np.isnan(logprobs).all():  # a filter excluded the rollout
                num_trained += 1
                assert logprobs == pytest.approx(trace.nodes[node].logprobs, abs=1e-3)  # the run is on-policy
                assert (entropies > -1e-4).all()
    assert num_trained >= len(steps)


def test_audit_finds_no_problem(finished):
    assert main(["why", str(finished / "outputs/run"), "--audit"]) == 0


@pytest.fixture
def in_finished(finished, monkeypatch, check_plugins_in_process):
    """Change to the home of the finished run; processes of a run are not prepared, because none starts."""
    monkeypatch.chdir(finished)
    monkeypatch.setattr("ramify.launch.api.prefork_shared_modules", lambda specs: contextlib.nullcontext())
    return finished


def test_finished_run_is_not_repeated(in_finished, capsys):
    assert main(["rl", "@", "rl.toml"]) == 0
    out = capsys.readouterr().out
    assert "is already finished" in out and "a larger --max-steps trains on" in out
    assert "weights: outputs/run/weights/" in out and "ramify serve -m outputs/run/weights/" in out


def test_python_api_takes_the_same_tables(in_finished):
    result = rf.rl(tomllib.loads((in_finished / "rl.toml").read_text()))
    assert (result.path, result.outcome.value, result.did_run) == (Path("outputs/run"), 0, False)


def test_different_identity_is_refused(in_finished, capsys):
    assert main(["rl", "@", "rl.toml", "--train.0.sampling.temperature", "0.9"]) == 2
    assert "temperature" in capsys.readouterr().err


FAULTS = ["--launch.hang_timeout", "20", "--weights.transport", "ipc"]


def find_processes(parent: int) -> dict[str, list[psutil.Process]]:
    """Return the processes of a run by their role."""
    processes: dict[str, list[psutil.Process]] = {}
    for child in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command_line = " ".join(child.cmdline())
            for role in ("orchestrator", "trainer", "serve", "env-server"):
                if f"ramify {role} " in command_line:
                    processes.setdefault(role, []).append(child)
            if "envserver" in command_line:
                processes.setdefault("worker", []).append(child)
    return processes


def read_committed_step(home: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return max((int(path.name[5:11]) for path in (home / "outputs/run/checkpoints").glob("step_*")), default=0)
    return 0


def test_killed_and_stopped_processes_are_restarted_without_loss(tmp_path):
    """A stopped orchestrator is reported by `why`, killed by the supervisor, and restarted."""
    home = write_config(tmp_path, steps=4 * KILLS if FULL else 6, off_policy=2)
    rng = random.Random(7)
    roles = ["trainer", "orchestrator", "serve", "env-server", "worker"]
    with (home / "output.txt").open("w") as output:
        run = subprocess.Popen(command("rl", "@", "rl.toml", *FAULTS), cwd=home, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + (TIMEOUT if not FULL else 3000)
            killed: list[str] = []
            while run.poll() is None:
                assert time.monotonic() < deadline, (home / "output.txt").read_text()[-3000:]
                time.sleep(0.05)
                if len(killed) < KILLS and read_committed_step(home) > 2 * len(killed):
                    role = roles[len(killed) % 2] if not FULL else rng.choice(roles)
                    for victim in find_processes(run.pid).get(role, [])[-1:]:  # the command, not its watcher
                        victim.send_signal(signal.SIGKILL if role != "orchestrator" else signal.SIGSTOP)
                        killed.append(role)
                        if role == "orchestrator":
                            why = run_command("why", "outputs/run", cwd=home).stdout
                            assert f": process {victim.pid}, stopped\n" in why, why
                            assert "outputs/run step=" in why
        finally:
            run.kill()
            run.wait()
    text = (home / "output.txt").read_text()
    assert run.returncode == 0, text[-3000:]
    assert len(killed) == KILLS, (killed, text[-3000:])
    assert text.count("stopped) has not answered at http://") == killed.count("orchestrator")
    assert text.count("last state, ") == killed.count("orchestrator")
    audit = run_command("why", "outputs/run", "--audit", cwd=home)
    assert audit.returncode == 0, audit.stdout + audit.stderr
