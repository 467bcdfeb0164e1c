"""`ramify rl` trains on compacted rollouts of the harness bash, in every runtime of this machine."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

import ramify as rf
from ramify.harness.compaction import SUMMARY_REQUEST
from ramify.runtime.bwrap import find_unsupported_reason
from ramify.store import RunStore
from ramify.trace import Forest, Trace
from ramify.train.batch_source import BatchRecording
from tests.rollout.helpers import tool_call
from tests.support.runs import read_values, run_command
from tests.support.scripted_server import run_scripted_server

RUNTIMES = ["local"] if find_unsupported_reason() else ["local", "sandbox"]
NUM_DIGITS = 4
STEPS, GROUP_SIZE, COMPACT_AT, SEQ_LEN = 2, 2, 560, 1000
pytestmark = [
    pytest.mark.run,
    pytest.mark.timeout(300),
    pytest.mark.full("a minute of two cores; tests/harness has the parts"),
]

CONFIG = f"""
name = "run"
max_steps = {STEPS}
seq_len = {SEQ_LEN}
record_batches = true
inference = {{ engine = "external", base_url = ["BASE_URL"] }}

[orchestrator]
batch_size = {GROUP_SIZE}
group_size = {GROUP_SIZE}
max_staleness = 0

[trainer.optim]
lr = 1e-4
"""
SOURCE = f"""
[[train]]
name = "RUNTIME"
taskset = {{ id = "tests.rl.test_compaction:NoteTaking" }}
harness = {{ id = "bash", system_prompt = "", compact_at = {COMPACT_AT} }}
runtime = {{ id = "RUNTIME" }}
sampling = {{ max_tokens = 150 }}
max_turns = 30
"""


class NoteTaking(rf.Taskset):
    """The agent appends digits to a file, one command each; the reward is their mean.

    It cannot remember more than its summary says.
    """

    def load(self) -> Iterator[rf.Task]:
        for number in range(4):
            yield rf.Task(system="Count.", prompt=f"Write {NUM_DIGITS} digits for {number}.", key=f"task-{number}")

    @rf.reward
    async def mean_digit(self, runtime: rf.Runtime) -> float:
        return fmean(await read_digits(runtime)) / 9

    @rf.metric
    async def num_digits(self, runtime: rf.Runtime) -> float:
        return float(len(await read_digits(runtime)))


async def read_digits(runtime: rf.Runtime) -> list[int]:
    return [int(line) for line in (await runtime.read("digits.txt")).split()]


def reply_to(prompt: str, seed: int) -> str:
    """Return the agent's reply: the next command, a summary, or the answer."""
    remembered = re.findall(r"I wrote (\d) digits", prompt)
    num_written = int(remembered[-1] if remembered else 0) + prompt.count("</tool_response>")
    if SUMMARY_REQUEST.text in prompt:
        return f"I wrote {num_written} digits."
    if num_written == NUM_DIGITS:
        return "I wrote all digits."
    digit = random.Random(seed).randrange(10)
    return tool_call("bash", command=f"echo {digit} >> digits.txt; wc -l digits.txt")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """The directory of a finished run."""
    home = tmp_path_factory.mktemp("compacted")
    with run_scripted_server(home, "tests.rl.test_compaction:reply_to") as server:
        sources = "".join(SOURCE.replace("RUNTIME", runtime) for runtime in RUNTIMES)
        (home / "rl.toml").write_text(CONFIG.replace("BASE_URL", server.url) + sources)
        result = run_command("rl", "@", str(home / "rl.toml"), "-o", str(home / "outputs"), cwd=Path.cwd())
        assert result.returncode == 0, result.stdout + result.stderr + server.log.read_text()
    return home


@pytest.fixture(scope="module")
def traces(home) -> dict[str, Trace]:
    with RunStore.open(home / "outputs/run", write=False) as store:
        episodes = [store.read_traces(record.id) for record in store.rollouts()]
    return {trace.id: trace for episode in episodes for trace in episode}


@pytest.fixture(scope="module")
def batches(home) -> list[list[Forest]]:
    """The packs of every step."""
    recording = BatchRecording(home / "outputs/run/batches")
    return [[pack for share in recording.read_shares(step) for pack in share.packs] for step in recording.list_steps()]


def test_rollouts_are_compacted_and_work_on_in_the_same_box(traces):
    assert {trace.env for trace in traces.values()} == set(RUNTIMES)  # one after another, a group each
    for trace in traces.values():
        assert not trace.errors and trace.stop == "done"
        assert trace.metrics["compactions"] == 2
        assert len(trace.leaves) == 3
        assert trace.metrics["num_digits"] == NUM_DIGITS  # of all branches
        assert all(trace.graph.path_length(leaf) <= SEQ_LEN for leaf in trace.leaves)
    assert any(trace.graph.tokens.size > SEQ_LEN for trace in traces.values())


def test_every_reply_of_a_batch_is_trained_and_also_the_summaries(traces, batches):
    assert len(batches) == STEPS
    for packs in batches:
        trained = {
            (pack.traces[trace], node) for pack in packs for trace, node in zip(pack.calls["trace"], pack.calls["node"])
        }
        used = {trace for trace, _ in trained}
        assert trained == {(trace, node) for trace in used for node in traces[trace].sampled_nodes}
        summaries = [traces[trace].nodes[node].message.text for trace, node in trained]
        assert sum(text.startswith("I wrote") and text.endswith("digits.") for text in summaries) >= 2 * len(used)
        num_sampled = sum(traces[trace].graph.logprobs.size for trace in used)
        assert sum(len(pack.targets.token) for pack in packs) == num_sampled


def test_trainer_agrees_with_the_logprobs_of_the_engine(home):
    assert all(kl < 1e-3 for kl in read_values(home / "outputs/run", "mismatch_kl"))
    assert all(norm > 0 for norm in read_values(home / "outputs/run", "train/grad_norm"))
