"""Errors of an environment's code become failures with a name."""

import asyncio
import contextlib
from collections.abc import Generator

from ramify.core.errors import EnvironmentFault, RamifyError
from ramify.core.errors.origin import describe_exception
from ramify.env.hook import is_current_task_cancelled


@contextlib.contextmanager
def raise_environment_faults(what: str) -> Generator[None]:
    """Raise errors of the block as EnvironmentFault; `what` names the code that runs in it.

    A RamifyError, and the cancellation of the current task itself, pass unchanged. KeyboardInterrupt is an error of the
    code too: at Ctrl-C, asyncio cancels the main task instead of raising it.
    """
    try:
        yield
    except RamifyError:
        raise
    except asyncio.CancelledError as error:
        if is_current_task_cancelled():
            raise
        raise EnvironmentFault(f"{what}: CancelledError: something it awaited was cancelled") from error
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        raise EnvironmentFault(f"{what}: {describe_exception(error)}") from error
