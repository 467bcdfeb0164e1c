"""`ramify venv install NAME` and `ramify venv list`: virtual environments for sources with packages of their own."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ramify.core.errors import ConfigInvalid, EnvironmentFault
from ramify.processes.interpreter import INSTALLED_FILE, check_interpreter, get_venvs_dir, list_venvs

CREATE_TIMEOUT = 300.0  # seconds to make an empty environment
INSTALL_TIMEOUT = 3600.0  # seconds for pip
MAX_OUTPUT_LINES = 20  # of pip, in an error message


def run(options: Namespace) -> int:
    """Install an environment, or list those that are installed."""
    if options.action == "list":
        for name in list_venvs():
            print(f"{name}  {', '.join(_read_installed(get_venvs_dir() / name)['packages'])}")
        return 0
    if not options.name:
        raise ConfigInvalid("ramify venv install needs the NAME of the environment")
    print(f"python = {str(install(options.name, options.packages, options.python or sys.executable))!r}")
    return 0


def install(name: str, packages: Sequence[str], base_python: str) -> Path:
    """Make the environment NAME with the core of Ramify and return its interpreter.

    If Ramify has an extra of that name, its packages are installed too. An environment that has the same packages
    already is kept.
    """
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigInvalid(f"{name!r} is not a name of an environment; expected letters, digits, -, _ and .")
    home = get_venvs_dir() / name
    python, wanted = home / "bin" / "python", {"base": base_python, "packages": [_get_own_package(name), *packages]}
    if (home / INSTALLED_FILE).is_file() and _read_installed(home) == wanted:
        check_interpreter(python)
        return python
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    print(f"installing {', '.join(wanted['packages'])} into {home}", file=sys.stderr)
    _run([base_python, "-m", "venv", str(home)], CREATE_TIMEOUT)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    own, *others = wanted["packages"]
    _run([*pip, *(["-e", own] if own.startswith("/") else [own]), *others], INSTALL_TIMEOUT)
    check_interpreter(python)
    (home / INSTALLED_FILE).write_text(json.dumps(wanted))
    return python


def _get_own_package(name: str) -> str:
    """Return what pip installs as Ramify: this version, or this directory if it is an editable install."""
    distribution = importlib.metadata.distribution("ramify")
    origin: dict[str, Any] = json.loads(distribution.read_text("direct_url.json") or "{}")
    extras = distribution.metadata.get_all("Provides-Extra") or []
    package = f"ramify=={distribution.version}"
    if origin.get("dir_info", {}).get("editable"):
        package = unquote(urlsplit(str(origin["url"])).path)
        project = tomllib.loads((Path(package) / "pyproject.toml").read_text())
        extras = list(project["project"]["optional-dependencies"])
    if name not in extras:
        return package
    return f"{package}[{name}]" if package.startswith("/") else package.replace("==", f"[{name}]==")


def _read_installed(home: Path) -> dict[str, Any]:
    return json.loads((home / INSTALLED_FILE).read_text())


def _run(command: Sequence[str], timeout: float) -> None:
    """Run a command. Raises EnvironmentFault with the end of its output if it fails."""
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"{' '.join(command)}: {error}") from error
    if result.returncode:
        tail = "\n".join(result.stdout.splitlines()[-MAX_OUTPUT_LINES:])
        raise EnvironmentFault(f"{' '.join(command)} exited with {result.returncode}:\n{tail}")
