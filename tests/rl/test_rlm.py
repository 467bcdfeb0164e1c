"""`ramify rl` with the harness rlm: calls of llm are trained as branches of the rollout."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import ramify as rf
from ramify.runtime.bwrap import find_unsupported_reason
from ramify.store import RunStore
from ramify.trace import Trace
from ramify.train.batch_source import BatchRecording
from tests.rollout.helpers import tool_call
from tests.support.runs import read_values, run_command
from tests.support.scripted_server import run_scripted_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "wikispeedia" / "rl_rlm.toml"
CODE = "parts = [llm('Say 1'), llm('Say 2'), *llm_batch(['Say 3', 'Say 4', 'Say 5'])]\nprint(parts)"
NUM_CALLS = 5  # of llm in this code
STEPS = 2
pytestmark = [pytest.mark.run, pytest.mark.timeout(600), pytest.mark.full("runs of half a minute of two cores")]
CONFIG = f"""
name = "run"
max_steps = {STEPS}
seq_len = 1024
record_batches = true
inference = {{ engine = "external", base_url = ["BASE_URL"] }}

[orchestrator]
batch_size = 4
group_size = 4
max_staleness = 0

[[train]]
taskset = {{ id = "tests.rl.test_rlm:Recursion" }}
harness = {{ id = "rlm" }}
runtime = {{ id = "RUNTIME" }}
sampling = {{ max_tokens = 200 }}
"""


class Recursion(rf.Taskset):
    """The reward is the last digit of the answer."""

    def load(self) -> Iterator[rf.Task]:
        for number in range(4):
            yield rf.Task(prompt=f"Ask for digits, {number}.", key=f"task-{number}")

    @rf.reward
    def last_digit(self, trace: rf.Trace) -> float:
        return int(trace.last_reply[-1]) / 9


def reply_to(prompt: str, seed: int) -> str:
    """Return the reply of the policy: a digit to a call of llm, code to the task."""
    digit = random.Random(seed).randrange(10)
    if "Ask for digits" not in prompt:
        return str(digit)
    if "</tool_response>" not in prompt:
        return tool_call("python", code=CODE)
    return tool_call("python", code=f"answer = ''.join(parts) + '{digit}'")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """The directory of a finished run."""
    home = tmp_path_factory.mktemp("recursive")
    with run_scripted_server(home, "tests.rl.test_rlm:reply_to") as server:
        config = CONFIG.replace("BASE_URL", server.url).replace(
            "RUNTIME", "local" if find_unsupported_reason() else "sandbox"
        )
        (home / "rl.toml").write_text(config)
        result = run_command("rl", "@", str(home / "rl.toml"), "-o", str(home / "outputs"), cwd=Path.cwd())
        assert result.returncode == 0, result.stdout + result.stderr + server.log.read_text()
    return home


@pytest.fixture(scope="module")
def traces(home) -> dict[str, Trace]:
    with RunStore.open(home / "outputs/run", write=False) as store:
        episodes = [store.read_traces(record.id) for record in store.rollouts()]
    return {trace.id: trace for episode in episodes for trace in episode}


def test_every_rollout_is_one_tree_with_a_branch_per_call(traces):
    for trace in traces.values():
        assert not trace.errors and trace.stop == "answer_is_set"
        (root,) = [node for node in trace.nodes if node.parent < 0]
        assert len(root.children) == len(trace.leaves) == 1 + NUM_CALLS
        assert len(trace.last_reply) == NUM_CALLS + 1


def test_every_reply_is_trained_in_packs_without_repeated_prompts(home, traces):
    recording = BatchRecording(home / "outputs/run/batches")
    assert len(recording.list_steps()) == STEPS
    for step in recording.list_steps():
        packs = [pack for share in recording.read_shares(step) for pack in share.packs]
        trained = {
            (pack.traces[trace], node) for pack in packs for trace, node in zip(pack.calls["trace"], pack.calls["node"])
        }
        used = {trace for trace, _ in trained}
        assert trained == {(trace, node) for trace in used for node in traces[trace].sampled_nodes}
        assert sum(pack.num_tokens for pack in packs) <= sum(traces[trace].total_tokens for trace in used)


def test_the_example_trains_two_steps(tmp_path):
    result = run_command("rl", "@", str(EXAMPLE), "--name", "run", "--max_steps", "2", cwd=tmp_path, timeout=580)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "finished: all 2 steps" in result.stdout
    assert len(read_values(tmp_path / "outputs/run", "reward/all/mean")) == 2
