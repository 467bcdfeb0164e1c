"""`python -m tests.support.supervisor_process DIRECTORY`: a supervisor to be interrupted and killed."""

import asyncio
import sys
from pathlib import Path

from ramify.launch.launcher import ProcessRole
from ramify.launch.local_launcher import LocalLauncher
from ramify.launch.supervisor import Supervisor
from tests.support.processes import IGNORES_SIGTERM, RUNS_FOREVER, build_spec

# A process that starts a daemon in another session.
STARTS_DAEMON = f"""
import subprocess, signal
code = "import os, signal; open({{0!r}}, 'a').write(str(os.getpid()) + chr(10)); signal.pause()"
subprocess.Popen([sys.executable, "-S", "-c", code.format(DIR + "/daemon.pids")], start_new_session=True)
{RUNS_FOREVER}
"""
SAVES_CHECKPOINT = """
import signal
def stop(*_):
    open(DIR + "/checkpoint", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
open(DIR + "/listening", "w").close()
while 1: signal.pause()
"""


def main(directory: Path) -> int:
    specs = [
        build_spec(directory, "inference", RUNS_FOREVER),
        build_spec(directory, "env", STARTS_DAEMON),
        build_spec(directory, "trainer", IGNORES_SIGTERM, ProcessRole.FOLLOWER),
        build_spec(directory, "orchestrator", SAVES_CHECKPOINT, ProcessRole.LEADER),
    ]
    launcher = LocalLauncher(stop_timeout=0.5)
    return asyncio.run(Supervisor(specs, max_restarts=1, grace_period=60.0, launcher=launcher).run()).value


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
