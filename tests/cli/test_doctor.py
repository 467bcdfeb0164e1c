"""`ramify doctor`: what this machine has, what it lacks, what that would enable and how to get it."""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import psutil
import pytest

from ramify.cli import doctor_checks as look
from ramify.launch.machine import CgroupLimits, read_cgroup_limits, usable_cores
from ramify.launch.subprocess_probe import run_probe
from ramify.model.precision import cpu_has_bfloat16
from tests.cli.command import ramify_command

EXTRAS = set(metadata("ramify").get_all("Provides-Extra") or [])


def program(directory: Path, name: str, *lines: str) -> None:
    path = directory / name
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]), encoding="utf-8")
    path.chmod(0o755)


def findings(path: Path) -> dict[str, dict]:
    """The doctor's findings on a machine with only the programs in `path`."""
    done = ramify_command("doctor", "--json", env={"PATH": str(path)})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    return {finding["name"]: finding for finding in report["findings"]}


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, dict]:
    """A machine without any of the optional programs."""
    return findings(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def equipped(tmp_path_factory) -> dict[str, dict]:
    """A machine where everything answers."""
    path = tmp_path_factory.mktemp("equipped")
    program(path, "bwrap", 'if [ "$1" = --version ]; then echo bubblewrap 0.8.0; fi')
    program(path, "docker", 'case "$1" in --version) echo Docker version 27.1;; *) echo 27.0;; esac')
    program(path, "node", "echo v20.1.0")
    return findings(path)


@pytest.fixture(scope="module")
def crippled(tmp_path_factory) -> dict[str, dict]:
    """A machine where everything is installed and nothing works."""
    path = tmp_path_factory.mktemp("crippled")
    program(path, "bwrap", '[ "$1" = --version ] && echo bubblewrap 0.8.0 || { echo no user namespaces >&2; exit 1; }')
    program(path, "docker", '[ "$1" = --version ] && echo Docker version 27.1 || { echo no daemon >&2; exit 1; }')
    program(path, "node", "exit 3")
    return findings(path)


# -- the command ------------------------------------------------------------------------------------------------------


def test_everything_asked_for_is_reported(bare):
    fixed = {
        "Python",
        "platform",
        "cores",
        "memory",
        "torch",
        "CPU dtype",
        "CPU operators",
        "CUDA",
        "bubblewrap",
        "docker",
        "Node",
    }
    assert set(bare) == fixed | {f"extra {name}" for name in EXTRAS}


def test_a_missing_piece_says_what_it_would_enable_and_how_to_get_it(bare):
    for name in ("bubblewrap", "docker", "Node"):
        assert bare[name]["state"] == "missing"
    for finding in bare.values():
        if finding["state"] != "ok":
            assert finding["enables"]
            assert finding["get"]


def test_a_piece_that_answers_is_ok(equipped):
    for name, version in (("bubblewrap", "0.8.0"), ("docker", "27.0"), ("Node", "20.1.0")):
        assert equipped[name]["state"] == "ok"
        assert version in equipped[name]["found"]


def test_a_docker_client_without_an_engine_is_not_ok(crippled):
    assert crippled["docker"]["state"] == "broken"
    assert "27.1" in crippled["docker"]["found"]
    assert "no daemon" in crippled["docker"]["found"]


def test_a_bubblewrap_that_may_not_make_a_sandbox_is_not_ok(crippled):
    assert crippled["bubblewrap"]["state"] == "broken"
    assert "no user namespaces" in crippled["bubblewrap"]["found"]


def test_a_node_that_does_not_run_is_not_ok(crippled):
    assert crippled["Node"]["state"] == "broken"
    assert "exit code 3" in crippled["Node"]["found"]


def test_torch_is_asked_in_a_process_of_its_own(bare):
    import torch

    assert bare["torch"]["state"] == "ok"
    assert torch.__version__ in bare["torch"]["found"]
    assert (bare["CUDA"]["state"] == "ok") == torch.cuda.is_available()


def test_the_number_type_of_the_cpu_is_reported_with_its_reason(equipped):
    chosen = "bfloat16 (the type" if cpu_has_bfloat16() else "float32 (the checkpoint is in bfloat16, which this CPU"
    assert f"auto is {chosen}" in equipped["CPU dtype"]["found"]


def test_the_operators_in_c_are_reported_and_why_they_are_missing(bare):
    assert "no C compiler" in bare["CPU operators"]["found"]  # a machine without any program
    assert "float32 on one thread: torch (" in bare["CPU operators"]["found"]


def test_the_doctor_itself_never_loads_torch():
    script = "import sys; from ramify.cli import main; main(['doctor', '--json']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_the_report_for_people_names_everything_without_a_terminal(bare):
    done = ramify_command("doctor", env={"PATH": "", "COLUMNS": "60", "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    for name in bare:
        assert name in done.stdout
    assert "enables" in done.stdout


def test_an_argument_it_does_not_know_is_exit_2():
    assert ramify_command("doctor", "--jsn").returncode == 2


# -- extras -----------------------------------------------------------------------------------------------------------


def test_every_extra_of_the_package_is_explained():
    assert set(look.EXTRA_PURPOSES) == EXTRAS


def test_an_extra_is_missing_when_one_of_its_requirements_is(monkeypatch):
    requires = ["numpy>=2", "msgspec>=0.1; extra == 'local'", "not-a-package[x]>=1; extra == 'local'"]
    monkeypatch.setattr(look, "requires", lambda _: requires)
    finding = next(finding for finding in look.check_extras() if finding.name == "extra local")
    assert finding.state == "missing"
    assert finding.found == "without not-a-package"
    assert "ramify[local]" in finding.get


def test_a_package_that_was_never_installed_is_reported(monkeypatch):
    def requires(_: str) -> list[str]:
        raise PackageNotFoundError

    monkeypatch.setattr(look, "requires", requires)
    assert [finding.state for finding in look.check_extras()] == ["broken"]


# -- cores and memory -------------------------------------------------------------------------------------------------


def test_cores_respect_affinity():
    script = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); " + (
        "from ramify.launch.machine import usable_cores; print(usable_cores())"
    )
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this platform has no affinity")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "1"


def test_cores_respect_a_cgroup_quota():
    assert usable_cores(CgroupLimits(cpus=0.5)) == 1
    assert usable_cores(CgroupLimits(cpus=1.0)) == 1
    assert usable_cores(CgroupLimits(cpus=10_000.0)) == usable_cores(CgroupLimits())


def test_the_tightest_cgroup_on_the_way_up_counts(tmp_path):
    root, inner = tmp_path / "cgroup", tmp_path / "cgroup" / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/a/b\n", encoding="utf-8")
    (root / "cpu.max").write_text("max 100000\n", encoding="utf-8")
    (root / "a" / "cpu.max").write_text("150000 100000\n", encoding="utf-8")
    (inner / "cpu.max").write_text("400000 100000\n", encoding="utf-8")
    (root / "a" / "memory.max").write_text("max\n", encoding="utf-8")
    (inner / "memory.max").write_text("1073741824\n", encoding="utf-8")
    assert read_cgroup_limits(root, tmp_path / "membership") == CgroupLimits(cpus=1.5, memory=2**30)


def test_first_generation_cgroups_are_read_too(tmp_path):
    (tmp_path / "membership").write_text("4:memory:/job\n3:cpu,cpuacct:/job\n", encoding="utf-8")
    for name, file, value in [
        ("memory", "memory.limit_in_bytes", "536870912"),
        ("cpu,cpuacct", "cpu.cfs_quota_us", "200000"),
        ("cpu,cpuacct", "cpu.cfs_period_us", "100000"),
    ]:
        (tmp_path / name / "job").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "job" / file).write_text(f"{value}\n", encoding="utf-8")
    assert read_cgroup_limits(tmp_path, tmp_path / "membership") == CgroupLimits(cpus=2.0, memory=2**29)


def test_no_cgroup_is_no_limit(tmp_path):
    assert read_cgroup_limits(tmp_path / "nowhere", tmp_path / "nothing") == CgroupLimits()


# -- asking other programs --------------------------------------------------------------------------------------------


def test_a_program_that_never_answers_is_given_up_with_its_children(tmp_path):
    program(tmp_path, "hang", f"sleep 600 & echo $! > {tmp_path}/child; wait")
    answer = run_probe([str(tmp_path / "hang")], timeout=2.0)
    assert not answer.ok
    assert "2 s" in answer.text
    child = int((tmp_path / "child").read_text(encoding="utf-8"))
    assert gone(child, within=10.0)


def gone(pid: int, *, within: float) -> bool:
    """Whether a process that was killed is seen to end; nobody may be there to reap it."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_a_program_that_is_not_there_is_an_answer_too():
    answer = run_probe(["no-such-program-anywhere"], timeout=5.0)
    assert not answer.ok
    assert "no-such-program-anywhere" in answer.text
