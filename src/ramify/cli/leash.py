"""`python -m ramify.cli.leash COMMAND ...`: a ramify command that ends when its standard input does.

Whoever started it holds the other end. The kernel closes that end however the holder dies, `kill -9` included, so a
model server never outlives the eval it was started for.
"""

import os
import signal
import sys
import threading
import time

from ramify.cli import main

GRACE = 10.0  # seconds to end cleanly once nobody is there any more
ORPHANED = 3  # the exit code of a command that took longer


def watch() -> None:
    """End this process as soon as standard input ends."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(ORPHANED)


if __name__ == "__main__":
    threading.Thread(target=watch, name="leash", daemon=True).start()
    sys.exit(main(sys.argv[1:]))
