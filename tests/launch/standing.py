"""A supervisor in a process of its own, to be interrupted and killed: `python -m tests.launch.standing FOLDER`."""

import asyncio
import sys
from pathlib import Path

from ramify.launch.process import ProcessRole
from ramify.launch.supervisor import Supervisor
from tests.launch.scripts import FOR_EVER, STUBBORN, entry

# A worker that leaves session and parent behind, as daemons do.
DAEMON = f"""
import subprocess, signal
code = "import os, signal; open({{0!r}}, 'a').write(str(os.getpid()) + chr(10)); signal.pause()"
subprocess.Popen([sys.executable, "-S", "-c", code.format(DIR + "/daemon.pids")], start_new_session=True)
{FOR_EVER}
"""
CHECKPOINTS = """
import signal
def leave(*_):
    open(DIR + "/checkpoint", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, leave)
open(DIR + "/listening", "w").close()
while 1: signal.pause()
"""


def main(folder: Path) -> int:
    entries = [
        entry(folder, "inference", FOR_EVER),
        entry(folder, "env", DAEMON),
        entry(folder, "trainer", STUBBORN, ProcessRole.FOLLOWER),
        entry(folder, "orchestrator", CHECKPOINTS, ProcessRole.LEADER),
    ]
    return asyncio.run(Supervisor(entries, max_restarts=1, grace_period=5.0, stop_timeout=1.0).run()).value


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
