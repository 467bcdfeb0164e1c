"""The whole loop with real processes: it trains, it survives, it explains itself."""

import contextlib
import random
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import psutil

import ramify as rf
from tests.rl.running import DEADLINE, FULL, KILLS, ask, command, metrics, write


def test_every_step_was_trained_and_the_numbers_are_there(finished):
    assert len(metrics(finished, "reward/all/mean")) == 3
    assert len(metrics(finished, "train/grad_norm")) == 3
    assert all(ratio > 1.5 for ratio in metrics(finished, "forest/token_ratio"))
    assert len(metrics(finished, "eval/held-out/avg")) == 2  # before the first step and at the end


def test_the_ledger_agrees_with_itself(finished):
    said = ask("why", "outputs/run", "--audit", cwd=finished)
    assert said.returncode == 0, said.stdout + said.stderr


def test_the_same_command_again_says_that_it_is_finished(finished):
    said = ask("rl", "@", "rl.toml", cwd=finished)
    assert said.returncode == 0 and "finished" in said.stdout + said.stderr


def test_a_program_runs_it_by_the_same_tables(finished, monkeypatch):
    monkeypatch.chdir(finished)
    ended = rf.rl(tomllib.loads((finished / "rl.toml").read_text()))
    assert (ended.path, ended.outcome.value, ended.did_run) == (Path("outputs/run"), 0, False)


def test_another_model_is_another_run(finished):
    said = ask("rl", "@", "rl.toml", "--train.0.sampling.temperature", "0.9", cwd=finished)
    assert said.returncode == 2 and "temperature" in said.stderr


WATCHED = ["--launch.hang_timeout", "10"]


def processes(parent: int) -> dict[str, list[psutil.Process]]:
    """The processes of a run by what they are."""
    found: dict[str, list[psutil.Process]] = {}
    for child in psutil.Process(parent).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join(child.cmdline())
            for role in ("orchestrator", "trainer", "serve", "env-server"):
                if f"ramify {role} " in words or f"ramify.cli.parent_watch {role} " in words:
                    found.setdefault(role, []).append(child)
            if "envserver" in words:
                found.setdefault("worker", []).append(child)
    return found


def committed(home: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return max((int(path.name[5:]) for path in (home / "outputs/run/checkpoints").glob("step_*")), default=0)
    return 0


def test_processes_are_killed_or_stopped_and_nothing_is_lost_or_counted_twice(tmp_path):
    """The orchestrator is stopped: `why` says so meanwhile, and the supervisor kills it and starts another one."""
    home = write(tmp_path, steps=4 * KILLS if FULL else 8, off_policy=2)
    rng = random.Random(7)
    roles = ["trainer", "orchestrator", "serve", "env-server", "worker"]
    with (home / "said.txt").open("w") as said:
        run = subprocess.Popen(command("rl", "@", "rl.toml", *WATCHED), cwd=home, stdout=said, stderr=said)
        try:
            end = time.monotonic() + (DEADLINE if not FULL else 3000)
            killed: list[str] = []
            while run.poll() is None:
                assert time.monotonic() < end, (home / "said.txt").read_text()[-3000:]
                time.sleep(0.05)
                if len(killed) < KILLS and committed(home) >= 2 * (len(killed) + 1):
                    role = roles[len(killed) % 2] if not FULL else rng.choice(roles)
                    for victim in processes(run.pid).get(role, [])[-1:]:  # the command, and not what holds it
                        victim.send_signal(signal.SIGKILL if role != "orchestrator" else signal.SIGSTOP)
                        killed.append(role)
                        if role == "orchestrator":
                            described = ask("why", "outputs/run", cwd=home).stdout
                            assert f": process {victim.pid}, stopped\n" in described, described
                            assert "outputs/run step=" in described
        finally:
            run.kill()
            run.wait()
    text = (home / "said.txt").read_text()
    assert run.returncode == 0, text[-3000:]
    assert len(killed) == KILLS, (killed, text[-3000:])
    assert text.count("stopped) has not answered at http://") == killed.count("orchestrator")
    assert text.count("last state, ") == killed.count("orchestrator")
    audit = ask("why", "outputs/run", "--audit", cwd=home)
    assert audit.returncode == 0, audit.stdout + audit.stderr
