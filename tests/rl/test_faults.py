"""A run whose processes are killed and stopped trains every batch once.

It trains LoRA adapters, also on what a teacher sampled.
"""

import contextlib
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from ramify.cli import main
from ramify.model.resolve import resolve_model_path
from ramify.store import RunStore
from ramify.store.ledger import Ledger
from tests.support.runs import FULL, TIMEOUT, command, read_values, write_config

pytestmark = pytest.mark.run

KILLS = 20 if FULL else 2
ROLES = ["trainer", "orchestrator", "serve", "env-server", "worker"]
FAULTS = ["--launch.hang_timeout", "12", "--weights.transport", "ipc"]
LORA = ["--trainer.lora.enabled", "true", "--trainer.lora.rank", "8", "--trainer.lora.alpha", "16"]
TAUGHT = """
[[train]]
name = "taught"
taskset = { id = "reverse-text", num_tasks = 16, seed = 1 }
sampling = { max_tokens = 40 }
max_turns = 1
algorithm = { id = "sft" }
teacher = "teacher"

[models.teacher]
name = "tiny"
"""


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


def read_committed_step(run: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        return max((int(path.name[5:11]) for path in (run / "checkpoints").glob("step_*")), default=0)
    return 0


@pytest.mark.promise
def test_killed_and_stopped_processes_are_restarted_without_loss(tmp_path, capsys):
    """A stopped orchestrator is reported by `why`, killed by the supervisor, and restarted."""
    home = write_config(tmp_path, steps=4 * KILLS if FULL else 5, max_staleness=2, interval=1, more=TAUGHT)
    run, rng, killed = home / "outputs" / "run", random.Random(7), list[str]()
    with (home / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command("rl", "@", "rl.toml", *FAULTS, *LORA), cwd=home, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            deadline = time.monotonic() + (3000 if FULL else TIMEOUT)
            while process.poll() is None:
                assert time.monotonic() < deadline, (home / "output.txt").read_text()[-3000:]
                time.sleep(0.05)
                if len(killed) == KILLS or read_committed_step(run) <= len(killed):
                    continue
                role = rng.choice(ROLES) if FULL else ROLES[len(killed)]
                for victim in find_processes(process.pid).get(role, [])[-1:]:  # the command, not its watcher
                    victim.send_signal(signal.SIGKILL if role != "orchestrator" else signal.SIGSTOP)
                    killed.append(role)
                    if role == "orchestrator":
                        assert main(["why", str(run)]) == 0
                        why = capsys.readouterr().out
                        assert f": process {victim.pid}, stopped\n" in why, why
                        assert "outputs/run step=" in why
        finally:
            process.kill()
            process.wait()
    text = (home / "output.txt").read_text()
    assert process.returncode == 0, text[-3000:]
    assert len(killed) == KILLS, (killed, text[-3000:])
    assert text.count("stopped) has not answered at http://") == killed.count("orchestrator")
    assert text.count("last state, ") == killed.count("orchestrator")
    assert main(["why", str(run), "--audit"]) == 0, capsys.readouterr()
    assert read_values(run, "loss/ce")
    with RunStore.open(run, write=False) as store:
        trained = {group.source for group in Ledger.open_readonly(store).groups() if group.step is not None}
    assert trained == {"warm", "taught"}
    before = load_file(resolve_model_path("tiny") / "model.safetensors")
    after = load_file(max((run / "weights").glob("*-*")) / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor.float(), after[name])}
    assert changed and all("_proj" in name for name in changed), "adapters are merged into linear maps only"
