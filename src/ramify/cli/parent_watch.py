"""`python -m ramify.cli.parent_watch COMMAND ...`: a ramify command that ends when its standard input does.

Whoever started it holds the other end. The kernel closes that end however the holder dies, `kill -9` included, so a
model server never outlives the eval it was started for.
"""

import os
import signal
import sys
import threading
import time

from ramify.cli import main

SHUTDOWN_TIMEOUT = 10.0  # seconds to end cleanly once nobody is there any more
EXIT_ORPHANED = 3  # the exit code of a command that took longer


def exit_when_stdin_closes() -> None:
    """End this process as soon as standard input ends."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SHUTDOWN_TIMEOUT)
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    threading.Thread(target=exit_when_stdin_closes, name="leash", daemon=True).start()
    sys.exit(main(sys.argv[1:]))
