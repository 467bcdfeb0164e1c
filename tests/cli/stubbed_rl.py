"""`ramify rl` with small scripts instead of its processes: `python -m tests.cli.stubbed_rl FOLDER CODE ARGS...`."""

import dataclasses
import sys
from pathlib import Path

from ramify.cli.app import main
from ramify.launch import api
from ramify.launch.process import ProcessRole
from tests.support.processes import RUNS_FOREVER, build_spec

if __name__ == "__main__":
    folder, code, *args = sys.argv[1:]
    original_build_plan = api.build_plan
    api.build_plan = lambda config: dataclasses.replace(
        original_build_plan(config),
        process_specs=(
            build_spec(Path(folder), "trainer", RUNS_FOREVER, ProcessRole.FOLLOWER),
            build_spec(Path(folder), "orchestrator", code, ProcessRole.LEADER),
        ),
    )
    api.check_plugin_tables = lambda config: {}
    sys.exit(main(["rl", *args]))
