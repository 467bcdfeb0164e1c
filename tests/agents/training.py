"""`ramify rl` on rollouts of a program: two steps, and how many tokens they computed."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ramify.run.store import Ledger, RunStore
from ramify.trace import Trace
from tests.agents.rollouts import build_source
from tests.support.external_runs import RUN_START, format_table, read_metric

NUM_STEPS = 2
MAX_TOKEN_RATIO = 1.1
RL_DEADLINE = 1500  # seconds
RUN_CONFIG = (
    RUN_START
    + """
[[train]]
name = "agent"
taskset = {taskset}
harness = {harness}
runtime = {runtime}
sampling = {sampling}
"""
)


@dataclass(frozen=True)
class StepTokens:
    """The tokens of one training step."""

    packed: int
    """Tokens that the trainer computed."""
    unique_context: int
    """Tokens of prompts and tool results; those that several rollouts of a group begin with count once."""
    replies: int
    """Sampled tokens of all rollouts."""

    @property
    def ratio(self) -> float:
        """Computed tokens, relative to those that are needed."""
        return self.packed / (self.unique_context + self.replies)


def train(program: str, programs: Path, url: str, model: Path, folder: Path) -> list[StepTokens]:
    """Train two steps with a running server; return the tokens of each step."""
    config = folder / f"{program}.toml"
    config.write_text(format_run(program, programs, url, model, folder))
    command = [sys.executable, "-m", "ramify", "rl", "@", str(config)]
    with (folder / f"{program}.rl.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, timeout=RL_DEADLINE)
    run = folder / "outputs" / program
    packed = [int(tokens) for tokens in read_metric(run, "forest/tokens")]
    assert len(packed) == NUM_STEPS, packed
    return [StepTokens(tokens, *counts) for tokens, counts in zip(packed, count_tokens(run))]


def format_run(program: str, programs: Path, url: str, model: Path, folder: Path) -> str:
    """Return the configuration file of the run."""
    source = {name: format_table(table) for name, table in build_source(program, programs).items()}
    sizes = {"seq_len": 45056, "pack_tokens": 49152}
    return RUN_CONFIG.format(name=program, url=url, model=model, folder=folder, **source, **sizes)


def count_tokens(run: Path) -> list[tuple[int, int]]:
    """Return the unique context tokens and the sampled tokens of each step of a run."""
    counts: list[tuple[int, int]] = []
    with RunStore.open(run, write=False) as store:
        ledger = Ledger.open_readonly(store)
        for batch in ledger.batches():
            contexts, num_sampled = set[int](), 0
            for number in batch.group_numbers:
                for attempt in ledger.attempts(number):
                    assert attempt.rollout_id is not None, attempt
                    (trace,) = store.read_traces(attempt.rollout_id)
                    num_sampled += add_context(trace, number, contexts)
            counts.append((len(contexts), num_sampled))
    return counts


def add_context(trace: Trace, group: int, contexts: set[int]) -> int:
    """Add the prefixes of a trained conversation that end in a context token; return the number of sampled tokens."""
    leaf = max(index for index in trace.sampled_nodes if trace.nodes[index].is_trainable)
    path: list[int] = []
    while leaf >= 0:
        path.insert(0, leaf)
        leaf = trace.nodes[leaf].parent
    prefix, num_sampled = hash(group), 0
    for index in path:
        node = trace.nodes[index]
        start, stop = node.sampled_span
        for position, token in enumerate(node.token_ids.tolist()):
            prefix = hash((prefix, token))
            if start <= position < stop:
                num_sampled += 1
            else:
                contexts.add(prefix)
    return num_sampled
