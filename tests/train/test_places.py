"""Where published weights lie, and that shared memory does not fill up with those of dead runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from ramify.errors import ConfigInvalid
from ramify.train import places
from ramify.train.places import held, sweep, weights_directory

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
    monkeypatch.setattr(places, "SHARED", tmp_path / "shm")
    return tmp_path / "shm"


def filled(directory: Path) -> Path:
    (directory / "0-000001").mkdir(parents=True)
    (directory / "0-000001" / "manifest.json").write_text("{}")
    return directory


def test_where_versions_lie_is_the_runs_own(tmp_path, monkeypatch):
    assert weights_directory(tmp_path, "disk") == tmp_path / "weights"
    shared = weights_directory(tmp_path / "a", "shm")
    assert shared.parent == Path("/dev/shm")
    assert shared == weights_directory(tmp_path / "a", "shm") != weights_directory(tmp_path / "b", "shm")
    monkeypatch.setattr(places, "SHARED", tmp_path / "none")
    with pytest.raises(ConfigInvalid, match="use 'disk'"):
        weights_directory(tmp_path, "shm")


def test_what_a_dead_run_left_is_swept_away_and_nothing_else(shared, tmp_path):
    lives, dead = (filled(weights_directory(tmp_path / name, "shm")) for name in ("lives", "dead"))
    others = filled(shared / "of-another-program")
    command = [sys.executable, "-c", HOLDS, str(lives)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert sweep() == [dead]
        assert lives.exists() and others.exists() and not dead.exists()
    finally:
        holder.kill()
        holder.communicate()
    assert sweep() == [lives]
    assert [path.name for path in shared.iterdir()] == [others.name]


def test_what_is_held_twice_is_there_until_both_let_go(shared, tmp_path):
    directory = filled(weights_directory(tmp_path, "shm"))
    with held(directory):
        with held(directory):
            assert sweep() == []
        assert sweep() == []
    assert sweep() == [directory]
    with held(tmp_path / "weights"):  # on a disk there is nothing to hold
        assert not list(tmp_path.glob("*.held"))
