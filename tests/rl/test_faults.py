"""A run whose processes are killed and stopped trains every batch once."""

import random

import pytest

from ramify.cli import main
from ramify.model.resolve import resolve_model_path
from ramify.run.store import RunStore
from ramify.run.store.ledger import Ledger
from tests.support.runs import read_values, run_with_faults, write_config

pytestmark = pytest.mark.run

KILLS = 20
ROLES = ["trainer", "orchestrator", "serve", "env-server", "worker"]
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


def check_faults(home, num_faults: int) -> None:
    """Check that a stopped orchestrator was reported by `why`, killed by the supervisor, and that nothing was lost."""
    text, faults = (home / "output.txt").read_text(), (home / "faults.txt").read_text().split()
    assert len(faults) == num_faults, (faults, text[-3000:])
    assert text.count("stopped) has not answered at http://") == faults.count("orchestrator")
    assert text.count("last state, ") == faults.count("orchestrator")
    pid, why = (home / "why.txt").read_text().split("\n", 1)
    assert f": process {pid}, stopped\n" in why, why
    assert "outputs/run step=" in why
    assert main(["why", str(home / "outputs" / "run"), "--audit"]) == 0


@pytest.mark.promise
def test_killed_and_stopped_processes_are_restarted_without_loss(finished_run):
    check_faults(finished_run.parents[1], 2)


@pytest.mark.full("the finished run has one process of each role")
def test_two_engines_env_servers_and_ranks_on_one_machine_survive_kills(tmp_path):
    write_config(tmp_path, steps=8, max_staleness=1, interval=1)
    counts = {"engines.num_replicas": 2, "env_servers.num_per_source": 2, "trainer.num_ranks": 2}
    flags = [word for key, count in counts.items() for word in (f"--cluster.{key}", str(count))]
    run_with_faults(tmp_path, ["orchestrator", "serve", "trainer", "env-server"], *flags, timeout=900.0)
    check_faults(tmp_path, 4)
    assert "trainer ranks=2 token=1 " in (tmp_path / "outputs/run/logs/trainer.log").read_text()


@pytest.mark.full("twenty kills; the finished run has two")
def test_run_with_adapters_and_a_teacher_survives_many_kills(tmp_path):
    import torch
    from safetensors.torch import load_file

    write_config(tmp_path, steps=4 * KILLS, max_staleness=2, interval=1, more=TAUGHT)
    rng = random.Random(7)
    run_with_faults(tmp_path, ["orchestrator", *rng.choices(ROLES, k=KILLS - 1)], *LORA, timeout=3000.0)
    check_faults(tmp_path, KILLS)
    run = tmp_path / "outputs" / "run"
    assert read_values(run, "loss/ce")
    with RunStore.open(run, write=False) as store:
        trained = {group.source for group in Ledger.open_readonly(store).groups() if group.step is not None}
    assert trained == {"warm", "taught"}
    before = load_file(resolve_model_path("tiny") / "model.safetensors")
    after = load_file(max((run / "weights").glob("*-*")) / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor.float(), after[name])}
    assert changed and all("_proj" in name for name in changed), "adapters are merged into linear maps only"
