"""`ramify runtime`: what runtimes enforce here, and the removal of what killed processes left."""

import subprocess
import sys
from pathlib import Path

import pytest

from ramify.cli.app import main
from ramify.rollout.runtime import cgroup
from tests.rollout.runtime.conftest import make_ended_owner_name

LEAVE_A_SANDBOX = """
import asyncio, os, signal
from ramify.env import Task
from ramify.rollout.runtime import LocalRuntime

async def leave():
    runtime = LocalRuntime()
    await runtime.start(Task())
    await runtime.spawn("sleep 1000")
    print(runtime.workdir.parent, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(leave())
"""


def test_list_names_every_capability_and_the_reason_for_a_missing_one(capsys):
    assert main(["runtime", "list", "local"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["local", "  usable: yes"]
    assert any(line.startswith("  isolation: no: its programs are not isolated") for line in lines)


@pytest.mark.process
def test_clean_removes_what_a_killed_process_left(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    left = subprocess.run(
        [sys.executable, "-c", LEAVE_A_SANDBOX], stdout=subprocess.PIPE, text=True, check=False
    ).stdout
    directory = Path(left.strip())
    assert directory.parent == tmp_path and directory.is_dir()
    assert main(["runtime", "clean", "local"]) == 0
    assert f"removed directory {directory}" in capsys.readouterr().out
    assert not directory.exists()
    assert main(["runtime", "clean", "local"]) == 0
    assert "removed directory" not in capsys.readouterr().out


def test_clean_ignores_names_that_no_runtime_made(capsys, monkeypatch, tmp_path):
    """An empty marker would be the beginning of every process's marker."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        "ramify.rollout.runtime.local.kill_marked_processes", lambda marker: pytest.fail(f"kills {marker!r}")
    )
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / f"ramify-{make_ended_owner_name('')}").mkdir()
    (tmp_path / f"ramify-{make_ended_owner_name('abc')}").mkdir()
    (tmp_path / f"ramify-{make_ended_owner_name('0' * 16)}").symlink_to(target)
    assert main(["runtime", "clean", "local"]) == 0
    assert "removed directory" not in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 4


def test_clean_goes_on_after_what_cannot_be_removed(capsys, monkeypatch, tmp_path):
    """A group of this process's own name form, whose removal the kernel refuses, and a directory after it."""
    groups = tmp_path / "groups"
    stuck = groups / f"ramify-{make_ended_owner_name(0)}"
    stuck.mkdir(parents=True)
    (stuck / "cgroup.procs").write_text("")  # a file in a directory that is to be removed
    parents = cgroup.CgroupParents({"memory": groups}, {})
    monkeypatch.setattr(cgroup, "find_cgroup_parents", lambda: parents)
    monkeypatch.setattr(cgroup.remove_group, "__defaults__", (0.05,))
    monkeypatch.setattr(cgroup.find_leftover_groups, "__defaults__", (0.05,))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = tmp_path / f"ramify-{make_ended_owner_name('0' * 16)}"
    directory.mkdir()
    assert main(["runtime", "clean", "local"]) == 1
    output = capsys.readouterr()
    assert f"removed directory {directory}" in output.out and not directory.exists()
    assert f"local: 1 not removed: control group {stuck}" in output.err


def test_unknown_runtime_is_refused(capsys):
    assert main(["runtime", "clean", "sandbx"]) == 2
    assert "sandbox" in capsys.readouterr().err
