"""`python -m tests.cluster.leased_process NODE LEASE BEATS`: a process on a node, until it has exited or is lost.

The process appends the time to the file BEATS; the hosts of one machine have one clock. Prints `up` when it runs, and
at the end its exit code, whether it was lost, and when that was seen.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

from ramify.launch.launcher import Place, PlacementRequest
from ramify.launch.ray_launcher import RayLauncher
from ramify.processes.log import ProcessLog
from ramify.run.fencing.lease import LeaseTerms, read_lease_clock
from tests.support.launchers import open_slot, start_code, wait_for_line

BEATS = """
import time
print("up", flush=True)
while True:
    with open({path!r}, "a") as file: file.write(f"{{time.clock_gettime(time.CLOCK_BOOTTIME)}}\\n")
    time.sleep(0.05)
"""


async def main(node: str, lease: float, beats: str) -> None:
    launcher = RayLauncher.connect(os.environ["RAMIFY_RAY"])
    log = ProcessLog(Path(tempfile.mkdtemp()) / "log")
    terms = LeaseTerms(duration=lease, slack=5.0)
    placement = PlacementRequest(num_cpus=0.1, choose_places=lambda nodes: (Place(node),), lease=terms)
    async with open_slot(launcher, placement) as slot:
        assert slot.node == node
        await start_code(slot, BEATS.format(path=beats), log)
        await wait_for_line(log, "up")
        print("up", flush=True)
        exit_code = await slot.wait()
        result = {"exit_code": exit_code, "is_lost": slot.is_lost, "seen_at": read_lease_clock()}
        print(json.dumps(result), flush=True)
    launcher.disconnect()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2]), sys.argv[3]))
