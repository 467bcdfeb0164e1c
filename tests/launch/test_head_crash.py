"""Heads that are killed at any moment: no acknowledged commit is lost, and the audit of every successor is clean."""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ramify.launch.head import read_local_state
from ramify.run.store import RunStore
from ramify.run.store.audit import audit, check_storage
from ramify.run.store.ledger import Ledger
from tests.support.heads import make_config

pytestmark = [pytest.mark.process, pytest.mark.promise]

ROUNDS = 40 if os.environ.get("RAMIFY_FULL") else 2
TMPFS = "/dev/shm" if Path("/dev/shm").is_dir() else None  # syncs are free there

# Commits steps until it is killed, and prints each version that was acknowledged; meanwhile it stores other rollouts.
HEAD = """
import itertools, random, sys, threading
from pathlib import Path
from tests.support.traces import make_rollout
from tests.support.heads import make_config, start
from ramify.run.store.group_state import DropReason
from tests.support.ledgers import commit, issue_and_score, record_batch, run_all, train
ledger = start(make_config(Path(sys.argv[1]), sys.argv[2]))
def store_rollouts():
    for number in itertools.count(1000 * random.randrange(1000)):
        ledger.store.submit_change(lambda _: None, [make_rollout(number)]).result()
threading.Thread(target=store_rollouts, daemon=True).start()
for group in ledger.open_groups():
    run_all(ledger.drop_group(group.number, DropReason.CANCELLED))
while True:
    step = ledger.progress().committed
    if ledger.get_batch(step) is None:  # otherwise it was formed before the head was killed
        group = ledger.num_issued()
        issue_and_score(ledger, group)
        record_batch(ledger, step, group)
    train(ledger, step)
    commit(ledger, step + 1)
    print(step + 1, flush=True)
"""


def run_head(home: Path, name: str, seconds: float) -> int:
    """Run a head, kill it some time after its first commit, and return the last version that it acknowledged."""
    head = subprocess.Popen([sys.executable, "-c", HEAD, home, name], stdout=subprocess.PIPE, text=True)
    try:
        versions = [head.stdout.readline()]
        time.sleep(seconds)
    finally:
        head.kill()
    versions += head.stdout.read().splitlines(keepends=True)
    head.wait()
    assert versions[0], "the head could not start"
    return int([version for version in versions if version.endswith("\n")][-1])


@pytest.mark.timeout(600)
def test_acknowledged_commits_survive_heads_that_are_killed():
    rng = random.Random(3)
    with tempfile.TemporaryDirectory(dir=TMPFS) as folder:
        home, term, acknowledged = Path(folder), 0, 0
        for _ in range(ROUNDS):
            last = run_head(home, f"head{term}", rng.random() * 0.3)
            assert last > acknowledged
            acknowledged = last
            if rng.random() < 0.5:  # the disk is lost too
                shutil.rmtree(home / f"head{term}")
                term += 1
        last = run_head(home, "last", 0.0)
        config = make_config(home, "last")
        assert read_local_state(config.path).term == len(list((home / "shared/run/term").iterdir())) - 1
        with RunStore.open(config.path) as store:
            ledger = Ledger.open(store)
            assert [commit.version for commit in ledger.commits()] == list(range(1, ledger.progress().committed + 1))
            assert ledger.progress().committed >= last > acknowledged
            assert (check_storage(store), audit(ledger, finished=False)) == ([], [])
