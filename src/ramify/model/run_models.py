"""Names of models that other runs have trained: `run:NAME@STEP`, `run:NAME@best:METRIC`, `run:NAME` for the last step.

Such a model is a directory `models/NAME-STEP` in the run. What is not there yet is exported by a process of its own:
exporting may take torch, and the rooms that train are above this one.
"""

import subprocess
import sys
from pathlib import Path

from ramify.core.errors import ModelNotFound, RamifyError
from ramify.run.lookup import find_run

RUN_PREFIX, BEST_PREFIX = "run:", "best:"
MODELS_DIR = "models"  # in the directory of a run
EXPORT_TIMEOUT = 3600.0  # seconds; a large model is read and written once


def get_model_directory(run: Path, step: int) -> Path:
    """Return the directory of the model of a step in a run; its name says which it is."""
    return run / MODELS_DIR / f"{run.resolve().name}-{step:06}"


def find_model_step(run: Path, directory: Path) -> int | None:
    """Return the step of a directory in MODELS_DIR of a run; None if it is not named as `get_model_directory` does."""
    step = directory.name.removeprefix(f"{run.resolve().name}-")
    return int(step) if step.isdecimal() and get_model_directory(run, int(step)).name == directory.name else None


def expand_run_model(name: str) -> str:
    """Return the directory of a model that is named by a run, and other names unchanged. Raises ModelNotFound."""
    return str(resolve_run_model(name)) if name.startswith(RUN_PREFIX) else name


def resolve_run_model(name: str) -> Path:
    """Return the directory of the model `run:NAME@STEP`, and export it first if needed. Raises ModelNotFound."""
    run_name, _, step = name.removeprefix(RUN_PREFIX).partition("@")
    try:
        run = find_run(run_name)
    except RamifyError as error:
        raise ModelNotFound(f"model {name!r}: {error.message}") from error
    if step.isdecimal() and (directory := get_model_directory(run, int(step))).exists():
        return directory
    command = [sys.executable, "-m", "ramify", "export", str(run), "--model", *(["--step", step] if step else [])]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelNotFound(f"model {name!r}: it was not exported within {EXPORT_TIMEOUT:g} s") from error
    if process.returncode:
        problem = process.stderr.strip().partition("\n")[0].removeprefix("--step: ")  # here, the step follows the "@"
        raise ModelNotFound(f"model {name!r}: {problem}")
    return Path(process.stdout.strip())
