"""The page reads a run that another process writes, without its lock: all that was committed, also after a kill."""

import subprocess
import sys

import pytest

from ramify.core.errors import RunBusy
from ramify.run.store import RunStore
from ramify.view.queries import RunQueries
from tests.support.sample_runs import write_rl_run

DEADLINE = 30.0  # seconds
WRITER = """
import asyncio, sys
from pathlib import Path
from ramify.run.store import RunLog, RunStore
from tests.support.sample_runs import make_record, make_trace

with RunStore.open(Path(sys.argv[1])) as store:
    log = RunLog(store)
    log.log_event("started", committed=0, incarnation=0)
    for number in range(int(sys.argv[2]), 100_000):
        trace = make_trace(f"w{number}", 0, [50, 2], 0.5, text="word " * 500)
        log.log_metrics(number, {"reward/all/mean": number / 1000})
        asyncio.run(store.add_rollout(make_record(trace.id, trace.id, 0, "reverse", [trace]), [trace]))
        print(number, flush=True)
"""


def start_writer(path, first):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(first)], stdout=subprocess.PIPE, text=True)


@pytest.mark.promise
@pytest.mark.process
def test_a_run_is_read_while_it_is_written_killed_and_continued(tmp_path):
    path = write_rl_run(tmp_path / "run")
    queries, written = RunQueries(tmp_path), 0
    for _ in range(2):
        writer = start_writer(path, written)
        try:
            for _ in range(6):
                number = int(writer.stdout.readline())
                run = queries.get_run("run")
                assert run["state"] == "starting"  # it holds the run, and has written no state yet
                assert run["rollouts"] >= 12 + number + 1  # all that was committed before is there
                points = queries.get_metrics("run", ["reward/all/mean"])["points"]["reward/all/mean"]
                assert points[-1][0] >= number
                assert queries.get_rollout("run", f"w{number}")["reward"] == 0.5
            with pytest.raises(RunBusy):
                RunStore.open(path)
        finally:
            writer.kill()
            rest = writer.stdout.read().split()  # not `communicate`, which misses lines that are buffered here
            writer.wait(DEADLINE)
        written = 1 + max([number, *map(int, rest)])
        queries.wait_for_index("run", DEADLINE)
        run = queries.get_run("run")
        assert run["state"] == "stopped"
        assert written <= run["rollouts"] - 12 <= written + 1  # at most the one that was being reported
        assert queries.list_rollouts("run")["total"] == run["rollouts"]
        for id in (f"w{number}" for number in range(written)):
            assert queries.get_excerpts("run", [id])[id].startswith("word")
    queries.close()
