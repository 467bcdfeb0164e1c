"""Exit codes of child processes, and what they mean."""

import contextlib
import signal

SIGNAL_EXIT_OFFSET = 128  # added to the number of the signal that killed a process
EXIT_NOT_STARTED = 127  # a command that cannot be started


def is_signal_exit(code: int) -> bool:
    """Return whether an exit code means that a signal killed the process."""
    return code < 0 or code > SIGNAL_EXIT_OFFSET


def describe_exit(code: int) -> str:
    """Describe an exit code, as the end of a sentence."""
    if is_signal_exit(code):
        number = -code if code < 0 else code - SIGNAL_EXIT_OFFSET
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(number).name}"
    return f"ended with exit code {code}"
