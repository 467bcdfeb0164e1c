"""Control groups: where they can be created, what refuses a limit, and their removal."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from ramify.core.errors import SandboxError
from ramify.env import Task
from ramify.env.runtime import Capability, ResourceLimits
from ramify.rollout.runtime import LocalRuntime, LocalRuntimeConfig, cgroup
from tests.support.processes import is_running


@pytest.fixture
def requires_limits():
    if Capability.PROCESS_LIMIT not in LocalRuntime().capabilities.available:
        pytest.skip("this machine cannot enforce limits")


def find_places(monkeypatch, tmp_path: Path, mounts: str, memberships: str) -> dict[str, Path]:
    """The parents of new groups on a machine with these mounts."""
    for name, text in (("mounts", mounts), ("memberships", memberships)):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cgroup, "MOUNTS_FILE", tmp_path / "mounts")
    monkeypatch.setattr(cgroup, "MEMBERSHIP_FILE", tmp_path / "memberships")
    return dict(cgroup._iter_parent_directories())


def make_group(directory: Path, controllers: str, enabled: str) -> None:
    directory.mkdir(parents=True)
    (directory / "cgroup.controllers").write_text(controllers)
    (directory / "cgroup.subtree_control").write_text(enabled)


def test_group_of_a_container_is_relative_to_the_root_of_its_mount(monkeypatch, tmp_path):
    point = tmp_path / "memory"
    mounts = f"37 33 0:34 /docker/abc {point} rw - cgroup cgroup rw,memory\n"
    assert find_places(monkeypatch, tmp_path, mounts, "4:memory:/docker/abc/mine\n") == {"memory": point / "mine"}
    assert find_places(monkeypatch, tmp_path, mounts, "4:memory:/docker/abc\n") == {"memory": point}
    assert find_places(monkeypatch, tmp_path, mounts, "4:memory:/docker/other\n") == {}
    assert find_places(monkeypatch, tmp_path, mounts, "4:memory:/docker/abc/../other\n") == {}


def test_second_version_uses_the_parent_of_a_group_that_passes_no_controllers_on(monkeypatch, tmp_path):
    point = tmp_path / "unified"
    make_group(point / "app.slice", "memory pids", "memory pids")
    make_group(point / "app.slice" / "mine.scope", "memory pids", "")
    mounts = f"43 33 0:40 / {point} rw - cgroup2 cgroup2 rw\n"
    places = find_places(monkeypatch, tmp_path, mounts, "0::/app.slice/mine.scope\n")
    assert places == {"memory": point / "app.slice", "pids": point / "app.slice"}


def test_group_without_the_file_of_a_limit_is_refused_by_name(tmp_path):
    assert cgroup._find_group_problem(tmp_path, "cpu") == (
        f"control groups in {tmp_path} have no file cpu.max or cpu.cfs_quota_us"
    )
    assert "can be created" in (cgroup._find_group_problem(tmp_path / "missing", "cpu") or "")
    assert list(tmp_path.iterdir()) == []


def test_group_whose_files_cannot_be_examined_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(cgroup.LIMIT_FILES, "cpu", ("c" * 300,))  # an error, also for root
    problem = cgroup._find_group_problem(tmp_path, "cpu")
    assert problem == f"control groups in {tmp_path} cannot be read: File name too long"
    assert list(tmp_path.iterdir()) == []


def test_limit_whose_file_is_missing_is_not_ignored(tmp_path):
    group = cgroup.Cgroup(cgroup.CgroupParents({"pids": tmp_path}, {}))
    (group._directories["pids"] / "pids.max").mkdir()  # cannot be written, as a missing file of the kernel
    with pytest.raises(SandboxError, match=r"pids\.max"):
        group.set_limits(ResourceLimits(max_processes=10))


@pytest.mark.process
def test_group_with_groups_and_processes_in_it_is_removed(requires_limits):
    group = cgroup.Cgroup()
    directory = group._directories["pids"]
    inner = directory / "inner" / "innermost"
    inner.mkdir(parents=True)
    process = subprocess.Popen(cgroup.build_join_command([inner], ["sleep", "1000"]))
    try:
        while str(process.pid) not in (inner / "cgroup.procs").read_text().split():
            pass
        group.remove()
        assert process.wait(10) == -9
        assert not directory.exists()
    finally:
        process.kill()
        process.wait()


@pytest.mark.process
async def test_program_that_hides_its_marker_is_killed_with_its_group(requires_limits):
    async with asyncio.timeout(30):
        runtime = LocalRuntime(LocalRuntimeConfig(limits={"max_processes": 100}))
        await runtime.start(Task())
        hidden = "env -i setsid sh -c 'echo $$ > pid; exec sleep 1000' & while [ ! -s pid ]; do sleep 0.01; done"
        await runtime.run(hidden, timeout=10)
        pid = int(await runtime.read("pid"))
        assert is_running(pid)
        await runtime.stop()
        assert not is_running(pid)
