"""`ramify init`: the generated package works, and existing files are not overwritten."""

import subprocess
import sys
import tomllib

import pytest

from ramify.cli import main
from ramify.model.resolve import resolve_model_path
from tools.tiny.local_model import open_local_model


@pytest.mark.process
def test_generated_package_works_unchanged(ramify, tmp_path):
    place = tmp_path / "letter-count"
    result = ramify("init", "letter-count", "-o", str(place))
    assert result.returncode == 0, result.stderr
    assert "ramify validate letter_count.py" in result.stdout
    project = tomllib.loads((place / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["ramify.tasksets"] == {"letter-count": "letter_count:LetterCount"}
    assert "ramify validate letter-count" in (place / "README.md").read_text()
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert tested.returncode == 0, tested.stdout
    assert "1 passed" in tested.stdout


async def test_rewards_of_tiny_differ_within_a_task(tmp_path):
    """A group of equal rewards gives no training signal, so a run would never make a step."""
    assert main(["init", "letter-count", "-o", str(tmp_path / "new")]) == 0
    taskset = {"id": f"{tmp_path}/new/letter_count.py"}
    with open_local_model(resolve_model_path("tiny")) as player:
        groups = await player.run_rollouts(taskset, 4, 6, seed=0)
    rewards = [[trace.reward for trace in group] for group in groups]
    assert sum(len(set(group)) > 1 for group in rewards) >= 3, rewards


def test_existing_files_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "mine").write_text("mine")
    assert main(["init", "letter-count", "-o", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_invalid_name_is_refused(tmp_path, capsys):
    for name in ("Letter Count", "1st", "class", "a/b"):
        assert main(["init", name, "-o", str(tmp_path / "new")]) == 2
        assert repr(name) in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_name_of_an_existing_module_or_taskset_is_refused(tmp_path, capsys):
    for name in ("wordle", "random", "numpy", "ramify"):
        assert main(["init", name, "-o", str(tmp_path / "new")]) == 2
        assert repr(name) in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_unwritable_directory_is_a_named_failure(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["init", "letter-count", "-o", str(tmp_path / "file" / "new")]) == 1
    assert "StorageFailed" in capsys.readouterr().err
