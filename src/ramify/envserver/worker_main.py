"""`python -m ramify.envserver.worker_main`: one worker process. It runs rollouts for a broker, and knows nothing else.

The order matters: fork the keeper first, while there is nothing to inherit; then load the environment; then say that
we are ready, and where. What is printed or logged, by us, by hooks or by programs they start, goes to the pipe that the
broker gave us as standard output and error.
"""

import os
import sys
from pathlib import Path

from ramify.envserver.parent_watch import fork_under_subreaper, remove_temp_dir


def main() -> None:
    """Become a worker. Arguments: the temporary directory, the descriptor to report to."""
    temp_dir, report_fd = Path(sys.argv[1]), int(sys.argv[2])
    spec_bytes = b""
    while len(spec_bytes) < 8 or len(spec_bytes) < 8 + int.from_bytes(spec_bytes[:8], "big"):
        chunk = os.read(0, 1 << 16)
        if not chunk:  # the broker was gone before we began
            remove_temp_dir(temp_dir)
            return
        spec_bytes += chunk
    os.set_inheritable(report_fd, False)
    fork_under_subreaper(temp_dir, report_fd)
    from ramify.envserver.env_worker import run_worker  # in the worker alone, so that the keeper stays small

    run_worker(spec_bytes[8:], report_fd)


if __name__ == "__main__":
    main()
