"""Interpreters of other virtual environments, for sources whose packages conflict with Ramify's.

A source's `python` is the path of an interpreter, or the name of a virtual environment that `ramify venv install` made.
The core of Ramify must be installed there; it needs no torch.
"""

import functools
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ramify.core.errors import ConfigInvalid
from ramify.core.names import suggest
from ramify.processes.program import run_program

VENVS_VARIABLE = "RAMIFY_VENVS"  # the directory of the virtual environments that `ramify venv install` makes
DEFAULT_VENVS_DIR = "~/.local/share/ramify/venvs"
ENGINE_PYTHON_VARIABLE = "RAMIFY_ENGINE_PYTHON"  # what starts engines for a command in another interpreter
INSTALLED_FILE = "ramify-env.json"  # written last, so an environment without it is not complete
CHECK_TIMEOUT = 120.0  # seconds for an interpreter to list its packages
MIN_VERSION = (3, 11)

# Prints the version of Python, the version of Ramify, and which packages the core of Ramify lacks.
_CHECK_SCRIPT = """
import importlib.metadata, json, re, sys
def find_version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
version = find_version("ramify")
texts = importlib.metadata.requires("ramify") or [] if version else []
names = [re.split(r"[^\\w.-]", text, maxsplit=1)[0] for text in texts if "extra ==" not in text]
print(json.dumps([sys.version_info[:2], version, [name for name in names if find_version(name) is None]]))
"""


def get_venvs_dir() -> Path:
    """Return the directory of the virtual environments that `ramify venv install` makes."""
    return Path(os.environ.get(VENVS_VARIABLE, DEFAULT_VENVS_DIR)).expanduser().absolute()


def list_venvs() -> list[str]:
    """Return the names of the virtual environments that are installed."""
    return sorted(path.parent.name for path in get_venvs_dir().glob(f"*/{INSTALLED_FILE}"))


def find_interpreter(python: str) -> Path:
    """Return the interpreter that a source names: a path, or the name of an installed environment.

    Raises ConfigInvalid if there is none.
    """
    if "/" in python:
        path = Path(python).expanduser().absolute()  # not resolved: the link tells Python its environment
        if not os.access(path, os.X_OK) or path.is_dir():
            raise ConfigInvalid(f"{path} is not an interpreter; expected a path such as venv/bin/python")
        return path
    home = get_venvs_dir() / python
    if not (home / INSTALLED_FILE).is_file():
        hint = suggest(python, list_venvs(), f"install it with `ramify venv install {python}`, or give a path")
        raise ConfigInvalid(f"there is no virtual environment {python!r} in {home.parent}; {hint}")
    return home / "bin" / "python"


def find_other_interpreter(python: str | None) -> Path | None:
    """Return the interpreter that a source names; None if it names none, or the one that runs this code.

    Raises ConfigInvalid if there is no such interpreter, or if the core of Ramify is not installed there.
    """
    if python is None:
        return None
    path = find_interpreter(python)
    if path.parent.resolve() == Path(sys.executable).parent.resolve():
        return None
    check_interpreter(path)
    return path


def run_command_in(python: Path, command: str, argv: Sequence[str]) -> NoReturn:
    """Replace this process by the same `ramify` command in another interpreter. Engines still start in this one."""
    sys.stdout.flush()
    env = {**os.environ, ENGINE_PYTHON_VARIABLE: os.environ.get(ENGINE_PYTHON_VARIABLE, sys.executable)}
    os.execve(python, [str(python), "-m", "ramify", command, *argv], env)


@functools.cache
def check_interpreter(python: Path) -> None:
    """Raise ConfigInvalid, in one line, if an interpreter lacks the core of Ramify. It is checked once per process."""
    result = run_program([str(python), "-c", _CHECK_SCRIPT], timeout=CHECK_TIMEOUT)
    if not result.ok or not result.text.startswith("["):
        raise ConfigInvalid(f"{python} does not work as a Python interpreter: {result.text or 'it printed nothing'}")
    python_version, version, missing = json.loads(result.text)
    if tuple(python_version) < MIN_VERSION:
        actual, expected = (".".join(map(str, version)) for version in (python_version, MIN_VERSION))
        raise ConfigInvalid(f"{python} is Python {actual}; expected {expected} or newer")
    home, expected = python.parent.parent, importlib.metadata.version("ramify")
    advice = f"install the core of Ramify there: {python} -m pip install ramify=={expected}"
    if version is None:
        raise ConfigInvalid(f"{home} lacks the package ramify; {advice}")
    if missing:
        package = "the package" if len(missing) == 1 else "the packages"
        raise ConfigInvalid(f"{home} lacks {package} {', '.join(missing)}; {advice}")
    if version != expected:
        raise ConfigInvalid(f"{home} has ramify {version}, expected {expected}; {advice}")
