"""Self-play by `rae`: the baselines survive kills, and training with them is faster than without."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from ramify.orchestrate.core import ALGORITHM_STATE_PREFIX
from ramify.store import RunStore
from ramify.store.ledger import Ledger
from tests.support.runs import command, read_values, run_command, wait_for_process

pytestmark = pytest.mark.run

EXAMPLES = Path(__file__).parents[2] / "examples" / "reverse_text"
STEPS, KILLS = 10, 4
RUN_TIMEOUT = 600.0  # seconds
# One group at a time and weights that hardly change: a rollout that is sampled again is the same one.
CONFIG = f"""
name = "run"
max_steps = {STEPS}
seq_len = 256

[orchestrator]
batch_size = 4
group_size = 4
max_staleness = 0

[trainer]
threads = 1

[trainer.optim]
lr = 1e-12

[checkpoint]
interval = 3

[launch]
max_restarts = 100

[[train]]
name = "duel"
taskset = {{ id = "{EXAMPLES / "duel.py"}" }}
sampling = {{ temperature = 1.0, max_tokens = 48 }}
algorithm = {{ id = "rae", decay = 0.8 }}
"""
NO_BASELINE = """
import ramify as rf


class Reinforce(rf.Algorithm):
    def advantages(self, rewards, traces):
        return rewards
"""


def read_baselines(home: Path) -> dict[str, list[float]]:
    with RunStore.open(home / "outputs/run", write=False) as store:
        return Ledger.open_readonly(store).load_states(ALGORITHM_STATE_PREFIX)["duel"]


def kill_during_run(home: Path, process: str) -> None:
    """Run to the end, and kill one of its processes again and again, each time a few steps later."""
    path = home / "outputs/run"
    with (home / "output.txt").open("w") as output:
        run = subprocess.Popen(command("rl", "@", "rl.toml"), cwd=home, stdout=output, stderr=output)
        try:
            for number in range(KILLS):
                os.kill(wait_for_process(run, path, process, step=2 * number + 1, timeout=RUN_TIMEOUT), signal.SIGKILL)
            assert run.wait(RUN_TIMEOUT) == 0, (home / "output.txt").read_text()
        finally:
            run.kill()
            run.wait()


@pytest.mark.timeout(1800)
@pytest.mark.full("three runs, two of them with kills")
def test_baselines_after_kills_equal_those_of_an_undisturbed_run(tmp_path):
    baselines = {}
    for killed in ("none", "orchestrator", "trainer"):
        home = tmp_path / killed
        home.mkdir()
        (home / "rl.toml").write_text(CONFIG)
        if killed == "none":
            assert run_command("rl", "@", "rl.toml", cwd=home, timeout=RUN_TIMEOUT).returncode == 0
        else:
            kill_during_run(home, killed)
        baselines[killed] = read_baselines(home)
        assert run_command("why", "outputs/run", "--audit", cwd=home).returncode == 0
    assert {agent: count for agent, (_, count) in baselines["none"].items()} == {"first": STEPS, "second": STEPS}
    assert baselines["orchestrator"] == baselines["trainer"] == baselines["none"]


@pytest.mark.timeout(1800)
@pytest.mark.full("minutes of two cores")
def test_rae_learns_and_no_baseline_is_slower(tmp_path):
    (tmp_path / "reinforce.py").write_text(NO_BASELINE)
    evals = {}
    for id in ("rae", "reinforce.py"):
        home = tmp_path / id.removesuffix(".py")
        home.mkdir()
        options = ["--name", "run", "--max_steps", "20", "--train.0.taskset.id", str(EXAMPLES / "duel.py")]
        algorithm = ["--train.0.algorithm.id", id if id == "rae" else str(tmp_path / id)]
        arguments = ["rl", "@", str(EXAMPLES / "duel.toml"), *options, *algorithm]
        result = run_command(*arguments, cwd=home, timeout=RUN_TIMEOUT)
        assert result.returncode == 0, result.stdout + result.stderr
        evals[id] = read_values(home / "outputs/run", "eval/held-out/avg")
    assert evals["rae"][-1] >= evals["rae"][0] + 0.3
    assert evals["reinforce.py"][-1] <= evals["rae"][-1] - 0.03
