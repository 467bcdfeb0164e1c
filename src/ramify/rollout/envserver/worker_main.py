"""`python -m ramify.rollout.envserver.worker_main`: one worker process, which runs rollouts for a broker.

    broker ==control socket==> watcher ---> worker ---> shells, servers, whatever agents start

The order matters: fork the watcher first, while the process is small or shares its memory with the fork server (see
`processes.prefork`); then load the environment; then report the address. When the worker or the broker ends, the
watcher kills everything that the worker started and removes its temporary directory. All output, of the worker, of
hooks or of programs they start, goes to the pipe that the broker passed as standard output and error.
"""

import contextlib
import gc
import os
import shutil
import sys
from pathlib import Path

from ramify.processes.watcher import fork_under_watcher


def main() -> None:
    """Run a worker. Arguments: the temporary directory, and the file descriptors of the report and the spec."""
    temp_dir, report_fd, spec_fd = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    fork_under_watcher(stop_timeout=0.0, cleanup=lambda: _remove_temp_dir(temp_dir))
    gc.disable()  # modules are not garbage, and collections take a seventh of the time
    from ramify.rollout.envserver.env_worker import run_worker  # in the worker only, so that the watcher stays small

    gc.enable()
    with os.fdopen(spec_fd, "rb") as spec_file:
        spec = spec_file.read()
    os.set_inheritable(report_fd, False)
    run_worker(spec, report_fd)


def _remove_temp_dir(temp_dir: Path) -> None:
    """Remove a worker's temporary directory, and the parent directory if it is empty."""
    shutil.rmtree(temp_dir, ignore_errors=True)
    with contextlib.suppress(OSError):
        temp_dir.parent.rmdir()


if __name__ == "__main__":
    main()
