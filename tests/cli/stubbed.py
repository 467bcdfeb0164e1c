"""`ramify rl` with small programs in place of its processes: `python -m tests.cli.stubbed FOLDER CODE ARGS...`."""

import dataclasses
import sys
from pathlib import Path

from ramify.cli.app import main
from ramify.launch import run
from ramify.launch.process import Role
from tests.launch.scripts import FOR_EVER, entry

if __name__ == "__main__":
    folder, code, *args = sys.argv[1:]
    planned = run.plan_of
    run.plan_of = lambda config: dataclasses.replace(
        planned(config),
        entries=(
            entry(Path(folder), "trainer", FOR_EVER, Role.FOLLOWER),
            entry(Path(folder), "orchestrator", code, Role.LEADER),
        ),
    )
    run.check_tables = lambda config: {}
    sys.exit(main(["rl", *args]))
