"""Run environments of other projects, unmodified, from PyPI: `make test-envs`.

Each project gets a virtual environment of its own, which `ramify venv install` makes, because their requirements
conflict with each other and with ours. A check evaluates and trains with `tiny` on sources that run in that
environment. An environment that cannot be installed is a failure, not a skip.
"""

import argparse
import importlib
import os
import sys
import time
import traceback
from pathlib import Path

from ramify.cli.venv import install
from ramify.processes.interpreter import VENVS_VARIABLE
from tests.env.adapters import check_curves

PROJECTS = ("reasoning-gym", "verifiers-v0", "verifiers", "openenv", "textarena")  # each is an extra of Ramify
CURVES = "curves"  # reverse-text as our taskset and as environments of both generations of verifiers


def main() -> int:
    """Check the projects named on the command line, by default all; return 1 if one fails."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("names", nargs="*", help=f"which of {', '.join(PROJECTS)}, {CURVES}; all by default")
    flags.add_argument("--folder", type=Path, default=Path(".venvs"), help="where the environments are made")
    flags.add_argument("--output", type=Path, default=Path("outputs/envs"), help="logs and runs")
    flags.add_argument("--python", default=sys.executable, help="the Python of the environments, such as python3.12")
    options = flags.parse_args()
    names: list[str] = options.names or [*PROJECTS, CURVES]
    if unknown := [name for name in names if name not in (*PROJECTS, CURVES)]:
        flags.error(f"unknown: {', '.join(unknown)}; expected {', '.join(PROJECTS)} or {CURVES}")
    os.environ[VENVS_VARIABLE] = str(options.folder.resolve())
    output = options.output.resolve() / time.strftime("%Y%m%d-%H%M%S")
    failed = [name for name in names if not check(name, options.python, output / name)]
    print(f"{len(names) - len(failed)} of {len(names)} projects pass; runs in {output}")
    return 1 if failed else 0


def check(name: str, base_python: str, output: Path) -> bool:
    """Install a project, check it and return whether it passed; the result is shown."""
    print(f"== {name}", flush=True)
    start = time.monotonic()
    try:
        if name == CURVES:
            interpreters = {project: install(project, [], base_python) for project in ("verifiers-v0", "verifiers")}
            check_curves.check(interpreters, output)
        else:
            module = importlib.import_module(f"tests.env.adapters.check_{name.replace('-', '_')}")
            module.check(install(name, [], base_python), output)
    except Exception:  # noqa: BLE001 - the other projects are still checked
        traceback.print_exc()
        print(f"{name} FAILED after {time.monotonic() - start:.0f} s", flush=True)
        return False
    print(f"{name} passed after {time.monotonic() - start:.0f} s", flush=True)
    return True


if __name__ == "__main__":
    raise SystemExit(main())
