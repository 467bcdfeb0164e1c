"""How processes end: what exit codes mean, and an exit without the teardown of modules.

The interpreter collects and frees every object when it ends. After an import of torch and transformers this takes more
than a second, for memory that the operating system frees anyway.
"""

import atexit
import contextlib
import os
import signal
import sys
from typing import NoReturn

SIGNAL_EXIT_OFFSET = 128  # added to the number of the signal that killed a process
EXIT_NOT_STARTED = 127  # a command that cannot be started
SEND_TIMEOUT = 2.0  # seconds to send queued messages


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


class QuickExit:
    """Ends this process at `exit`, after all exit handlers that are registered later than `register` is called."""

    def __init__(self) -> None:
        self._code: int | None = None
        self._is_registered = False

    def register(self) -> None:
        """Register the exit handler. A forked process has the handler of its parent."""
        if not self._is_registered:
            atexit.register(self._skip_teardown)
        self._is_registered = True

    def exit(self, code: int) -> NoReturn:
        """Send the messages that are queued, run the exit handlers, and end the process."""
        if "zmq" in sys.modules:
            import threading  # here, so that the watcher stays small

            context = sys.modules["zmq"].Context.instance()
            sender = threading.Thread(target=context.term, daemon=True)  # does not return while a socket is open
            sender.start()
            sender.join(SEND_TIMEOUT)
        self._code = code
        sys.exit(code)

    def _skip_teardown(self) -> None:
        if self._code is None:  # an error: the interpreter ends as usual
            return
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(self._code)


QUICK_EXIT = QuickExit()
