"""`ramify doctor`: the state of each component, and what a missing one is needed for."""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest

from ramify.cli import doctor
from ramify.cli.doctor import CheckResult, print_report
from ramify.core.console import PipeConsole
from ramify.launch.machine import CgroupLimits, count_usable_cores, read_cgroup_limits
from ramify.model.precision import cpu_has_bfloat16
from ramify.processes.program import run_program
from tests.support.processes import wait_until_ended

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
EXTRAS = set(metadata("ramify").get_all("Provides-Extra") or [])


def write_program(directory: Path, name: str, *lines: str) -> None:
    path = directory / name
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]), encoding="utf-8")
    path.chmod(0o755)


DOCTOR_SCRIPT = "import sys; from ramify.cli import main; main(['doctor', '--json']); sys.exit('torch' in sys.modules)"


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, dict]:
    """The results by name on a machine without any of the optional programs; the command may not import torch."""
    environment = {**os.environ, "PATH": str(tmp_path_factory.mktemp("bare"))}
    command = [sys.executable, "-c", DOCTOR_SCRIPT]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    return {result["name"]: result for result in json.loads(result.stdout)["findings"]}


# -- the command ------------------------------------------------------------------------------------------------------


def test_every_check_is_reported(bare):
    fixed = {
        "Python",
        "platform",
        "cores",
        "memory",
        "torch",
        "CPU dtype",
        "CPU operators",
        "CUDA",
        "Node",
        "bubblewrap",
    }
    assert set(bare) == fixed | {f"extra {name}" for name in EXTRAS}


def test_missing_component_says_what_it_enables_and_how_to_install_it(bare):
    assert bare["Node"]["state"] == "missing"
    assert bare["bubblewrap"]["state"] == "missing"
    for result in bare.values():
        if result["state"] != "ok":
            assert result["enables"]
            assert result["get"]


def test_working_component_is_ok(tmp_path, monkeypatch):
    write_program(tmp_path, "node", "echo v20.1.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [(result.state, result.detail) for result in doctor.check_node()] == [("ok", "20.1.0")]


def test_node_that_does_not_run_is_broken(tmp_path, monkeypatch):
    write_program(tmp_path, "node", "exit 3")
    monkeypatch.setenv("PATH", str(tmp_path))
    [result] = doctor.check_node()
    assert result.state == "broken"
    assert "exit code 3" in result.detail


def test_torch_is_probed_in_a_subprocess(bare):
    import torch

    assert bare["torch"]["state"] == "ok"
    assert torch.__version__ in bare["torch"]["found"]
    assert (bare["CUDA"]["state"] == "ok") == torch.cuda.is_available()


def test_cpu_dtype_is_reported(bare):
    chosen = "bfloat16 (the type" if cpu_has_bfloat16() else "float32 (the checkpoint is in bfloat16, which this CPU"
    assert f"auto is {chosen}" in bare["CPU dtype"]["found"]


def test_cpu_operators_are_reported(bare):
    assert "no C compiler" in bare["CPU operators"]["found"]  # a machine without any program
    assert "float32: torch (" in bare["CPU operators"]["found"]


def test_report_without_a_terminal_names_every_check(bare, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    print_report([CheckResult(*result.values()) for result in bare.values()], PipeConsole())
    output = capsys.readouterr().out
    assert "\x1b" not in output
    for name in bare:
        assert name in output
    assert "needed for: " in output


# -- extras -----------------------------------------------------------------------------------------------------------


def test_every_extra_has_a_purpose():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(doctor.EXTRA_PURPOSES) == set(project["optional-dependencies"])


def test_extra_is_missing_if_one_requirement_is(monkeypatch):
    requires = ["numpy>=2", "msgspec>=0.1; extra == 'local'", "not-a-package[x]>=1; extra == 'local'"]
    monkeypatch.setattr(doctor, "requires", lambda _: requires)
    result = next(result for result in doctor.check_extras() if result.name == "extra local")
    assert result.state == "missing"
    assert result.detail == "missing not-a-package"
    assert "ramify[local]" in result.fix


def test_uninstalled_package_is_reported(monkeypatch):
    def requires(_: str) -> list[str]:
        raise PackageNotFoundError

    monkeypatch.setattr(doctor, "requires", requires)
    assert [result.state for result in doctor.check_extras()] == ["broken"]


# -- cores and memory -------------------------------------------------------------------------------------------------


def test_cores_respect_affinity():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this platform has no affinity")
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(allowed)])
        assert count_usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_cores_respect_a_cgroup_quota():
    assert count_usable_cores(CgroupLimits(cpus=0.5)) == 1
    assert count_usable_cores(CgroupLimits(cpus=1.0)) == 1
    assert count_usable_cores(CgroupLimits(cpus=10_000.0)) == count_usable_cores(CgroupLimits())


def test_tightest_cgroup_of_all_ancestors_counts(tmp_path):
    root, inner = tmp_path / "cgroup", tmp_path / "cgroup" / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/a/b\n", encoding="utf-8")
    (root / "cpu.max").write_text("max 100000\n", encoding="utf-8")
    (root / "a" / "cpu.max").write_text("150000 100000\n", encoding="utf-8")
    (inner / "cpu.max").write_text("400000 100000\n", encoding="utf-8")
    (root / "a" / "memory.max").write_text("max\n", encoding="utf-8")
    (inner / "memory.max").write_text("1073741824\n", encoding="utf-8")
    assert read_cgroup_limits(root, tmp_path / "membership") == CgroupLimits(cpus=1.5, memory=2**30)


def test_cgroup_v1_limits_are_read(tmp_path):
    (tmp_path / "membership").write_text("4:memory:/job\n3:cpu,cpuacct:/job\n", encoding="utf-8")
    for name, file, value in [
        ("memory", "memory.limit_in_bytes", "536870912"),
        ("cpu,cpuacct", "cpu.cfs_quota_us", "200000"),
        ("cpu,cpuacct", "cpu.cfs_period_us", "100000"),
    ]:
        (tmp_path / name / "job").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "job" / file).write_text(f"{value}\n", encoding="utf-8")
    assert read_cgroup_limits(tmp_path, tmp_path / "membership") == CgroupLimits(cpus=2.0, memory=2**29)


def test_no_cgroup_means_no_limit(tmp_path):
    assert read_cgroup_limits(tmp_path / "nowhere", tmp_path / "nothing") == CgroupLimits()


# -- asking other programs --------------------------------------------------------------------------------------------


def test_hanging_program_is_killed_with_its_children(tmp_path):
    write_program(tmp_path, "hang", f"sleep 600 & echo $! > {tmp_path}/child; wait")
    result = run_program([str(tmp_path / "hang")], timeout=1.0)
    assert not result.ok
    assert "1 s" in result.text
    child = int((tmp_path / "child").read_text(encoding="utf-8"))
    wait_until_ended(child)


def test_missing_program_is_a_failed_probe():
    result = run_program(["no-such-program-anywhere"], timeout=5.0)
    assert not result.ok
    assert result.text == "cannot be started: No such file or directory"
