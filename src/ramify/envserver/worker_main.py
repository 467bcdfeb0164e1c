"""`python -m ramify.envserver.worker_main`: one worker process, which runs rollouts for a broker.

The order matters: fork the watcher first, while the process is small; then load the environment; then report the
address. All output, of the worker, of hooks or of programs they start, goes to the pipe that the broker passed as
standard output and error.
"""

import os
import sys
from pathlib import Path

from ramify.envserver.parent_watch import fork_under_subreaper, remove_temp_dir


def main() -> None:
    """Run a worker. Arguments: the temporary directory, and the file descriptor for the report."""
    temp_dir, report_fd = Path(sys.argv[1]), int(sys.argv[2])
    spec_bytes = b""
    while len(spec_bytes) < 8 or len(spec_bytes) < 8 + int.from_bytes(spec_bytes[:8], "big"):
        chunk = os.read(0, 1 << 16)
        if not chunk:  # the broker exited before this process started
            remove_temp_dir(temp_dir)
            return
        spec_bytes += chunk
    os.set_inheritable(report_fd, False)
    fork_under_subreaper(temp_dir, report_fd)
    from ramify.envserver.env_worker import run_worker  # imported in the worker only, so that the watcher stays small

    run_worker(spec_bytes[8:], report_fd)


if __name__ == "__main__":
    main()
