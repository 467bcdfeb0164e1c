"""A disk that fills up: a named error, everything acknowledged still there, and a run that goes on later."""

import asyncio
import random
import subprocess
import sys

import pytest

from ramify.errors import StorageFull
from ramify.store import RunStore
from tests.store.rollouts import replies, rollout

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789-+ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def noise(number: int) -> str:
    """40 kB that do not compress by much."""
    return "".join(random.Random(number).choices(LETTERS, k=40_000))


def fill(store: RunStore, limit: int = 1000) -> int:
    """Add rollouts until the disk is full; how many were acknowledged."""
    for number in range(limit):
        try:
            asyncio.run(store.add_rollout(*rollout(number, text=noise(number))))
        except StorageFull as error:
            assert str(store.path) in error.message
            return number
    raise AssertionError("the disk never filled up")


@pytest.mark.megabytes(1)
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(300_000))
    with RunStore.open(small_disk / "run") as store:
        kept = fill(store)
        assert kept >= 3
        with pytest.raises(StorageFull):
            asyncio.run(store.add_rollout(*rollout(kept, text=noise(kept) * 30)))
        assert replies(store) == {f"r{number}": noise(number) for number in range(kept)}
        ballast.unlink()
        asyncio.run(store.add_rollout(*rollout(kept, text=noise(kept))))
    with RunStore.open(small_disk / "run") as store:
        assert replies(store) == {f"r{number}": noise(number) for number in range(kept + 1)}


LIMITED = """
import pathlib, resource, signal, sys
from ramify.store import RunStore
from tests.store.test_full_disk import fill
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with RunStore.open(pathlib.Path(sys.argv[1])) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    print(fill(store))
"""


def test_a_process_that_may_write_no_more_says_so_and_the_next_one_goes_on(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kept = int(done.stdout)
    assert kept >= 3
    with RunStore.open(tmp_path) as store:
        assert replies(store) == {f"r{number}": noise(number) for number in range(kept)}
        asyncio.run(store.add_rollout(*rollout(kept, text=noise(kept))))
        assert len(store.rollouts()) == kept + 1
