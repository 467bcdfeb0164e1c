"""`python -m ramify.cli.parent_watch COMMAND ...`: a ramify command that ends when its standard input is closed.

Its parent holds the other end of the pipe. The kernel closes it when the parent dies, even by `kill -9`, so a model
server never outlives the eval that started it.
"""

import os
import signal
import sys
import threading
import time

from ramify.cli import main

SHUTDOWN_TIMEOUT = 10.0  # seconds between SIGTERM and exit
EXIT_ORPHANED = 3  # exit code of a command that did not end by itself within SHUTDOWN_TIMEOUT


def exit_when_stdin_closes() -> None:
    """Wait until standard input is closed, then end this process."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SHUTDOWN_TIMEOUT)
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    threading.Thread(target=exit_when_stdin_closes, name="parent watch", daemon=True).start()
    sys.exit(main(sys.argv[1:]))
