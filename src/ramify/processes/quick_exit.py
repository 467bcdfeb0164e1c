"""Ends a process without the teardown of its modules.

The interpreter collects and frees every object when it ends. After an import of torch and transformers this takes more
than a second, for memory that the operating system frees anyway.
"""

import atexit
import os
import sys
import threading
from typing import NoReturn

SEND_TIMEOUT = 2.0  # seconds to send queued messages


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
