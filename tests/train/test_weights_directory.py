"""Where published weights lie, and that shared memory does not fill up with those of dead runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from ramify.errors import ConfigInvalid
from ramify.train import weights_directory
from ramify.train.weights_directory import get_weights_directory, lock_directory, remove_stale_directories

HOLDS = """
import sys
from pathlib import Path
from ramify.train import places
places.SHARED = Path(sys.argv[1]).parent
with places.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A place for shared memory of the test's own, so that it sweeps away nobody else's."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(weights_directory, "SHARED", tmp_path / "shm")
    return tmp_path / "shm"


def filled(directory: Path) -> Path:
    (directory / "0-000001").mkdir(parents=True)
    (directory / "0-000001" / "manifest.json").write_text("{}")
    return directory


def test_where_versions_lie_is_the_runs_own(tmp_path, monkeypatch):
    assert get_weights_directory(tmp_path, "disk") == tmp_path / "weights"
    shared = get_weights_directory(tmp_path / "a", "shm")
    assert shared.parent == Path("/dev/shm")
    assert shared == get_weights_directory(tmp_path / "a", "shm") != get_weights_directory(tmp_path / "b", "shm")
    monkeypatch.setattr(weights_directory, "SHARED", tmp_path / "none")
    with pytest.raises(ConfigInvalid, match="use 'disk'"):
        get_weights_directory(tmp_path, "shm")


def test_what_a_dead_run_left_is_swept_away_and_nothing_else(shared, tmp_path):
    lives, dead = (filled(get_weights_directory(tmp_path / name, "shm")) for name in ("lives", "dead"))
    others = filled(shared / "of-another-program")
    command = [sys.executable, "-c", HOLDS, str(lives)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert remove_stale_directories() == [dead]
        assert lives.exists() and others.exists() and not dead.exists()
    finally:
        holder.kill()
        holder.communicate()
    assert remove_stale_directories() == [lives]
    assert [path.name for path in shared.iterdir()] == [others.name]


def test_what_is_held_twice_is_there_until_both_let_go(shared, tmp_path):
    directory = filled(get_weights_directory(tmp_path, "shm"))
    with lock_directory(directory):
        with lock_directory(directory):
            assert remove_stale_directories() == []
        assert remove_stale_directories() == []
    assert remove_stale_directories() == [directory]
    with lock_directory(tmp_path / "weights"):  # on a disk there is nothing to hold
        assert not list(tmp_path.glob("*.held"))
