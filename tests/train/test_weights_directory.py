"""The directory of published weights, and the removal of those that dead runs left in shm_root memory."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.core.errors import ConfigInvalid, DeadlineExceeded
from ramify.train import weights_directory
from ramify.train.weights_directory import get_weights_directory, lock_directory, remove_stale_directories

LOCK_SCRIPT = """
import sys
from pathlib import Path
from ramify.train import weights_directory
weights_directory.SHM_ROOT = Path(sys.argv[1]).parent
with weights_directory.lock_directory(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def shm_root(tmp_path, monkeypatch):
    """A directory in place of shm_root memory, so that the test removes nothing of other runs."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(weights_directory, "SHM_ROOT", tmp_path / "shm")
    return tmp_path / "shm"


def make_directory(directory: Path) -> Path:
    (directory / "0-000001").mkdir(parents=True)
    (directory / "0-000001" / "manifest.json").write_text("{}")
    return directory


def test_every_run_has_a_weights_directory_of_its_own(tmp_path, monkeypatch):
    assert get_weights_directory(tmp_path, "disk") == tmp_path / "weights"
    shm_root = get_weights_directory(tmp_path / "a", "shm")
    assert shm_root.parent == Path("/dev/shm")
    assert shm_root == get_weights_directory(tmp_path / "a", "shm") != get_weights_directory(tmp_path / "b", "shm")
    monkeypatch.setattr(weights_directory, "SHM_ROOT", tmp_path / "none")
    with pytest.raises(ConfigInvalid, match="use 'disk'"):
        get_weights_directory(tmp_path, "shm")


@pytest.mark.process
def test_only_the_directories_of_dead_runs_are_removed(shm_root, tmp_path):
    live, dead = (make_directory(get_weights_directory(tmp_path / name, "shm")) for name in ("live", "dead"))
    others = make_directory(shm_root / "of-another-program")
    command = [sys.executable, "-c", LOCK_SCRIPT, str(live)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        assert remove_stale_directories() == [dead]
        assert live.exists() and others.exists() and not dead.exists()
    finally:
        holder.kill()
        holder.communicate()
    assert remove_stale_directories() == [live]
    assert [path.name for path in shm_root.iterdir()] == [others.name]


def test_a_directory_that_is_locked_twice_stays_until_both_locks_are_released(shm_root, tmp_path):
    directory = make_directory(get_weights_directory(tmp_path, "shm"))
    with lock_directory(directory):
        with lock_directory(directory):
            assert remove_stale_directories() == []
        assert remove_stale_directories() == []
    assert remove_stale_directories() == [directory]
    with lock_directory(tmp_path / "weights"):  # a directory on disk needs no lock
        assert not list(tmp_path.glob("*.held"))


@pytest.mark.timeout(60)
def test_directory_that_another_process_never_finishes_removing_is_named(shm_root, tmp_path, monkeypatch):
    monkeypatch.setattr(weights_directory, "LOCK_TIMEOUT", 0.2)
    directory = get_weights_directory(tmp_path / "run", "shm")
    with directory.with_name(f"{directory.name}.held").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DeadlineExceeded, match=r"another process has been removing .* for 0.2 s; end the process"):
            lock_directory(directory).__enter__()
    with lock_directory(directory):
        pass
