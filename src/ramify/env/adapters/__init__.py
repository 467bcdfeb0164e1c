"""Environments of other projects, unmodified, as tasksets; here is how an adapter imports the package it adapts.

Each adapter has an extra of its own and uses only the public names of `ramify`. What it adapts is imported when the
taskset is created, in the interpreter that the source names.
"""

import importlib
import sys
from types import ModuleType

from ramify.core.errors import ConfigInvalid


def import_package(module: str, package: str, extra: str) -> ModuleType:
    """Import a module of a package. Raises ConfigInvalid, in one line, if the package is not installed.

    `extra` is the extra of Ramify that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = package if error.name == module.partition(".")[0] else f"{error.name}, which {package} imports"
        raise ConfigInvalid(
            f"{sys.prefix} lacks the package {missing}; install it there: {sys.executable} -m pip install "
            f"'ramify[{extra}]', or run `ramify venv install {extra}` and set python = \"{extra}\" in the source"
        ) from error
