"""`python -m ramify.envserver.worker`: one worker process. It runs rollouts for a broker, and knows nothing else.

The order matters: fork the keeper first, while there is nothing to inherit; then load the environment; then say that
we are ready, and where. What is printed or logged, by us, by hooks or by programs they start, goes to the pipe that the
broker gave us as standard output and error.
"""

import os
import sys
from pathlib import Path

from ramify.envserver.keeper import clear, keep


def main() -> None:
    """Become a worker. Arguments: the temporary directory, the descriptor to report to."""
    temporary, report = Path(sys.argv[1]), int(sys.argv[2])
    told = b""
    while len(told) < 8 or len(told) < 8 + int.from_bytes(told[:8], "big"):
        more = os.read(0, 1 << 16)
        if not more:  # the broker was gone before we began
            clear(temporary)
            return
        told += more
    os.set_inheritable(report, False)
    keep(temporary, report)
    from ramify.envserver.working import work  # in the worker alone, so that the keeper stays small

    work(told[8:], report)


if __name__ == "__main__":
    main()
