"""Run the steps of a workflow on this machine: `python -m tools.workflows ci [JOB ...]`.

Every job runs in a fresh clone of the last commit, as it does on GitHub, once for each combination of its matrix,
whatever the machine that it names. What cannot be done here is skipped and named: an action (`uses`), a step that
changes the machine (`sudo`), a Python that is not installed. A table of all steps ends the output; the exit status is 1
if a step failed.
"""

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
OUTER_VARIABLES = {"VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"}


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of a job: `passed`, `failed` or `skipped`, and how long it took or why it was skipped."""

    job: str
    step: str
    state: str
    detail: str


def main() -> int:
    """Run the jobs and print a table of their steps; return 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.workflows")
    parser.add_argument("workflow", choices=sorted(path.stem for path in WORKFLOWS.glob("*.yml")))
    parser.add_argument("jobs", nargs="*", help="the jobs to run; all by default")
    arguments = parser.parse_args()
    jobs: dict[str, Any] = yaml.safe_load((WORKFLOWS / f"{arguments.workflow}.yml").read_text())["jobs"]
    if unknown := set(arguments.jobs) - jobs.keys():
        parser.error(f"no such job: {', '.join(sorted(unknown))}; the workflow has {', '.join(jobs)}")
    results: list[StepResult] = []
    for name in arguments.jobs or jobs:
        for combination in expand_matrix(jobs[name].get("strategy", {}).get("matrix", {})):
            label = " ".join([name, *combination.values()])
            results += run_job(label, jobs[name]["steps"], combination, ROOT)
    width = max(len(result.job) for result in results)
    for result in results:
        print(f"{result.state:8} {result.job:{width}}  {result.step.splitlines()[0]} ({result.detail})")
    return 1 if any(result.state == "failed" for result in results) else 0


def expand_matrix(matrix: dict[str, Any]) -> list[dict[str, str]]:
    """Return the combinations of a matrix without the machine, each once."""
    axes = {name: values for name, values in matrix.items() if name not in ("include", "machine")}
    combinations: list[dict[str, str]] = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
    for included in matrix.get("include", []):
        combination = {name: value for name, value in included.items() if name != "machine"}
        if combination not in combinations:
            combinations.append(combination)
    return combinations


def run_job(
    label: str, steps: list[dict[str, Any]], combination: dict[str, str], repository: Path
) -> Iterator[StepResult]:
    """Run the steps of a job in a fresh clone. After one that fails, or without its Python, the others are skipped."""
    with tempfile.TemporaryDirectory(prefix="ramify-workflow-") as folder:
        clone, programs = Path(folder) / "clone", Path(folder) / "programs"
        subprocess.run(["git", "clone", "--quiet", str(repository), str(clone)], check=True)
        programs.mkdir()
        variables = {name: value for name, value in os.environ.items() if name not in OUTER_VARIABLES}
        variables["PATH"] = f"{programs}:{variables['PATH']}"
        obstacle = ""
        for step in steps:
            title = step.get("name") or step.get("run") or step["uses"]
            if version := substitute(step.get("with", {}).get("python-version", ""), combination):
                obstacle = obstacle or provide_python(version, programs)
            command = substitute(step.get("run", ""), combination)
            reason = "an action" if not command else obstacle or ("changes the machine" if "sudo " in command else "")
            if reason:
                yield StepResult(label, title, "skipped", reason)
                continue
            print(f"== {label}: {title}", flush=True)
            start = time.monotonic()
            status = subprocess.run(["bash", "-eo", "pipefail", "-c", command], cwd=clone, env=variables).returncode
            obstacle = "an earlier step failed" if status else ""
            yield StepResult(label, title, "failed" if status else "passed", f"{time.monotonic() - start:.0f} s")


def substitute(text: str, combination: dict[str, str]) -> str:
    """Replace each `${{ matrix.NAME }}` by its value."""
    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda match: combination[match[1]], text)


def provide_python(version: str, programs: Path) -> str:
    """Write `python`, which starts this version, into a directory; return why that is impossible, or nothing."""
    path = shutil.which(f"python{version}")
    if path is None or subprocess.run([path, "-c", ""], capture_output=True).returncode != 0:
        return f"Python {version} is not installed"
    (programs / "python").write_text(f'#!/bin/sh\nexec {path} "$@"\n')
    (programs / "python").chmod(0o755)
    return ""


if __name__ == "__main__":
    sys.exit(main())
