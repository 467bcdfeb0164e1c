"""The directories of slots: one whose owner was killed is removed when the next slot is opened on its node."""

import subprocess
import sys
import tempfile

import pytest

from ramify.launch.local_launcher import DIRECTORY_PREFIX, SlotDirectory

OWNER = """
import sys, tempfile
from ramify.launch.local_launcher import SlotDirectory
tempfile.tempdir = sys.argv[1]
print(SlotDirectory().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temp_root(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.process
def test_directory_of_a_killed_owner_is_removed_with_the_next_slot(temp_root):
    command = [sys.executable, "-c", OWNER, str(temp_root)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    path = owner.stdout.readline().strip()
    first = SlotDirectory()
    assert sorted(map(str, temp_root.iterdir())) == sorted([path, str(first.path)])  # both have an owner
    owner.kill()
    owner.communicate(timeout=60)
    second = SlotDirectory()
    assert sorted(temp_root.iterdir()) == sorted([first.path, second.path])
    first.remove()
    second.remove()


def test_other_directories_are_kept(temp_root):
    being_created, other = temp_root / f"{DIRECTORY_PREFIX}new", temp_root / "ramify-other"
    being_created.mkdir()
    other.mkdir()
    SlotDirectory().remove()
    assert being_created.is_dir() and other.is_dir()
