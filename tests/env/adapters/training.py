"""Short runs of `ramify eval` and `ramify rl` with `tiny` on a source that runs in another interpreter."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from ramify.run.store import RunStore
from ramify.trace import Trace

DEADLINE = 1800  # seconds of one command
RUN = """
max_steps = 3
seq_len = 512

[model]
name = "tiny"

[orchestrator]
batch_size = 16
group_size = 4
max_staleness = 2

[trainer]
pack_tokens = 4096

[trainer.optim]
lr = 1e-4
"""


def run_ramify(*arguments: str) -> str:
    """Run a command and return its output. Raises AssertionError if it fails."""
    command = [sys.executable, "-m", "ramify", *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE)
    assert result.returncode == 0, f"{' '.join(arguments)} exited with {result.returncode}:\n{result.stdout[-4000:]}"
    return result.stdout


def write_run(folder: Path, name: str, source: dict[str, Any], *, steps: int, **tables: Any) -> Path:
    """Write the configuration of a run on one source; `tables` replace keys of the default one."""
    config = tomllib.loads(RUN)
    config |= tables.pop("run", {})
    for key, table in tables.items():
        config[key] = {**config.get(key, {}), **table}
    source = {"sampling": {"temperature": 1.0, "max_tokens": 48}, "name": name, **source}
    file = folder / f"{name}.toml"
    folder.mkdir(parents=True, exist_ok=True)
    run = {**config, "name": name, "output": str(folder), "max_steps": steps, "train": [source]}
    file.write_text(tomli_w.dumps(run))
    return file


def write_eval(folder: Path, name: str, config: dict[str, Any]) -> Path:
    """Write the configuration of an eval."""
    file = folder / f"{name}.toml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(tomli_w.dumps({"sampling": {"max_tokens": 32}, **config, "name": name, "output": str(folder)}))
    return file


def train(folder: Path, name: str, source: dict[str, Any], *, steps: int, **tables: Any) -> list[Trace]:
    """Train `steps` steps, check that they were trained, and return the traces of all rollouts."""
    run_ramify("rl", "@", str(write_run(folder, name, source, steps=steps, **tables)))
    shown = run_ramify("metrics", str(folder / name))
    assert "loss" in shown, shown
    with RunStore.open(folder / name, write=False) as store:
        traces = [trace for row in store.rollouts() for trace in store.read_traces(row.id)]
    assert len(traces) >= steps * 16, f"{len(traces)} rollouts of {steps} steps"
    for trace in traces:
        check_sampled_tokens(trace)
    return traces


def check_sampled_tokens(trace: Trace) -> None:
    """Check that every reply in the trace has the ids that were sampled, with their logprobs."""
    for node in trace.nodes:
        if node.message.role == "assistant" and node.call is not None:
            start, stop = node.sampled_span
            assert stop - start == node.call.usage.completion_tokens > 0, (trace.id, node.index)
            assert len(node.logprobs) == stop - start, (trace.id, node.index)
