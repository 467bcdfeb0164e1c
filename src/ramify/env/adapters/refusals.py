"""Why a model call failed, as the gateway recorded it: an environment only sees an HTTP error."""

import importlib
import sys
from types import ModuleType

import ramify as rf
from ramify.core.errors import ConfigInvalid, ProviderError

# Import the package that an adapter adapts, or name what is missing and where.


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


POLICY_REFUSALS = ("BudgetExceeded", "ContextOverflow")  # the policy's failures: the rollout counts


def find_policy_refusal(trace: rf.Trace) -> str | None:
    """Return the limit that ended the rollout; None if no call was refused. Raises ProviderError for other refusals."""
    refusals = trace.info.get("refusals", [])
    if not refusals:
        return None
    last = refusals[-1]
    if last["name"] in POLICY_REFUSALS:
        return last["name"]
    raise ProviderError(f"a model call failed: {last['name']}: {last['message']}")
