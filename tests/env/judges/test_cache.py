"""The cache of replies survives kills, is shared by processes, and stays within its size."""

import asyncio
import os
import subprocess
import sys
import time

import pytest

from ramify.env.judges.cache import MAX_TEMPORARY_AGE, ReplyCache, compute_cache_key

WRITER = """
import asyncio, sys
from pathlib import Path
from ramify.env.judges.cache import ReplyCache, compute_cache_key

async def write():
    cache = ReplyCache(Path(sys.argv[1]), 1 << 20)
    for number in range(100_000):
        reply = str(number % 50) * 2000
        await cache.write(compute_cache_key(number % 50), reply)
        print(number, flush=True)

asyncio.run(write())
"""


def test_the_key_depends_on_every_part_and_their_order():
    requests = [["m", [0.0], ["a", "b"]], ["n", [0.0], ["a", "b"]], ["m", [0.5], ["a", "b"]], ["m", [0.0], ["b", "a"]]]
    assert len({compute_cache_key(request) for request in requests}) == len(requests)
    assert compute_cache_key({"a": 1, "b": 2}) == compute_cache_key({"b": 2, "a": 1})


async def test_another_cache_of_the_same_directory_reads_what_was_written(tmp_path):
    key = compute_cache_key("question")
    await ReplyCache(tmp_path, 1 << 20).write(key, "réponse")
    cache = ReplyCache(tmp_path, 1 << 20)
    assert (await cache.read(key), await cache.read(compute_cache_key("other"))) == ("réponse", None)


async def test_a_damaged_file_is_a_miss(tmp_path):
    cache, key = ReplyCache(tmp_path, 1 << 20), compute_cache_key("question")
    await cache.write(key, "reply")
    (path,) = tmp_path.glob("*/*.json")
    path.write_bytes(b"")
    assert await cache.read(key) is None


async def test_the_oldest_replies_are_deleted(tmp_path):
    cache, keys = ReplyCache(tmp_path, 40_000), [compute_cache_key(number) for number in range(80)]
    for age, key in enumerate(reversed(keys)):
        await cache.write(key, "x" * 1000)
        for path in tmp_path.glob(f"*/{key}.json"):
            os.utime(path, (1e9 + age, 1e9 + age))
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 40_000 * (1 + 1 / 16) + 2000
    assert await cache.read(keys[0]) is not None  # the newest
    assert await cache.read(keys[-1]) is None


async def test_temporary_files_of_killed_processes_are_deleted(tmp_path):
    (tmp_path / "ab").mkdir()
    for name, age in (("left.1.0.tmp", 2 * MAX_TEMPORARY_AGE), ("now.1.0.tmp", 0)):
        (tmp_path / "ab" / name).touch()
        os.utime(tmp_path / "ab" / name, (time.time() - age, time.time() - age))
    await ReplyCache(tmp_path, 1 << 20).write(compute_cache_key("question"), "reply")
    assert [path.name for path in tmp_path.glob("*/*.tmp")] == ["now.1.0.tmp"]


async def test_a_disk_that_fails_is_only_logged(tmp_path, caplog):
    (tmp_path / "file").touch()
    cache, key = ReplyCache(tmp_path / "file", 1 << 20), compute_cache_key("question")
    await cache.write(key, "reply")
    assert "not cached" in caplog.text
    assert await cache.read(key) is None


@pytest.mark.process
@pytest.mark.promise
def test_killed_writers_leave_only_complete_replies(tmp_path):
    script = tmp_path / "writer.py"
    script.write_text(WRITER)
    directory = tmp_path / "cache"
    for num_writers, num_writes in ((1, 20), (2, 57)):
        command = [sys.executable, str(script), str(directory)]
        writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(num_writers)]
        for writer in writers:
            assert writer.stdout is not None
            for _ in range(num_writes):
                writer.stdout.readline()
        for writer in writers:
            writer.kill()
            writer.communicate()
    cache = ReplyCache(directory, 1 << 20)
    replies = [asyncio.run(cache.read(compute_cache_key(number))) for number in range(50)]
    assert replies == [str(number) * 2000 for number in range(50)]
