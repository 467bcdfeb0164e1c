"""Names of models that other runs have trained: `run:NAME@STEP`, `run:NAME@best:METRIC`, `run:NAME` for the last step.

Such a model is a directory `models/NAME-STEP` in the run. Parsing a config only checks the form of the name; a command
replaces it by the directory when it starts. Only what loads the model exports a directory that is not there yet.
Both run `ramify export`: exporting may take torch, and the rooms that train are above this one.
"""

import re
import subprocess
import sys
from pathlib import Path

from ramify.core.errors import ModelNotFound, RamifyError
from ramify.run.lookup import find_run
from ramify.run.store.index import DATABASE_NAME

RUN_PREFIX, BEST_PREFIX = "run:", "best:"
NAME_PATTERN = re.compile(rf"{RUN_PREFIX}[^@]+(@(\d+|{BEST_PREFIX}.+))?")
MODELS_DIR = "models"  # in the directory of a run
LOCATE_TIMEOUT = 60.0  # seconds; only the database of the run is read
EXPORT_TIMEOUT = 3600.0  # seconds; a large model is read and written once


def get_model_directory(run: Path, step: int) -> Path:
    """Return the directory of the model of a step in a run; its name says which it is."""
    return run / MODELS_DIR / f"{run.resolve().name}-{step:06}"


def find_model_step(run: Path, directory: Path) -> int | None:
    """Return the step of a directory in MODELS_DIR of a run; None if it is not named as `get_model_directory` does."""
    step = directory.name.removeprefix(f"{run.resolve().name}-")
    return int(step) if step.isdecimal() and get_model_directory(run, int(step)).name == directory.name else None


def check_model_name(name: str) -> str:
    """Return the name of a model; nothing is read. Raises ValueError if it should name a run and is malformed."""
    if name.startswith(RUN_PREFIX) and not NAME_PATTERN.fullmatch(name):
        raise ValueError(f"expected run:NAME, run:NAME@STEP or run:NAME@best:METRIC, got {name!r}")
    return name


def expand_run_model(name: str) -> str:
    """Return the directory of a model that is named by a run, and other names unchanged.

    The directory may have to be exported. Raises ModelNotFound if there is no such run or step.
    """
    if not name.startswith(RUN_PREFIX):
        return name
    run_name, _, step = name.removeprefix(RUN_PREFIX).partition("@")
    try:
        run = find_run(run_name)
    except RamifyError as error:
        raise ModelNotFound(f"model {name!r}: {error.message}") from error
    if step.isdecimal() and (directory := get_model_directory(run, int(step))).exists():
        return str(directory)
    return _call_export(name, run, *(["--step", step] if step else []), "--dry-run", timeout=LOCATE_TIMEOUT)


def can_export(name: str) -> bool:
    """Return whether a name is the directory of a model that a run here has not exported yet."""
    return _find_origin(Path(name)) is not None


def export_run_model(name: str) -> None:
    """Export a model for which `can_export`. Raises ModelNotFound if that fails."""
    if (origin := _find_origin(Path(name))) is not None:
        run, step = origin
        _call_export(name, run, "--step", str(step), timeout=EXPORT_TIMEOUT)


def _find_origin(directory: Path) -> tuple[Path, int] | None:
    """Return the run and the step of a model that is not exported yet."""
    run = directory.parent.parent
    if directory.parent.name != MODELS_DIR or directory.exists() or not (run / DATABASE_NAME).is_file():
        return None
    step = find_model_step(run, directory)
    return None if step is None else (run, step)


def _call_export(name: str, run: Path, *options: str, timeout: float) -> str:
    command = [sys.executable, "-m", "ramify", "export", str(run), "--model", *options]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelNotFound(f"model {name!r}: {' '.join(command[2:])} took longer than {timeout:g} s") from error
    if process.returncode:
        problem = process.stderr.strip().partition("\n")[0].removeprefix("--step: ")  # here, the step follows the "@"
        raise ModelNotFound(f"model {name!r}: {problem}")
    return process.stdout.strip()
