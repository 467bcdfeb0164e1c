"""A full disk raises StorageFull, keeps every acknowledged rollout, and the run can be resumed."""

import random
import subprocess
import sys

import pytest

from ramify.core.errors import StorageFull
from ramify.run.store import RunStore
from tests.support.traces import make_rollout, read_replies

pytestmark = pytest.mark.process

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789-+ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def noise(number: int) -> str:
    """Return 40 kB of text that hardly compresses."""
    return "".join(random.Random(number).choices(LETTERS, k=40_000))


async def fill(store: RunStore, limit: int = 1000) -> int:
    """Add rollouts until the disk is full; return how many were acknowledged."""
    for number in range(limit):
        try:
            await store.add_rollout(*make_rollout(number, text=noise(number)))
        except StorageFull as error:
            assert str(store.path) in error.message
            return number
    raise AssertionError("the disk never filled up")


@pytest.mark.megabytes(1)
async def test_a_full_disk_raises_storage_full_until_there_is_room(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(300_000))
    with RunStore.open(small_disk / "run") as store:
        count = await fill(store)
        assert count >= 3
        with pytest.raises(StorageFull):
            await store.add_rollout(*make_rollout(count, text=noise(count) * 30))
        assert read_replies(store) == {f"r{number}": noise(number) for number in range(count)}
        ballast.unlink()
        await store.add_rollout(*make_rollout(count, text=noise(count)))
    with RunStore.open(small_disk / "run") as store:
        assert read_replies(store) == {f"r{number}": noise(number) for number in range(count + 1)}


LIMITED = """
import asyncio, pathlib, resource, signal, sys
from ramify.run.store import RunStore
from tests.run.store.test_full_disk import fill
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with RunStore.open(pathlib.Path(sys.argv[1])) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    print(asyncio.run(fill(store)))
"""


async def test_a_file_size_limit_raises_storage_full_and_the_next_process_resumes(tmp_path):
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    count = int(done.stdout)
    assert count >= 3
    with RunStore.open(tmp_path) as store:
        assert read_replies(store) == {f"r{number}": noise(number) for number in range(count)}
        await store.add_rollout(*make_rollout(count, text=noise(count)))
        assert len(store.rollouts()) == count + 1
