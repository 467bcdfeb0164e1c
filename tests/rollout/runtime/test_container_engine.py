"""The limit on starts: its file is shared by all processes, and a start that only waits takes nothing."""

import asyncio

import pytest

from ramify.core.errors import SandboxError
from ramify.rollout.runtime.container_engine import claim_start, wait_for_start


def test_starts_are_an_interval_apart(tmp_path):
    file = tmp_path / "starts"
    assert claim_start(file, 2.0, 100.0) == 0.0
    assert claim_start(file, 2.0, 100.5) == 1.5
    assert claim_start(file, 2.0, 101.5) == 0.5  # the earlier one that waits has not delayed it
    assert claim_start(file, 2.0, 102.0) == 0.0
    assert claim_start(file, 0.5, 102.25) == 0.25  # another source has an interval of its own


def test_time_of_an_earlier_boot_is_ignored(tmp_path):
    file = tmp_path / "starts"
    assert claim_start(file, 2.0, 5000.0) == 0.0
    assert claim_start(file, 2.0, 3.0) == 0.0
    assert claim_start(file, 2.0, 4.0) == 1.0


def test_link_in_the_place_of_the_file_is_refused(tmp_path):
    (tmp_path / "starts").symlink_to(tmp_path / "other")
    with pytest.raises(SandboxError, match="cannot be opened"):
        claim_start(tmp_path / "starts", 2.0, 1.0)


def test_content_that_is_not_a_time_is_replaced(tmp_path):
    (tmp_path / "starts").write_bytes(b"\xff")
    assert claim_start(tmp_path / "starts", 2.0, 1.0) == 0.0
    assert claim_start(tmp_path / "starts", 2.0, 2.0) == 1.0


async def test_all_who_wait_start(tmp_path):
    async with asyncio.timeout(60):
        await asyncio.gather(*(wait_for_start(200.0, tmp_path / "starts") for _ in range(5)))
