"""Two steps of each example with a random model: does the run go through on this machine?

A run has the example's environments, algorithm and lengths, with four times its `seq_len`, because the tokenizer of
the random model has few merges, and with small groups and batches. A random model earns nothing, so every second
attempt counts as good (`_alternating.py`). Examples that need other software are skipped by name.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _loop import ramify_command

from ramify.core.config import write_toml
from ramify.orchestrate.run_config import RunConfig
from ramify.run.reader import read_metrics

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
MORE_EXAMPLES = (  # besides all rl.toml
    "from_verifiers/adapter.toml",
    "reverse_text/agent.toml",
    "reverse_text/duel.toml",
    "reverse_text/judged.toml",
    "reverse_text/turns.toml",
    "wikispeedia/rl_rlm.toml",
    "multi_env/rl_gpu_shared.toml",  # mathematics, Wordle and sorting, with LoRA
)
SKIPPED = {
    "color_codeword/rl": "needs a vision-language model",
    "from_verifiers/adapter": "needs verifiers in an environment of its own",
    "reverse_text/judged": "needs a judge",
}
STEPS, BATCH_SIZE, GROUP_SIZE, EVAL_TASKS, LENGTH_FACTOR = 2, 32, 4, 4, 4
ALGORITHM = f"{Path(__file__).with_name('_alternating.py')}:Alternating"
FAILURE = re.compile(r"^([A-Z][A-Za-z]+): ", re.MULTILINE)
STOP_TIMEOUT = 30.0  # seconds
MAX_FAILURE_CHARS = 120


@dataclass(frozen=True, slots=True)
class SmokeResult:
    """What became of one example. `failure` is empty if the run made its steps."""

    name: str
    seconds: float = 0.0
    steps: int = 0
    trainable: float = 0.0  # fraction of the groups
    mismatch_kl: float = 0.0
    failure: str = ""

    def format(self) -> str:
        """Return the row of a table."""
        if self.failure:
            return f"{self.name:<28} {self.seconds:7.1f} s  {self.failure}"
        parts = f"{self.steps} steps  trainable groups {self.trainable:.2f}  mismatch KL {self.mismatch_kl:.2e}"
        return f"{self.name:<28} {self.seconds:7.1f} s  {parts}"


def list_examples(names: Sequence[str]) -> dict[str, Path]:
    """Return the files of the examples by name, such as `wordle/rl`; only those in `names` if there are any."""
    files = sorted({*EXAMPLES.glob("*/rl.toml"), *(EXAMPLES / name for name in MORE_EXAMPLES)})
    examples = {str(file.relative_to(EXAMPLES).with_suffix("")): file for file in files}
    if unknown := set(names) - set(examples):
        raise SystemExit(f"no example {', '.join(sorted(unknown))}; there are {', '.join(examples)}")
    return {name: file for name, file in examples.items() if name in (names or examples)}


def find_skip_reason(name: str) -> str:
    """Return why an example cannot run on this machine; empty if it can."""
    if name.startswith("mcp_agent/") and importlib.util.find_spec("mcp") is None:
        return "needs the package mcp"
    return SKIPPED.get(name, "")


def write_config(file: Path, path: Path, *, model: Path, output: Path, device: str) -> None:
    """Write the configuration of a smoke run of an example to `path`."""
    table: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    table |= {"name": path.stem, "output": str(output), "max_steps": STEPS}
    table["seq_len"] = LENGTH_FACTOR * table["seq_len"]
    table["model"] = {**table["model"], "name": str(model)}
    table["orchestrator"] = {**table["orchestrator"], "batch_size": BATCH_SIZE, "group_size": GROUP_SIZE}
    table["inference"] = {**table.get("inference", {}), "device": device}
    table["trainer"] = {**table["trainer"], "device": device, "pack_tokens": "auto"}
    table["checkpoint"] = {"interval": 1000}
    for source in table["train"]:
        source["algorithm"] = {"id": ALGORITHM}
    for source in table.get("eval", ()):
        source["num_tasks"] = EVAL_TASKS
    write_toml(RunConfig.model_validate(table), path)


def run_example(name: str, file: Path, home: Path, *, model: Path, args: Any) -> SmokeResult:
    """Run an example; return its result, also if it fails. Its output is removed."""
    stem = name.replace("/", "-")
    output, log = (args.output or home).absolute() / "outputs", home / f"{stem}.log"
    write_config(file, home / f"{stem}.toml", model=model, output=output, device=args.device)
    started = time.monotonic()
    command = ramify_command("rl", "@", str(home / f"{stem}.toml"), *shlex.split(args.rl_flags))
    with log.open("w") as log_file:
        run = subprocess.Popen(command, cwd=ROOT, stdout=log_file, stderr=log_file)
        try:
            code, failure = run.wait(args.run_timeout), ""
        except subprocess.TimeoutExpired:
            run.terminate()
            code, failure = 0, f"not finished after {args.run_timeout:g} s"
            try:
                run.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
    seconds = time.monotonic() - started
    if code:
        failure = f"exit code {code}: {find_failure(log.read_text())}"
    values: dict[str, list[float]] = {}
    if not failure:
        for metric in read_metrics(output / stem):
            values.setdefault(metric.name, []).append(metric.value)
    shutil.rmtree(output / stem, ignore_errors=True)
    steps = len(values.get("train/seconds", ()))
    if not failure and steps < STEPS:
        failure = f"trained {steps} of {STEPS} steps"
    means = {key: statistics.fmean(values.get(key, [0.0])) for key in ("trainable", "mismatch_kl")}
    return SmokeResult(name, seconds, steps, means["trainable"], means["mismatch_kl"], failure)


def find_failure(log: str) -> str:
    """Return the name of the last failure in a log or, without one, the last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    return next(iter(FAILURE.findall(log)[-1:] or lines[-1:]), "nothing was logged")[:MAX_FAILURE_CHARS]


def run_examples(model: Path, home: Path, args: Any) -> int:
    """Run all examples, print a row for each as soon as it has ended, and return 1 if one failed."""
    num_failed = 0
    started = time.monotonic()
    for name, file in list_examples(args.examples).items():
        if reason := find_skip_reason(name):
            print(f"{name:<28} skipped: {reason}", flush=True)
        elif time.monotonic() - started > args.limit:
            print(f"{name:<28} skipped: {args.limit:g} s are over", flush=True)
        else:
            result = run_example(name, file, home, model=model, args=args)
            num_failed += bool(result.failure)
            print(result.format(), flush=True)
            if result.failure:
                log = home / f"{name.replace('/', '-')}.log"
                print(log.read_text()[-1500:], file=sys.stderr, flush=True)
    return min(1, num_failed)
